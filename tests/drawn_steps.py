"""Drawn steps, each held against one process, or refused by name: in rounds, in stages.

In float64 a drawn model trains beside plain PyTorch over the whole batch (``tests.parity``).
In lower precision HetFSDP errs no more than plain PyTorch does that accumulates the same
microbatches, as in tests/test_parity_low_precision.py.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardhet import DeviceSpec, HetFSDP, Plan, Stage
from shardhet.models.decoder import Decoder
from tests.drawn_cases import Case, draw_rounds, draw_shape
from tests.emulated.accelerator import Accelerator
from tests.fuzzing.model import IGNORED
from tests.fuzzing.shapes import ModelShape
from tests.parity import (
    LOSS_BAR,
    Batch,
    Course,
    OnHost,
    Problem,
    Result,
    blanked,
    check_covered_once,
    check_parity,
)
from tests.test_parity_low_precision import ALLOWED_FACTOR, LANGUAGE, compared, make_batch
from tests.worlds import run_ranks

PRECISIONS = ("float64",) * 5 + ("float32", "bf16", "fp16")
MAX_RANKS = 5  # of stages
READ = "comm/calls.py read: event"
OF_ROWS = "comm/copy_streams.py wait: event"  # the optimizer's, on the host
OF_KEPT_GRADIENTS = (  # to which a step adds for the first time
    "fsdp/sharding/persistence.py make: copy_",
    "fsdp/sharding/persistence.py make: aten._to_copy.default",
)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank has found."""

    covers: Result | None = None  # the rows it stores, in float64
    refusal: str = ""
    ours: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by unit
    plain: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def check(case: Case, *, on_accelerators: bool = False, times: int = 2) -> None:
    """Run the case on all of its ranks, so many times with the same bits."""
    reports: list[RankReport] = run_ranks(
        on_rank,
        case.plan.world_size,
        case,
        on_accelerators,
        times,
        fresh_world=case.refused is not None,
        timeout_s=90.0,
    )
    said = [report.refusal for report in reports]
    if case.refused is not None:
        assert all(case.refused in each for each in said), said
        return
    assert not any(said), said
    if case.precision == "float64":
        check_covered_once([report.covers for report in reports if report.covers])
        return
    assert _excess(reports) <= ALLOWED_FACTOR, case


def on_rank(rank: int, case: Case, on_accelerators: bool = False, times: int = 2) -> RankReport:
    """Run the case on this rank; ``AssertionError`` at the first difference."""
    torch.manual_seed(0)
    place = Accelerator if on_accelerators else OnHost
    run = _exactly if case.precision == "float64" else _in_low_precision
    try:
        bits, report = run(rank, case, place())
        for _ in range(1, times):
            again, _ = run(rank, case, place())
            assert len(bits) == len(again), "not repeated"
            assert all(map(torch.equal, bits, again)), "not repeated bit by bit"
    except ValueError as error:
        if case.plan.stages is None:
            raise
        return RankReport(refusal=str(error))
    except Exception as error:
        error.add_note(str(case))
        raise
    return report


def _exactly(rank: int, case: Case, place: Any) -> tuple[list[Tensor], RankReport]:
    if case.plan.stages is not None:
        result = _in_stages(rank, case, place)
    else:
        result = check_parity(rank, case.problem, case.plan, case.course, place=place)
    return result.bits, RankReport(covers=Result(result.rows, result.shapes, bits=[]))


def _in_low_precision(rank: int, case: Case, _: Any) -> tuple[list[Tensor], RankReport]:
    plan, course = case.plan, case.course
    torch.manual_seed(case.seed)
    master = Decoder(LANGUAGE)
    if case.shape.tied:
        master.head.projection.weight = master.embedding.weight
    sizes = course.rank_batch_sizes[-1]
    batch = make_batch(sum(sizes))
    batch["targets"][torch.rand(batch["targets"].shape) < 0.2] = IGNORED
    batch = blanked(batch, course, -1, plan.world_size)
    spec = DeviceSpec(kind=course.kinds[rank]) if course.kinds else None
    bits, ours, plain = compared(master, plan, sizes, batch, case.precision, device_spec=spec)
    return bits, RankReport(ours=ours, plain=plain)


