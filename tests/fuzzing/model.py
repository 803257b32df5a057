"""Drawn models: the root code around the units, the data, and the loss.

Legend: B samples, T tokens, D width, H heads, V words; ``x`` without a suffix is [B, T, D]
or [T, B, D], as the model's shape says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzzing.shapes import ModelShape, StepShape, UnitShape
from tests.fuzzing.units import AUX_SCALE, Block, Memory, Table, Wrapper, rows_of_result

IGNORED = -100  # target of a token without loss
NUM_POSITIONS = 16  # the longest sequence


@dataclass(frozen=True, slots=True)
class ModelResult:
    """What a model returns that leaves the loss to others."""

    logits: Tensor
    energy: Tensor


torch.export.register_dataclass(ModelResult)


@dataclass
class _Run:
    """One forward in progress."""

    num_samples: int
    length: int
    causal: Tensor | None = None  # [T, T]
    padding: Tensor | None = None  # [B, T]
    bias: Tensor | None = None  # [T, T]
    position: Tensor | None = None  # [T, D]
    states: Any = None
    memory: Memory = field(default_factory=Memory)
    energies: list[Tensor] = field(default_factory=list)  # each a sum over samples


class Head(nn.Module):
    """Norm and words; with targets the sum of the losses and the number of valid tokens."""

    def __init__(self, width: int, num_words: int, *, gives_mean: bool) -> None:
        super().__init__()
        self.gives_mean = gives_mean
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, num_words, bias=False)

    def forward(
        self, x: Tensor, targets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        logits = self.out(self.norm(x))
        if targets is None:
            return logits
        loss_sum, num_tokens = weighted_loss(logits, targets, weights)
        return (loss_sum / num_tokens if self.gives_mean else loss_sum), num_tokens


class FuzzModel(nn.Module):
    """Embedding, units in some order, head; and whatever else its shape says."""

    causal: Tensor
    calls: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.embedding = nn.Embedding(shape.num_words, width)
        blocks = [Block(each, width) for each in shape.units]
        self.blocks = nn.ModuleList(
            Wrapper(block) if block.shape.is_wrapped else block for block in blocks
        )
        for block, other in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
            block.others.append(other)
            if block.shape.odd == "read by unit":
                other.sources.append(block)
        if shape.table:
            self.table = Table(width, NUM_POSITIONS, is_bias=shape.table == "bias")
        if shape.position:
            self.position = nn.Parameter(0.3 * torch.randn(1, NUM_POSITIONS, width))
        self.shift_H = nn.Parameter(torch.randn(shape.num_heads))
        self.dropout = nn.Dropout(shape.root_dropout)
        if shape.side in ("unused", "idle", "no grad"):
            self.beside = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        if shape.norm_in_root:
            self.last_norm = nn.LayerNorm(width)
        if shape.root == "batchnorm":
            self.root_batchnorm = nn.BatchNorm1d(width)
        if shape.root == "counter buffer":
            self.register_buffer("calls", torch.zeros(()))
        self.num_forwards = 0
        if shape.tied == "root head":
            self.lm_head = nn.Linear(width, shape.num_words, bias=False)
        else:
            self.head = Head(width, shape.num_words, gives_mean=shape.head == "mean")
        self._tie()
        mask = torch.ones(NUM_POSITIONS, NUM_POSITIONS).tril().bool()
        self.register_buffer("causal", mask)
        for fqn, param in self.named_parameters():
            param.requires_grad_(not fqn.startswith(shape.frozen) if shape.frozen else True)

    def _tie(self) -> None:
        tied = self.shape.tied
        if tied == "head":
            self.head.out.weight = self.embedding.weight
        elif tied == "root head":
            self.lm_head.weight = self.embedding.weight
        elif tied == "blocks":
            self.block(0).up.weight = self.block(1).up.weight

    def block(self, i: int) -> Block:
        """Block ``i`` itself, without what wraps it."""
        found = self.blocks[i]
        inner = found.inner if isinstance(found, Wrapper) else found
        assert isinstance(inner, Block)
        return inner

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Any:
        run = _Run(tokens.shape[self.shape.batch_at], tokens.shape[1 - self.shape.batch_at])
        self._prepare(run, tokens, mask)
        x = self.embedding(tokens)
        if table is not None:
            x = x + (table[:, None] if self.shape.batch_at else table)
        x = self._before_units(x, run)
        for place, i in enumerate(self.shape.order):
            if place == 1 and self._skips(tokens):
                continue
            if place and self.shape.root_dropout:
                x = self.dropout(x)
            x = self._through(i, x, run)
        x = self._after_units(x, run)
        return self._finish(x, targets, weights, run)

    def _skips(self, tokens: Tensor) -> bool:
        if self.shape.root == "skips a unit by values":
            return bool(tokens.sum() % 2)
        length = tokens.shape[1 - self.shape.batch_at]
        return self.shape.root == "skips a unit by length" and length % 2 == 1

    # Around the units #

    def _prepare(self, run: _Run, tokens: Tensor, mask: Tensor | None) -> None:
        """Masks and tables for every unit."""
        tokens_BT = tokens.T if self.shape.batch_at else tokens
        kind = self.shape.mask
        if kind == "causal":
            run.causal = self.causal[: run.length, : run.length]
        elif kind == "computed":
            size = (run.length, run.length)
            run.causal = torch.ones(size, device=tokens.device).tril().bool()
        elif kind in ("padding", "padding by value"):
            run.padding = tokens_BT != 0
            run.padding[:, 0] = True
            if kind == "padding by value" and bool(run.padding.all()):
                run.padding = None  # nothing to hide, so no mask
        elif kind == "padding given sometimes" and mask is not None:
            run.padding = mask.T if self.shape.batch_at else mask
        if self.shape.table == "bias":
            run.bias = self.table(run.length)
        elif self.shape.table == "position":
            run.position = self.table(torch.arange(run.length))

    def _before_units(self, x: Tensor, run: _Run) -> Tensor:
        shape = self.shape
        at = shape.batch_at
        if shape.position:
            position = self.position[:, : run.length]
            x = x + (position.transpose(0, 1) if at else position)
        if shape.side == "no grad":
            with torch.no_grad():
                beside = self.beside(x)
            x = x + 0.1 * beside
        elif shape.side == "unused":
            self.beside(x)
        if shape.root == "mixes samples":
            x = x - 0.3 * x.mean(at, keepdim=True)
        elif shape.root == "flips samples":
            x = x.flip(at)
        elif shape.root == "batchnorm":
            x = self.root_batchnorm(x.flatten(0, 1)).view_as(x)
        elif shape.root == "functional dropout":
            x = F.dropout(x, 0.3, training=self.training)
        elif shape.root == "reads parameter of unit":
            run.energies.append(self.block(0).norm.weight.square().sum() * run.num_samples)
        elif shape.root == "counter buffer" and self.training:
            self.calls += 1
        elif shape.root == "counts forwards":
            self.num_forwards += self.training
            x = x * (1 + 0.1 * self.num_forwards)
        elif shape.root == "adds a mean":
            run.energies.append(x.square().mean())
        return x

    def _after_units(self, x: Tensor, run: _Run) -> Tensor:
        if self.shape.root == "flips samples":
            x = x.flip(self.shape.batch_at)
        if self.shape.norm_in_root:
            x = self.last_norm(x)
        for i, shape in enumerate(self.shape.units):
            block = self.block(i)
            if shape.odd.startswith("sets ") and block.attribute is not None:
                run.energies.append(block.attribute.sum())
            elif shape.odd.startswith("hook"):
                run.energies += [each.sum() for each in block.captured]
                block.captured.clear()
        return x

    def _finish(
        self, x: Tensor, targets: Tensor | None, weights: Tensor | None, run: _Run
    ) -> Any:
        energy = sum(run.energies, start=x.new_zeros(()))
        kind = self.shape.head
        if kind in ("loss", "mean"):
            loss, num_tokens = self.head(x, targets, weights)
            loss_sum = loss * num_tokens if kind == "mean" else loss
            return loss_sum + energy, num_tokens
        if self.shape.tied == "root":
            logits = F.linear(x, self.embedding.weight) + self.head(x)
        elif self.shape.tied == "root head":
            logits = self.lm_head(x)
        else:
            logits = self.head(x)
        if kind == "root":
            assert targets is not None
            loss_sum, num_tokens = weighted_loss(logits, targets, weights)
            return loss_sum + energy, num_tokens
        if kind == "loss_fn" or self.shape.output == "tensor":
            return logits
        if self.shape.output == "dict":
            return {"energy": energy, "logits": logits, "name": "logits"}
        if self.shape.output == "dataclass":
            return ModelResult(logits, energy)
        return logits, energy

    # Through one unit #

    def _through(self, i: int, x: Tensor, run: _Run) -> Tensor:
        """Bring ``x`` into the layout that unit ``i`` wants, call it, and bring it back."""
        shape = self.shape.units[i]
        x_BTD = x.transpose(0, 1) if self.shape.batch_at else x
        x_NTD = self._folded(x_BTD, shape)
        context = self._context(i, shape, run, x_NTD)
        given = x_NTD.transpose(0, 1) if shape.batch_at else x_NTD
        if shape.odd == "inner called":
            given = given + 0.1 * self.block(i).core(given)
        y, aux, states = rows_of_result(self.blocks[i](given, **context))
        if states is not None:
            run.states = states
        y_NTD = y.transpose(0, 1) if shape.batch_at else y
        if aux is not None:
            is_sum = shape.aux in ("sum", "selected", "rows", "rare sum")
            weight: Any = 1 if is_sum else run.num_samples
            if shape.aux == "mean of valid" and run.padding is not None:
                weight = run.padding.sum()
            elif shape.aux == "mean of valid":
                weight = run.num_samples * run.length
            run.energies.append(aux.sum() * weight)
        self._collect(shape, context, run)
        y_BTD = self._unfolded(y_NTD, shape)
        return y_BTD.transpose(0, 1) if self.shape.batch_at else y_BTD

    def _folded(self, x_BTD: Tensor, shape: UnitShape) -> Tensor:
        num_heads = self.shape.num_heads
        if not shape.fold:
            return x_BTD
        if shape.fold == "tile":
            return x_BTD.repeat(num_heads, 1, 1) * self._head_gain(x_BTD, shape)
        return x_BTD.repeat_interleave(num_heads, 0) * self._head_gain(x_BTD, shape)

    def _head_gain(self, x_BTD: Tensor, shape: UnitShape) -> Tensor:
        """One number for each row of a fold, by its head: [B*H, 1, 1]."""
        gain_H = 1 + 0.3 * self.shift_H
        if shape.fold == "tile":
            return gain_H.repeat_interleave(len(x_BTD))[:, None, None]
        return gain_H.repeat(len(x_BTD))[:, None, None]

    def _unfolded(self, y_NTD: Tensor, shape: UnitShape) -> Tensor:
        num_heads = self.shape.num_heads
        if shape.fold == "tile":
            return y_NTD.unflatten(0, (num_heads, -1)).mean(0)
        return y_NTD.unflatten(0, (-1, num_heads)).mean(1) if shape.fold else y_NTD

    def _context(self, i: int, shape: UnitShape, run: _Run, x_NTD: Tensor) -> dict[str, Any]:
        """What the unit is passed besides; and what is laid where it will look."""
        padding = run.padding
        if padding is not None and shape.fold == "tile":
            padding = padding.repeat(self.shape.num_heads, 1)
        elif padding is not None and shape.fold:
            padding = padding.repeat_interleave(self.shape.num_heads, 0)
        context: dict[str, Any] = {"causal": run.causal, "padding": padding}
        context |= {"bias": run.bias, "position": run.position}
        if shape.core == "recurrent":
            context["states"] = run.states or self._first_states(x_NTD)
        rows_NTD = x_NTD.detach().tanh() + 1.5
        if shape.odd == "hidden rows":
            self.block(i).hidden = rows_NTD
        elif shape.odd == "hidden table":
            self.block(i).hidden = torch.linspace(0.5, 1.5, run.length).to(x_NTD)[:, None]
        elif shape.odd in ("appends", "fills"):
            context["bag"] = [] if shape.odd == "appends" else {}
        elif shape.odd == "cache":
            context["memory"] = run.memory
        elif shape.odd == "writes on shared":
            context["shared"] = torch.zeros_like(x_NTD)
        elif shape.odd.startswith("closure"):
            shift_H = self.shift_H

            def add(y_NTD: Tensor) -> Tensor:
                is_rows = shape.odd == "closure of rows"
                return y_NTD * rows_NTD if is_rows else y_NTD * (1 + 0.1 * shift_H[0])

            context["function"] = add
        return context

    def _first_states(self, x_NTD: Tensor) -> tuple[Tensor, Tensor]:
        zeros = x_NTD.new_zeros(1, x_NTD.shape[0], x_NTD.shape[2])
        return zeros, zeros.clone()

    def _collect(self, shape: UnitShape, context: dict[str, Any], run: _Run) -> None:
        """What the unit left in objects that it was passed."""
        if shape.odd == "appends":
            run.energies += context["bag"]
        elif shape.odd == "fills":
            run.energies.append(context["bag"]["energy"])
        elif shape.odd == "writes on shared":
            run.energies.append(AUX_SCALE * (context["shared"] * self.shift_H[0]).sum())


def weighted_loss(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum over tokens with a target, each as heavy as its word, and their number."""
    loss_sum = F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        weight=weights,
        ignore_index=IGNORED,
        reduction="sum",
    )
    return loss_sum, (targets != IGNORED).sum()


