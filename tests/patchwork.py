"""A model put together of everything that has been seen to go wrong, and cases of a seed."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import DeviceSpec, HetFSDP, Plan
from tests.parity import Batch, Course, Problem

IGNORED = -100  # target of a token without loss


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Which traits a ``Patchwork`` has."""

    width: int
    hidden: int
    num_tokens: int  # in a sample
    num_words: int
    order: tuple[int, ...]  # of calls of the blocks; a repeated one is shared
    mixes: tuple[bool, ...]  # per block: takes and returns much more than one tensor
    is_tied: bool
    head: str  # "loss": in the head; "logits": loss outside; "loss_fn": given to HetFSDP
    dropout: float
    mask: str  # "buffer", or "computed" in each forward
    position_in: str  # "root" adds it before the blocks, "blocks" are passed it
    frozen: tuple[str, ...]  # prefixes of parameter names
    has_side: bool  # a unit whose output nobody uses
    has_idle: bool  # a unit that is never called
    has_unused_param: bool


class MlpBlock(nn.Module):
    """A tensor in, a tensor out; a 0-d parameter, and perhaps one without a gradient."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.dropout = nn.Dropout(shape.dropout)
        self.unused = nn.Parameter(torch.randn(3, 2)) if shape.has_unused_param else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.gain * self.dropout(self.down(F.gelu(self.up(self.norm(x_BTD)))))


class MixBlock(nn.Module):
    """Keyword, nested, shared and integer inputs; nested outputs of which one is summed."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.words = nn.Embedding(shape.num_words, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self, x_BTD: Tensor, *, mask: Tensor, context: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        tokens_BT, (position_1TD, scale) = context["nested"]
        z_BTD = self.norm(x_BTD)
        if position_1TD is not None:
            z_BTD = z_BTD + position_1TD
        q, k, v = self.qkv(z_BTD).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, float("-inf"))
        y_BTD = self.dropout(scores.softmax(-1)) @ v + self.words(tokens_BT)
        energy = 1e-3 * y_BTD.square().sum()
        features = {"mean": y_BTD.mean(1), "tokens": tokens_BT + 1, "name": "mix"}
        return x_BTD + y_BTD, {"energy": energy, "features": features}


class LossHead(nn.Module):
    """Norm, head and loss: the sum over the microbatch's valid tokens and their number."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.out = nn.Linear(shape.width, shape.num_words, bias=False)

    def forward(
        self, x_BTD: Tensor, targets_BT: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        logits_BTV = self.out(self.norm(x_BTD))
        return logits_BTV if targets_BT is None else masked_loss(logits_BTV, targets_BT)


class Patchwork(nn.Module):
    """Embedding, blocks in some order, head; traits as its shape says."""

    mask: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.num_words, shape.width)
        self.position = nn.Parameter(0.3 * torch.randn(1, shape.num_tokens, shape.width))
        self.blocks = nn.ModuleList(
            MixBlock(shape) if mixes else MlpBlock(shape) for mixes in shape.mixes
        )
        self.side = MlpBlock(shape) if shape.has_side else None
        self.idle = nn.Linear(shape.width, shape.hidden) if shape.has_idle else None
        self.head = LossHead(shape)
        if shape.is_tied:
            self.head.out.weight = self.embedding.weight
        if shape.mask == "buffer":
            mask = torch.ones(shape.num_tokens, shape.num_tokens).tril().bool()
            self.register_buffer("mask", mask)
        for fqn, param in self.named_parameters():
            param.requires_grad_(not fqn.startswith(shape.frozen) if shape.frozen else True)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Any:
        x_BTD = self.embedding(tokens_BT)
        mask = self._mask(tokens_BT)
        passed = self.position if self.shape.position_in == "blocks" else None
        if passed is None:
            x_BTD = x_BTD + self.position
        energies = []
        for i in self.shape.order:
            if not self.shape.mixes[i]:
                x_BTD = self.blocks[i](x_BTD)
                continue
            context = {"nested": [tokens_BT, (passed, 0.4)]}
            x_BTD, more = self.blocks[i](x_BTD, mask=mask, context=context)
            energies.append(more["energy"])
            assert more["features"]["name"] == "mix"
            if i:  # of block 0 an output goes unused
                x_BTD = x_BTD + 0.1 * more["features"]["mean"][:, None]
        if self.side is not None:
            self.side(x_BTD)
        energy = sum(energies, start=x_BTD.new_zeros(()))
        if self.shape.head == "loss":
            loss_sum, num_tokens = self.head(x_BTD, targets_BT)
            return loss_sum + energy, num_tokens
        if self.shape.head == "logits":
            return self.head(x_BTD), energy
        return self.head(x_BTD)

    def _mask(self, tokens_BT: Tensor) -> Tensor:
        if self.shape.mask == "buffer":
            return self.mask
        num_tokens = tokens_BT.shape[1]
        return torch.ones(num_tokens, num_tokens, device=tokens_BT.device).tril().bool()


def masked_loss(logits_BTV: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over tokens with a target, and their number."""
    loss_sum = F.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss_sum, (targets_BT != IGNORED).sum()