def _excess(reports: Sequence[RankReport]) -> float:
    """The largest error of a unit's gradient, as a multiple of plain PyTorch's."""
    largest = 0.0
    for unit in reports[0].ours:
        ours = sum(report.ours[unit][0] for report in reports)
        plain = sum(report.plain[unit][0] for report in reports)
        size = sum(report.ours[unit][1] for report in reports)
        largest = max(largest, (ours / (plain + 1e-14 * size)) ** 0.5 if size else 0.0)
    return largest


def _in_stages(rank: int, case: Case, place: Accelerator | OnHost) -> Result:
    problem = replace(case.problem, options={**case.problem.options, "device": place.device})

    def given(batch: Batch, mine: list[int]) -> list[Tensor]:
        return [batch[name][mine].to(place.device) for name in ("tokens", "targets")]

    def call(how: Any, tokens: Tensor, targets: Tensor) -> Any:
        if case.shape.head == "loss":
            return how(tokens, targets)
        return how(tokens, loss_inputs=targets)

    def take(
        model: HetFSDP, _: Any, plan: Plan, batch: Batch, course: Course, step: int
    ) -> float | None:
        mine = plan.sample_indices(model.position, len(batch["tokens"]))
        own = given(batch, mine)
        before, num_probes = len(place.syncs), len(model._runtime.known._findings)
        mean: float | None = call(model.forward_backward, *own)
        if len(model._runtime.known._findings) == num_probes:
            found = list(place.syncs[before:])
            if plan.ranks[model.position].optimizer_on_host:  # it reads the gradients
                is_second = step == 1 < course.steps_between_zero_grad
                allowed = (OF_ROWS, *(OF_KEPT_GRADIENTS if is_second else ()))
                found = [each for each in found if each not in allowed]
            assert found in ([], [READ]), found
        return mean

    def evaluate(
        model: HetFSDP, reference: Any, problem: Problem, batch: Batch
    ) -> list[Tensor]:
        """The last stage has the loss of its samples, other ranks that of none."""
        mine = case.plan.sample_indices(model.position, len(batch["tokens"]))
        with torch.no_grad():
            expected, number = problem.loss(reference.eval(), batch)
        model.eval()
        with torch.no_grad(), place.installed():
            loss_sum, count = (each.cpu() for each in call(model, *given(batch, mine)))
        reference.train()
        model.train()
        if model.position not in model.plan.groups[-1]:
            assert [float(loss_sum), int(count)] == [0, 0]
        rows = model.exchange([float(loss_sum), float(count)])
        loss, tokens_of_all = map(sum, zip(*rows, strict=True))
        assert tokens_of_all == number
        assert abs(loss - expected) <= LOSS_BAR * abs(expected), f"loss {loss} for {expected}"
        return [loss_sum]

    return check_parity(
        rank, problem, case.plan, case.course, place=place, take=take, after=evaluate
    )


# Drawn cases


def draw_in_rounds(seed: int) -> Case:
    """The case of that seed in rounds, in any precision."""
    draw = random.Random(f"rounds case {seed}")
    case = draw_rounds(seed, world_size=draw.choice([1, 2, 3, 4]))
    return replace(case, precision=draw.choice(PRECISIONS))


def draw_stages(seed: int) -> Case:
    """The case of that seed in stages, cut at any place; some have to be refused."""
    draw = random.Random(f"stages case {seed}")
    shape = draw_shape(draw)
    shape = replace(shape, head=draw.choice(["loss", "loss_fn"]))
    if draw.random() < 0.5:  # else most are refused
        shape = replace(shape, order=tuple(sorted(set(shape.order))))
    if draw.random() < 0.6:
        shape = replace(shape, units=tuple(replace(unit, aux="") for unit in shape.units))
    options: dict[str, Any] = {"seed": draw.randrange(100)}
    has_dropout = any(unit.dropout for unit in shape.units)
    called = ["embedding", *["beside"] * (shape.side == "unused")]
    called += [*dict.fromkeys(f"blocks.{i}" for i in shape.order), "head"]
    idle = ["beside"] if shape.side == "idle" and draw.random() < 0.5 else []
    options["units"] = (*called, *idle)
    num_stages = draw.choice([1, 2, 2, 2, 3, 3])
    borders = [0, *sorted(draw.sample(range(1, len(called)), num_stages - 1)), len(called)]
    groups = [called[a:b] for a, b in pairwise(borders)]
    refused = _refusal(shape, groups)
    draw.choice(groups).extend(idle)
    plan, kinds = _draw_staged_plan(draw, groups, has_dropout=has_dropout)
    last = plan.global_batch_size
    num_samples = (last, last, draw.randint(1, last))
    blank = tuple(
        tuple(r for r in range(plan.num_rounds) if draw.random() < 0.2) for _ in num_samples
    )
    course = Course(
        rank_batch_sizes=tuple(_sizes(plan, number) for number in num_samples),
        optimizer=draw.choice(["sgd", "adamw"]),
        clip_at=draw.choice([None, 0.3, 2.0]),
        kinds=kinds,
        has_dropout=has_dropout,
        steps_between_zero_grad=draw.choice([1, 1, 1, 3]),
        blank_rounds=blank,
        blank_target=IGNORED,
    )
    return Case(
        seed=seed,
        shape=shape,
        length=draw.randint(1, 5),
        plan=plan,
        course=course,
        options=options,
        refused=refused,
    )


