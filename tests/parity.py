"""What the parity tests share: one process as the reference, and HetFSDP held against it.

A ``Problem`` is a model with its loss and its batches.  ``check_parity`` runs it twice in
every rank's process, as plain PyTorch over the whole global batch and as HetFSDP over the
rank's part, and compares losses, gradients, parameters and state dicts at every step.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.fsdp.seeds import microbatch_seed
from shardhet.fsdp.wrapping import find_units
from shardhet.layout import Span

GRAD_BAR = 1e-12  # of the unit's largest gradient
LOSS_BAR = 1e-12  # relative
PARAM_BAR = {"sgd": 1e-12, "adamw": 1e-9}  # rtol and atol
IGNORED = -100  # target of a token without loss

Batch = dict[str, Tensor]  # every tensor has the samples in dim 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, its loss and its data; the same for the reference and for HetFSDP."""

    make_module: Callable[[], nn.Module]
    make_batch: Callable[[int], Batch]  # of so many samples, from torch's own generator
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor | int]]  # sum, number of tokens
    options: Mapping[str, Any] = field(default_factory=dict)  # for HetFSDP


@dataclass(frozen=True, kw_only=True)
class Course:
    """What happens in a run besides the plan."""

    rank_batch_sizes: tuple[tuple[int, ...], ...]  # of every step, by position
    optimizer: str = "sgd"
    clip_at: float | None = None  # this part of the reference's norm
    kinds: tuple[str, ...] | None = None  # what ranks announce themselves as, by rank
    has_dropout: bool = False  # the reference then runs the plan's microbatches
    calls_empty: bool = True  # a rank without samples passes an empty batch, or nothing
    steps_between_zero_grad: int = 1

    @classmethod
    def of(cls, plan: Plan, *, num_steps: int = 3, **others: Any) -> "Course":
        """Whole batches only."""
        sizes = tuple(rank.rank_batch_size for rank in plan.ranks)
        return cls(rank_batch_sizes=(sizes,) * num_steps, **others)


@dataclass(frozen=True)
class Result:
    """What a rank brings home: the rows it stores, and the bits of its gradients and rows."""

    rows: dict[str, Span]
    shapes: dict[str, tuple[int, ...]]
    bits: list[Tensor]


def check_parity(rank: int, problem: Problem, plan: Plan, course: Course) -> Result:
    """Train beside the reference; raises ``AssertionError`` at the first difference."""
    torch.manual_seed(11)
    reference = problem.make_module()
    model = wrap(copy.deepcopy(reference), problem, plan, course, rank)
    unit_by_fqn = _unit_by_param(reference, problem)
    optimizers = [make_optimizer(each, course.optimizer) for each in (reference, model)]
    bits: list[Tensor] = []
    for step, sizes in enumerate(course.rank_batch_sizes):
        batch = problem.make_batch(sum(sizes))
        if step % course.steps_between_zero_grad == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        mean = train_step(model, problem, part_of(batch, sizes, model.position), course)
        if course.has_dropout:
            expected = microbatched_step(reference, problem, plan, batch, sizes, step=step)
        else:
            expected = whole_step(reference, problem, batch)
        assert mean is not None
        assert abs(mean - expected) <= LOSS_BAR * abs(expected), f"loss {mean} for {expected}"
        compare_grads(model, reference, unit_by_fqn, where=f"step {step}")
        if course.clip_at is not None:
            _clip_both(model, reference, course.clip_at)
            compare_grads(model, reference, unit_by_fqn, where=f"step {step}, clipped")
        bits += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if (step + 1) % course.steps_between_zero_grad == 0:
            for optimizer in optimizers:
                optimizer.step()
        bar = PARAM_BAR[course.optimizer]
        compare_params(model, reference, bar=bar, where=f"after step {step}")
    compare_state_dicts(model, reference, bar=PARAM_BAR[course.optimizer], rank=rank)
    boxes = model.sharded_state_dict()
    bits += [box.tensor.clone() for box in boxes.values()]
    return Result(
        rows={fqn: box.rows for fqn, box in boxes.items()},
        shapes={fqn: box.global_shape for fqn, box in boxes.items()},
        bits=bits,
    )