def patchwork_problem(shape: ModelShape, **options: Any) -> Problem:
    """A ``Patchwork`` in float64 with masked targets."""

    def make_batch(num_samples: int) -> Batch:
        size = (num_samples, shape.num_tokens)
        targets = torch.randint(0, shape.num_words, size)
        targets[torch.rand(size) < 0.3] = IGNORED
        masked = torch.rand(num_samples) < 0.4  # whole samples: on some ranks all of them
        masked[torch.randint(0, num_samples, ())] = False
        targets[masked] = IGNORED
        targets[~masked, 0] = 0
        return {"tokens": torch.randint(0, shape.num_words, size), "targets": targets}

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | int]:
        tokens, targets = batch["tokens"], batch["targets"]
        if shape.head == "loss":
            return model(tokens, targets)
        if shape.head == "logits":
            logits, energy = model(tokens)
            loss_sum, num_tokens = masked_loss(logits, targets)
            return loss_sum + energy, num_tokens
        if isinstance(model, HetFSDP):
            return model(tokens, loss_inputs=(targets,))
        return masked_loss(model(tokens), targets)

    if shape.head == "loss_fn":
        options["loss_fn"] = masked_loss
    return Problem(
        make_module=lambda: Patchwork(shape).double(),
        make_batch=make_batch,
        loss=loss,
        options=options,
    )


