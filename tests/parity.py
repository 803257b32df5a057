"""What the parity tests share: one process as the reference, and HetFSDP held against it.

A ``Problem`` is a model with its loss and its batches.  ``check_parity`` runs it twice in
every rank's process, as plain PyTorch over the whole global batch and as HetFSDP over the
rank's part, and compares losses, gradients, parameters and state dicts at every step.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.fsdp.sharding.unit import find_units
from shardhet.records.layout import Span
from tests.seeded import seeded, unit_by_param

GRAD_BAR = 1e-12  # of the unit's largest gradient
LOSS_BAR = 1e-12  # relative
PARAM_BAR = {"sgd": 1e-12, "adamw": 1e-9}  # rtol and atol

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

    rank_batch_sizes: tuple[tuple[int, ...], ...]  # of every step, by round and position
    optimizer: str = "sgd"
    clip_at: float | None = None  # this part of the reference's norm
    kinds: tuple[str, ...] | None = None  # what ranks announce themselves as, by rank
    has_dropout: bool = False  # the reference then runs the plan's microbatches
    calls_empty: bool = True  # a rank without samples passes an empty batch, or nothing
    steps_between_zero_grad: int = 1
    # By step: rounds without tokens, in which every target is this.
    blank_rounds: tuple[tuple[int, ...], ...] = ()
    blank_target: int = -1

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


class OnHost:
    """In place of an accelerator."""

    device = torch.device("cpu")
    syncs: tuple[str, ...] = ()  # where the host has waited for the device

    @staticmethod
    def installed() -> AbstractContextManager[None]:
        return nullcontext()


def take_rounds(
    model: HetFSDP, problem: Problem, plan: Plan, batch: Batch, course: Course, step: int
) -> float | None:
    """A step, round after round; the mean loss."""
    sizes = course.rank_batch_sizes[step]
    for place in range(model.position, len(sizes), plan.world_size):
        assert not any(p.grad is not None for p in model.parameters()) or (
            step % course.steps_between_zero_grad
        ), f"step {step}: a gradient is set before the last round"
        mean = train_step(model, problem, part_of(batch, sizes, place), course)
        assert (mean is None) == (place + plan.world_size < len(sizes)), f"step {step}"
    return mean


def check_parity(
    rank: int,
    problem: Problem,
    plan: Plan,
    course: Course,
    *,
    place: Any = OnHost,
    take: Callable[..., float | None] = take_rounds,
    after: Callable[..., list[Tensor]] = lambda *_: [],
    bar: float | None = None,
) -> Result:
    """Train beside the reference; raises ``AssertionError`` at the first difference.

    ``take``: how a step is taken; ``after``: what else is compared after each, whose bits are
    returned; ``bar``: of everything, where HetFSDP computes in less than float64.
    """
    torch.manual_seed(11)
    reference = problem.make_module()
    with place.installed():
        model = wrap(copy.deepcopy(reference), problem, plan, course, rank)
    unit_by_fqn = unit_by_param(reference, _units(reference, problem, plan))
    optimizers = [make_optimizer(each, course.optimizer) for each in (reference, model)]
    loss_bar, grad_bar = bar or LOSS_BAR, bar or GRAD_BAR
    bar = bar or PARAM_BAR[course.optimizer]
    bits: list[Tensor] = []
    first = first_stage(plan)
    for step, sizes in enumerate(course.rank_batch_sizes):
        batch = blanked(problem.make_batch(sum(sizes)), course, step, first.world_size)
        if step % course.steps_between_zero_grad == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        with place.installed():
            mean = take(model, problem, plan, batch, course, step)
        assert model.step == step + 1
        expected = expected_mean(reference, problem, first, course, batch, step)
        assert mean is not None
        assert abs(mean - expected) <= loss_bar * abs(expected), f"loss {mean} for {expected}"
        compare_grads(model, reference, unit_by_fqn, where=f"step {step}", bar=grad_bar)
        if course.clip_at is not None:
            with place.installed():
                clip_both(model, reference, course.clip_at)
            compare_grads(model, reference, unit_by_fqn, where=f"step {step}, clipped")
        bits += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if (step + 1) % course.steps_between_zero_grad == 0:
            optimizers[0].step()
            with place.installed():
                optimizers[1].step()
        bits += after(model, reference, problem, batch)
        compare_params(model, reference, bar=bar, where=f"after step {step}")
    with place.installed():
        compare_state_dicts(model, reference, bar=bar, rank=rank)
    boxes = model.sharded_state_dict()
    bits += [box.tensor.clone() for box in boxes.values()]
    return Result(
        rows={fqn: box.rows for fqn, box in boxes.items()},
        shapes={fqn: box.global_shape for fqn, box in boxes.items()},
        bits=bits,
    )


def first_stage(plan: Plan) -> Plan:
    """The ranks that have samples, as a plan of their own."""
    if plan.stages is None:
        return plan
    return replace(plan, ranks=plan.ranks[: len(plan.groups[0])], stages=None)


def wrap(module: nn.Module, problem: Problem, plan: Plan, course: Course, rank: int) -> HetFSDP:
    """``module`` as HetFSDP, on the device that the course gives the rank."""
    spec = DeviceSpec(kind=course.kinds[rank]) if course.kinds else None
    return HetFSDP(module, plan, device_spec=spec, **problem.options)


def blanked(batch: Batch, course: Course, step: int, world_size: int) -> Batch:
    """The batch, with rounds that have no token."""
    sizes = course.rank_batch_sizes[step]
    for i in course.blank_rounds[step] if course.blank_rounds else ():
        start, stop = (sum(sizes[: j * world_size]) for j in (i, i + 1))
        batch["targets"][start:stop] = course.blank_target
    if course.blank_rounds and (batch["targets"] == course.blank_target).all():
        batch["targets"][-1, 0] = 0  # not the whole step
    return batch


def part_of(batch: Batch, sizes: Sequence[int], position: int) -> Batch:
    """The samples of ``batch`` dealt to ``position``."""
    first = sum(sizes[:position])
    return {name: t[first : first + sizes[position]] for name, t in batch.items()}


def train_step(model: HetFSDP, problem: Problem, batch: Batch, course: Course) -> float | None:
    """One rank's forward and backward; the mean loss over all ranks."""
    is_empty = not len(next(iter(batch.values())))
    if is_empty and not course.calls_empty:
        model()
        return model.backward(torch.zeros(()), 0)
    return model.backward(*problem.loss(model, batch))