def wrap(module: nn.Module, problem: Problem, plan: Plan, course: Course, rank: int) -> HetFSDP:
    """``module`` as HetFSDP, on the device that the course gives the rank."""
    spec = DeviceSpec(kind=course.kinds[rank]) if course.kinds else None
    return HetFSDP(module, plan, device_spec=spec, **problem.options)


def part_of(batch: Batch, sizes: Sequence[int], position: int) -> Batch:
    """The samples of ``batch`` dealt to ``position``."""
    first = sum(sizes[:position])
    return {name: t[first : first + sizes[position]] for name, t in batch.items()}


def train_step(model: HetFSDP, problem: Problem, batch: Batch, course: Course) -> float | None:
    """One rank's forward and backward; the mean loss over all ranks."""
    is_empty = not len(next(iter(batch.values())))
    if is_empty and not course.calls_empty:
        return model.backward(*model())
    if is_empty:
        return model.backward(*model(*batch.values()))
    return model.backward(*problem.loss(model, batch))


def whole_step(reference: nn.Module, problem: Problem, batch: Batch) -> float:
    """Plain PyTorch over the whole global batch at once; gradients are added."""
    loss_sum, num_tokens = problem.loss(reference, batch)
    loss = loss_sum / num_tokens
    loss.backward()
    return float(loss.detach())


def microbatched_step(
    reference: nn.Module,
    problem: Problem,
    plan: Plan,
    batch: Batch,
    sizes: Sequence[int],
    *,
    step: int,
) -> float:
    """Plain PyTorch over the plan's microbatches, one after the other, seeded as planned.

    Gradients are of the sum of the losses over the number of all tokens, and are added.
    """
    first_sample = 0
    losses = []
    num_tokens = _num_tokens(reference, problem, batch)
    with _seeded_units(reference, problem) as seeds:
        for rank, size in zip(plan.ranks, sizes, strict=True):
            for microbatch_size in rank.split(size) if size else ():
                piece = {
                    name: t[first_sample : first_sample + microbatch_size]
                    for name, t in batch.items()
                }
                seeds.start(step=step, first_sample=first_sample)
                loss_sum, _ = problem.loss(reference, piece)
                (loss_sum / num_tokens).backward()
                losses.append(loss_sum.detach())
                first_sample += microbatch_size
    return float(sum(losses) / num_tokens)


def _num_tokens(reference: nn.Module, problem: Problem, batch: Batch) -> Tensor | int:
    with torch.no_grad():
        _, num_tokens = problem.loss(reference, batch)
    return num_tokens


class _Seeds:
    """Seeds of the microbatch that the reference is at."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = 0
        self._first_sample = 0
        self._calls_by_unit: dict[str, int] = {}

    def start(self, *, step: int, first_sample: int) -> None:
        self._step, self._first_sample, self._calls_by_unit = step, first_sample, {}

    def enter(self, unit_fqn: str) -> None:
        call = self._calls_by_unit.get(unit_fqn, 0)
        self._calls_by_unit[unit_fqn] = call + 1
        torch.manual_seed(
            microbatch_seed(self._seed, self._step, unit_fqn, call, self._first_sample)
        )


@contextmanager
def _seeded_units(reference: nn.Module, problem: Problem) -> Iterator[_Seeds]:
    """The reference's units seed before each call what HetFSDP's seed per microbatch."""
    seeds = _Seeds(problem.options.get("seed", 0))
    hooks = [
        module.register_forward_pre_hook(lambda *_, fqn=unit.fqns[0]: seeds.enter(fqn))
        for unit in _units(reference, problem)
        for module in unit.modules
    ]
    state = torch.get_rng_state()
    yield seeds
    torch.set_rng_state(state)
    for hook in hooks:
        hook.remove()


def _units(reference: nn.Module, problem: Problem) -> list[Any]:
    options = problem.options
    return find_units(
        reference, options.get("units"), keeps_last=options.get("loss_fn") is not None
    )


def _unit_by_param(reference: nn.Module, problem: Problem) -> dict[str, str]:
    """The unit (its first module's fqn, "" for the root) of every parameter, by fqn."""
    unit_by_id = {
        id(param): unit.fqns[0]
        for unit in _units(reference, problem)
        for module in unit.modules
        for param in module.parameters()
    }
    return {fqn: unit_by_id.get(id(p), "") for fqn, p in reference.named_parameters()}


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """AdamW that decays matrices only, or SGD with momentum."""
    params = list(model.parameters())
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3)