# Cases made of a seed.


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drawn problem with a plan and a course."""

    seed: int
    shape: ModelShape
    plan: Plan
    course: Course
    options: dict[str, Any]
    precision: str = "float64"
    refused: str | None = None  # what a refusal says, where there has to be one

    @property
    def problem(self) -> Problem:
        """The model and its data."""
        return patchwork_problem(self.shape, **self.options)

    def __str__(self) -> str:
        ranks = [
            f"{rank.microbatch_sizes} share {rank.state_share:.3f} "
            f"recomputes {rank.recomputed_units} on {rank.device}"
            for rank in self.plan.ranks
        ]
        return (
            f"seed {self.seed}, {self.precision}: {self.plan.form}, "
            f"{self.shape}, {self.course}, {self.options}, ranks:\n" + "\n".join(ranks)
        )


def draw_case(seed: int, *, world_size: int) -> Case:
    """The case of that seed: the same in every process."""
    draw = random.Random(f"{seed}/{world_size}")
    plan, kinds = draw_plan(draw, world_size)
    shape = draw_shape(draw)
    full = tuple(rank.rank_batch_size for rank in plan.ranks)
    sizes = (full, full, _shorter(draw, full) if draw.random() < 0.4 else full)
    options: dict[str, Any] = {"seed": draw.randrange(100)}
    unit_choices: list[Any] = [
        None,
        None,
        tuple({MixBlock if mixes else MlpBlock: None for mixes in shape.mixes}),
        ("embedding", "blocks.0", "head"),
        ("blocks.1",),
        (nn.Embedding, nn.Linear),
    ]
    if shape.dropout:
        unit_choices = unit_choices[:3]  # the root runs no microbatches: no dropout there
    if shape.head == "loss_fn":
        unit_choices = unit_choices[:5]  # the last linear layer may be one never called
    units = draw.choice(unit_choices)
    if units is not None:
        if shape.head == "loss_fn":
            units = (*units, "head") if "head" not in units else units
        options["units"] = units
    course = Course(
        rank_batch_sizes=sizes,
        optimizer=draw.choice(["sgd", "adamw"]),
        clip_at=draw.choice([None, 0.3, 2.0]),
        kinds=kinds,
        has_dropout=shape.dropout > 0,
        calls_empty=draw.random() < 0.5,
        steps_between_zero_grad=draw.choice([1, 1, 1, 3]),
    )
    return Case(seed=seed, shape=shape, plan=plan, course=course, options=options)


def draw_rounds(seed: int, *, world_size: int) -> Case:
    """The case of that seed in several rounds, or with the flags of several rounds in one.

    Last rounds are ragged; some rounds have no tokens, and on some ranks no samples.
    """
    case = draw_case(seed, world_size=world_size)
    draw = random.Random(f"rounds {seed}/{world_size}")
    gathers = draw.randrange(3)
    round_size = case.plan.round_size
    plan = replace(
        case.plan,
        num_rounds=draw.choice([1, 2, 2, 3, 3, 4, 5]),
        reshard_after_forward=gathers == 0,
        reshard_after_backward=gathers < 2,
        reduce_each_round=draw.random() < 0.5,
        last_round_size=draw.choice([None, draw.randint(1, round_size)]),
    )
    positions, rounds = range(world_size), range(plan.num_rounds)
    dealt = tuple(len(plan.round_samples(i, r)) for r in rounds for i in positions)
    full = [rank.rank_batch_size for rank in plan.ranks]
    shorter = [n for r in rounds for n in _shorter(draw, tuple(full))]
    if plan.num_rounds > 1 and draw.random() < 0.3:  # a round without samples
        shorter[world_size:][:world_size] = [0] * world_size
    sizes = (dealt, dealt, tuple(shorter))
    blank = [
        tuple(r for r in rounds if draw.random() < 0.3)[: plan.num_rounds - 1] for _ in sizes
    ]
    course = replace(
        case.course,
        rank_batch_sizes=sizes,
        blank_rounds=tuple(blank),
        blank_target=IGNORED,
    )
    return replace(case, plan=plan, course=course)


def draw_plan(draw: random.Random, world_size: int) -> tuple[Plan, tuple[str, ...] | None]:
    """A plan with zeros of all sorts, and the kinds of the ranks if their order matters."""
    microbatch_sizes = [draw.choice([0, 1, 1, 2, 3, 4]) for _ in range(world_size)]
    if not any(microbatch_sizes):
        microbatch_sizes[draw.randrange(world_size)] = draw.choice([1, 2, 3])
    batches = [size and size * draw.randint(1, 3) - draw.randrange(size)
               for size in microbatch_sizes]  # fmt: skip
    weights = [draw.choice([0.0, 0.0, 1.0, 1.0, 0.01, draw.random()]) for _ in batches]
    if not any(weights):
        weights[draw.randrange(world_size)] = 1.0
    kinds, devices = None, None
    if world_size > 1 and draw.random() < 0.5:
        kinds = tuple(f"kind {i}" for i in range(world_size))
        devices = [DeviceSpec(kind=k) for k in draw.sample(kinds, world_size)]
    patterns = ("blocks.*", "blocks.[0-1]", "*.0", "embedding", "head")
    recompute = [
        draw.choice([False, True, draw.sample(patterns, 2)]) for _ in range(world_size)
    ]
    plan = Plan.by_hand(
        microbatch_sizes=microbatch_sizes,
        rank_batch_sizes=batches,
        state_shares=[weight / sum(weights) for weight in weights],
        recompute=recompute,
        devices=devices,
        reshard_after_forward=draw.random() < 0.7,
    )
    return plan, kinds


def _shorter(draw: random.Random, full: tuple[int, ...]) -> tuple[int, ...]:
    """Rank batches of a last, smaller global batch; at least one sample in all."""
    sizes = [draw.randint(0, size) for size in full]
    if not any(sizes):
        sizes[full.index(max(full))] = 1
    return tuple(sizes)


def draw_shape(draw: random.Random) -> ModelShape:
    orders = [(0, 1), (0, 1, 2), (0, 1, 0), (0, 0, 1), (1, 0, 1, 2), (0, 1, 2, 0)]
    order = draw.choice(orders)
    frozen_choices: list[tuple[str, ...]] = [
        (), (), (), ("embedding",), ("blocks.0",), ("embedding", "blocks.0", "position"),
        ("blocks.1.norm",), ("head.norm", "position"), ("blocks",),
    ]  # fmt: skip
    frozen = draw.choice(frozen_choices)
    return ModelShape(
        width=draw.choice([3, 5, 6, 8]),
        hidden=draw.choice([1, 7, 10]),
        num_tokens=draw.randint(1, 5),
        num_words=draw.choice([7, 11, 16]),
        order=order,
        mixes=tuple(draw.random() < 0.4 for _ in range(max(order) + 1)),
        is_tied=draw.random() < 0.35,
        head=draw.choice(["loss", "loss", "logits", "loss_fn"]),
        dropout=draw.choice([0.0, 0.0, 0.3]),
        mask=draw.choice(["buffer", "computed"]),
        position_in=draw.choice(["root", "blocks"]),
        frozen=frozen,
        has_side=draw.random() < 0.25,
        has_idle=draw.random() < 0.25,
        has_unused_param=draw.random() < 0.25,
    )