def expected_mean(
    reference: nn.Module, problem: Problem, plan: Plan, course: Course, batch: Batch, step: int
) -> float:
    """The mean loss of one process; gradients are added.

    Dropout draws for each microbatch, so the reference then goes through them one by one.
    """
    if not course.has_dropout:
        return whole_step(reference, problem, batch)
    sizes = course.rank_batch_sizes[step]
    return microbatched_step(reference, problem, plan, batch, sizes, step=step)


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
    units = _units(reference, problem, plan)
    with seeded(reference, units, problem.options.get("seed", 0)) as seeds:
        ranks = plan.ranks * (len(sizes) // plan.world_size)
        for rank, size in zip(ranks, sizes, strict=True):
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


def _units(reference: nn.Module, problem: Problem, plan: Plan) -> list[Any]:
    options = problem.options
    keeps_last = options.get("loss_fn") is not None
    merges = plan.stages is None
    return find_units(
        reference, options.get("units"), keeps_last=keeps_last, merges_tied=merges
    )


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


def clip_both(model: HetFSDP, reference: nn.Module, clip_at: float) -> None:
    grads = [p.grad for p in reference.parameters() if p.grad is not None]
    max_norm = clip_at * float(torch.nn.utils.get_total_norm(grads))
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    norm = model.clip_grad_norm_(max_norm)
    torch.testing.assert_close(norm.cpu(), expected, rtol=1e-12, atol=0.0)


def rows_of(full: Tensor, rows: Span) -> Tensor:
    """The rows of a whole tensor; a scalar is one row."""
    whole = full.reshape(1) if full.dim() == 0 else full
    return whole[rows.start : rows.stop]


def compare_grads(
    model: HetFSDP,
    reference: nn.Module,
    unit_by_fqn: Mapping[str, str] | None = None,
    *,
    where: str = "",
    bar: float = GRAD_BAR,
) -> None:
    """This rank's gradients are the reference's rows, None exactly where it has None.

    They differ by ``bar`` of the largest gradient of a unit; without units, of a module.
    """
    expected = {fqn: p.grad for fqn, p in reference.named_parameters()}
    unit_by_fqn = unit_by_fqn or {fqn: fqn.rpartition(".")[0] for fqn in expected}
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
            error = float((own.as_subclass(Tensor).cpu() - part).abs().max())
            most = bar * largest[unit_by_fqn[fqn]]
            assert error <= most, f"{where}: {fqn}.grad differs by {error}, bar {most}"


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