def _refusal(shape: ModelShape, groups: Sequence[Sequence[str]]) -> str | None:
    """What the plan must be refused with, if stages cannot have these units."""
    stage_by_fqn = {fqn: i for i, group in enumerate(groups) for fqn in group}
    stages = [stage_by_fqn[f"blocks.{i}"] for i in shape.order]
    if stages != sorted(stages):
        return "is called after unit"
    summed = [stage_by_fqn[f"blocks.{i}"] for i in shape.order if shape.units[i].aux == "sum"]
    if shape.head == "loss" and summed and min(summed) < len(groups) - 1:
        return "without a row for each sample"  # energies
    return None


def _draw_staged_plan(
    draw: random.Random, groups: Sequence[Sequence[str]], *, has_dropout: bool
) -> tuple[Plan, tuple[str, ...] | None]:
    numbers = [1] * len(groups)
    for _ in range(draw.randint(0, MAX_RANKS - len(groups))):
        numbers[draw.randrange(len(groups))] += 1
    numbers = [min(n, 3) for n in numbers]
    # Dropout draws for each microbatch, so the reference needs the same ones in all stages.
    grain = draw.choice([1, 2]) if has_dropout else 1
    together = draw.randint(1, 6)
    batches, sizes, shares = [], [], []
    for number in numbers:
        cuts = sorted(draw.randint(0, together) for _ in range(number - 1))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, together], strict=True)]
        batches += [count * grain for count in counts]
        sizes += [
            count and (grain if has_dropout else draw.randint(1, count)) for count in counts
        ]
        weights = [draw.choice([0.0, 1.0, 1.0, 0.01, draw.random()]) for _ in counts]
        weights = weights if any(weights) else [1.0 for _ in weights]
        shares += [weight / sum(weights) for weight in weights]
    patterns = ("blocks.*", "blocks.[0-1]", "*.0", "embedding", "head")
    number = sum(numbers)
    kinds, devices = None, None
    if number > 1 and draw.random() < 0.4:
        kinds = tuple(f"kind {i}" for i in range(number))
        devices = [DeviceSpec(kind=k) for k in draw.sample(kinds, number)]
    gathers, rounds = draw.randrange(3), draw.choice([1, 2, 3, 3, 4, 5])
    in_flight = [draw.choice([None, None, 1, 2, 3]) for _ in numbers]
    given = [len(numbers) - i if n is None else n for i, n in enumerate(in_flight)]
    if given != sorted(given, reverse=True):
        in_flight = [None for _ in numbers]
    plan = Plan.by_hand(
        microbatch_sizes=sizes,
        rank_batch_sizes=batches,
        state_shares=shares,
        recompute=[draw.choice([False, True, draw.sample(patterns, 2)]) for _ in batches],
        devices=devices,
        num_rounds=rounds,
        reshard_after_forward=gathers == 0,
        reshard_after_backward=gathers < 2,
        reduce_each_round=draw.random() < 0.6,
        stages=[
            Stage(units=tuple(group), num_ranks=n, in_flight=k)
            for group, n, k in zip(groups, numbers, in_flight, strict=True)
        ],
    )
    ragged = draw.choice([None, draw.randint(1, plan.round_size)])
    return replace(plan, last_round_size=ragged), kinds


def _sizes(plan: Plan, num_samples: int) -> tuple[int, ...]:
    """How many samples each rank of the first stage has, round after round."""
    positions = plan.groups[0]
    return tuple(
        len(plan.round_samples(i, r, num_samples))
        for r in range(plan.num_rounds)
        for i in positions
    )