def _clip_both(model: HetFSDP, reference: nn.Module, clip_at: float) -> None:
    grads = [p.grad for p in reference.parameters() if p.grad is not None]
    max_norm = clip_at * float(torch.nn.utils.get_total_norm(grads))
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    norm = model.clip_grad_norm_(max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)


def rows_of(full: Tensor, rows: Span) -> Tensor:
    """The rows of a whole tensor; a scalar is one row."""
    whole = full.reshape(1) if full.dim() == 0 else full
    return whole[rows.start : rows.stop]


def compare_grads(
    model: HetFSDP, reference: nn.Module, unit_by_fqn: Mapping[str, str], *, where: str
) -> None:
    """This rank's gradients are the reference's rows, None exactly where it has None."""
    expected = {fqn: p.grad for fqn, p in reference.named_parameters()}
    largest = dict.fromkeys(unit_by_fqn.values(), 0.0)
    for fqn, grad in expected.items():
        if grad is not None and grad.numel():
            unit = unit_by_fqn[fqn]
            largest[unit] = max(largest[unit], float(grad.abs().max()))
    boxes = model.sharded_state_dict()
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys() == boxes.keys()
    for fqn, grad in expected.items():
        own = found[fqn].grad
        assert (own is None) == (grad is None), f"{where}: {fqn}.grad is {own} for {grad}"
        if grad is None or own is None:
            continue
        part = rows_of(grad, boxes[fqn].rows)
        assert own.shape == part.shape == found[fqn].shape, f"{where}: {fqn}"
        if part.numel():
            error = float((own - part).abs().max())
            bar = GRAD_BAR * largest[unit_by_fqn[fqn]]
            assert error <= bar, f"{where}: {fqn}.grad differs by {error}, bar {bar}"


def compare_params(model: HetFSDP, reference: nn.Module, *, bar: float, where: str) -> None:
    """This rank's rows are the reference's."""
    params = dict(reference.named_parameters())
    for fqn, box in model.sharded_state_dict().items():
        expected = rows_of(params[fqn].detach(), box.rows)
        torch.testing.assert_close(
            box.tensor, expected, rtol=bar, atol=bar, msg=lambda m, f=fqn: f"{where}: {f}: {m}"
        )


def compare_state_dicts(model: HetFSDP, reference: nn.Module, *, bar: float, rank: int) -> None:
    """Names, shapes and values on rank zero; nothing elsewhere."""
    found = model.state_dict()
    if rank:
        assert found == {}
        return
    expected = reference.state_dict()
    assert found.keys() == expected.keys()
    for fqn, tensor in expected.items():
        torch.testing.assert_close(found[fqn], tensor, rtol=bar, atol=bar)


def check_covered_once(results: Sequence[Result]) -> None:
    """The rows of all ranks together are every parameter, each row once."""
    for fqn, shape in results[0].shapes.items():
        num_rows = shape[0] if shape else 1
        spans = sorted(result.rows[fqn] for result in results if result.rows[fqn].numel)
        starts = [*(span.start for span in spans), num_rows if 0 not in shape else 0]
        stops = [0, *(span.stop for span in spans)]
        assert starts == stops, f"{fqn}: {spans} of {num_rows} rows"


# A model put together of everything that has been seen to go wrong.


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
        return torch.ones(num_tokens, num_tokens).tril().bool()


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
            f"seed {self.seed}: reshard_after_forward={self.plan.reshard_after_forward}, "
            f"{self.shape}, {self.course}, {self.options}, ranks:\n" + "\n".join(ranks)
        )


def draw_case(seed: int, *, world_size: int) -> Case:
    """The case of that seed: the same in every process."""
    draw = random.Random(f"{seed}/{world_size}")
    plan, kinds = draw_plan(draw, world_size)
    shape = _draw_shape(draw)
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
    if shape.mask == "computed" and shape.num_tokens in {n for each in sizes for n in each}:
        options["unbatched"] = ("mask",)
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


def _draw_shape(draw: random.Random) -> ModelShape:
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