# Data

Batch = dict[str, Tensor | None]


def make_batch(shape: ModelShape, step: StepShape) -> Batch:
    """A global batch from torch's own generator; some targets are ignored."""
    num_samples = sum(step.sizes)
    size = (num_samples, step.length)
    targets = torch.randint(0, shape.num_words, size)
    targets[torch.rand(size) < 0.3] = IGNORED
    targets[:, 0] = 0
    low = int(shape.mask == "padding by value" and bool(torch.rand(()) < 0.5))
    batch: Batch = {"tokens": torch.randint(low, shape.num_words, size), "targets": targets}
    mask = torch.rand(size) < 0.7
    mask[:, 0] = True
    if shape.mask == "padding given sometimes" and step.has_mask:
        batch["mask"] = mask
    if shape.batch_at:
        batch = {name: None if t is None else t.T.contiguous() for name, t in batch.items()}
    if shape.weights:
        batch["weights"] = torch.linspace(0.5, 1.5, shape.num_words, dtype=torch.float64)
    if shape.given_table:
        batch["table"] = torch.randn(step.length, shape.width, dtype=torch.float64)
    return batch


def part_of(shape: ModelShape, batch: Batch, first: int, num_samples: int) -> Batch:
    """``num_samples`` samples of ``batch`` from ``first`` on."""
    return {
        name: t
        if t is None or name in ("weights", "table")
        else t.narrow(shape.batch_at, first, num_samples)
        for name, t in batch.items()
    }


def call_model(shape: ModelShape, model: Callable[..., Any], batch: Batch) -> Any:
    """The model's output, and nothing more."""
    targets = batch["targets"]
    others = {name: batch[name] for name in ("mask", "weights", "table") if name in batch}
    if shape.head in ("loss", "mean", "root"):
        return model(batch["tokens"], targets, **others)
    others.pop("weights", None)
    return model(batch["tokens"], **others)


def loss_of(shape: ModelShape, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum of the losses and number of tokens, of what the model returned."""
    if shape.head in ("loss", "mean", "root"):
        return output
    targets, weights = batch["targets"], batch.get("weights")
    assert targets is not None
    if shape.head == "loss_fn":  # which HetFSDP has applied already
        return weighted_loss(output, targets) if isinstance(output, Tensor) else output
    if isinstance(output, Tensor):
        return weighted_loss(output, targets, weights)
    if isinstance(output, dict):
        logits, energy = output["logits"], output["energy"]
    elif isinstance(output, ModelResult):
        logits, energy = output.logits, output.energy
    else:
        logits, energy = output
    loss_sum, num_tokens = weighted_loss(logits, targets, weights)
    return loss_sum + energy, num_tokens
