"""Do planned pipelines take and hold what is predicted; are they faster than what they replace?

python -m experiments.pipelines.over_links.run          some 20 minutes, as an administrator
python -m experiments.pipelines.over_links.run --quick  one cluster, and keeps nothing
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from experiments.common.cable import run_over_cable
from experiments.common.results import Bar, Page, Spread, console, parse_cases, parser_of
from experiments.common.systems import (
    Rounds,
    TimedStep,
    by_plan,
    check_same_steps,
    emulated_peak,
    take_turns,
)
from experiments.pipelines.over_links.model import Model, batch_of
from experiments.pipelines.over_links.stock import schedules_1f1b
from shardhet import DeviceSpec, Plan, Stage, find_plan
from shardhet.comm.calls import SWITCH
from shardhet.planner.stages.find import find_pipeline
from shardhet.pricing.cost import CostModel
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.simulator.stages import PipelinePrice, price_of

HERE = Path(__file__).parent
GLOBAL_BATCH_SIZE = 96
NUMBERS = (8, 16)  # of microbatches in torch's pipelines
LEARNING_RATE = 1e-3
NEAR = (0, 1)
PLANNED, FLAT, ALONE = "planned pipeline", "without stages", "without the slow group"
STOCK = {number: f"Schedule1F1B, fully_shard, {number} microbatches" for number in NUMBERS}
ROUNDS = Rounds(num_rounds=4, num_steps=1)
NUM_HELD = 3  # steps for memory; the first examines the model
MIB = 2**20


class ByHand(NamedTuple):
    """A pipeline of both groups, good or bad."""

    name: str
    first_units: int  # of the first group, of ten
    sizes: tuple[int, int, int, int] = (8, 4, 8, 4)  # samples of a rank in a round
    num_rounds: int = 8
    in_flight: int = 2  # of the first group


class Case(NamedTuple):
    """Two groups of two devices each, and what joins them."""

    name: str
    speeds: tuple[float, float, float, float]  # samples a second; the first two are a group
    mbit_per_s: float  # in each direction
    by_hand: tuple[ByHand, ...]
    is_judged: bool = False  # the first one by hand, against everything else


CASES = (
    Case(
        "offices",
        (22.0, 11.0, 20.4, 10.2),
        34.0,
        (
            ByHand("by hand", 5),
            ByHand("alike batches", 5, (6, 6, 6, 6)),
            ByHand("one in flight", 5, in_flight=1),
        ),
        is_judged=True,
    ),
    Case(
        "lab",
        (18.0, 18.0, 12.0, 12.0),
        40.0,
        (ByHand("by hand", 6, (6, 6, 6, 6)), ByHand("two rounds", 6, (24, 24, 24, 24), 2)),
    ),
    Case(
        "sites",
        (24.0, 12.0, 16.0, 8.0),
        20.0,
        (ByHand("by hand", 6), ByHand("an early cut", 3)),
    ),
)


class Arm(NamedTuple):
    """A plan, and the ranks that follow it."""

    name: str
    plan: Plan
    ranks: tuple[int, ...]  # in plan order
    predicted_s: float
    predicted_bytes: tuple[int, ...] = ()  # of tensors, in plan order; of pipelines alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step of one plan."""

    case: str
    plan: str
    form: str  # stages, rounds
    predicted_s: float | None
    turn: int
    seconds: float  # of the slowest rank


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What one device holds at the peak of a step."""

    case: str
    plan: str
    rank: int
    predicted_bytes: int
    tracked_bytes: int


class Found(NamedTuple):
    """What the ranks of a case have found."""

    forms: dict[str, tuple[str, float | None]]  # by name: stages and rounds, predicted seconds
    steps: list[TimedStep]
    held: list[HeldBytes]


# Plans


def arms_of(case: Case, scenario: Scenario) -> list[Arm]:
    """The plans of a case."""
    everyone = tuple(range(scenario.cluster.world_size))
    smaller = partial(part_of, scenario)
    size = {"global_batch_size": GLOBAL_BATCH_SIZE}
    found = find_pipeline(scenario, **size, smaller=smaller, max_stages=2, needs_all=True)
    assert found is not None
    planned = price_of(found.plan, scenario, smaller)
    order = sum(found.groups, ())
    arms = [Arm(PLANNED, found.plan, order, found.step_time_s, _bytes_of(planned))]
    for name, of, ranks in ((FLAT, scenario, everyone), (ALONE, smaller(NEAR), NEAR)):
        plan = find_plan(of, **size)
        arms.append(Arm(name, plan, ranks, CostModel(of).predict(plan).step_time_s))
    for each in case.by_hand:
        plan = _plan_by_hand(each, scenario)
        price = price_of(plan, scenario, smaller)
        arms.append(Arm(each.name, plan, everyone, price.step_time_s, _bytes_of(price)))
    return arms


def _bytes_of(price: PipelinePrice) -> tuple[int, ...]:
    memory = [rank.memory for rank in price.ranks]
    return tuple(each.total_bytes - each.reserved_bytes for each in memory)


def _plan_by_hand(each: ByHand, scenario: Scenario) -> Plan:
    units = [unit.fqn for unit in scenario.workload.units if unit.fqn]
    first, rest = tuple(units[: each.first_units]), tuple(units[each.first_units :])
    return Plan.by_hand(
        microbatch_sizes=list(each.sizes),
        num_rounds=each.num_rounds,
        devices=scenario.cluster.devices,
        reshard_after_forward=False,
        reshard_after_backward=False,
        reduce_each_round=False,
        stages=[
            Stage(units=first, num_ranks=2, in_flight=each.in_flight),
            Stage(units=rest, num_ranks=2, in_flight=1),
        ],
    )


# On each rank


def train(rank: int, case: Case, rounds: Rounds) -> Found:
    """Measure, plan, and take steps of all plans in turn; then see what pipelines hold."""
    near = dist.new_group(list(NEAR))  # before any rank makes groups that others do not
    speed, side = case.speeds[rank], "near" if rank in NEAR else "far"
    spec = DeviceSpec(
        host=side, kind=f"{speed:g} a second, {side}", memory_capacity_bytes=2**32
    )
    batch = batch_of(GLOBAL_BATCH_SIZE)
    stock = schedules_1f1b(
        speed, batch, numbers_of_microbatches=NUMBERS, learning_rate=LEARNING_RATE
    )
    scenario = measure(
        TrainedModel(module=Model(speed), batch=ExampleBatch(args=batch)),
        device_spec=spec,
        effort=MeasuringEffort(max_microbatch_size=8, num_repeats=2, time_limit_s=20.0),
        on_progress=lambda text, _: _say(text),
    ).scenario
    _say("planning")
    told = [arms_of(case, scenario) if rank == 0 else []]
    dist.broadcast_object_list(told)
    [arms] = told
    steps: dict[str, Callable[[], float]] = {}
    # That of a part of the ranks last: it makes groups that the others know nothing of.
    for arm in sorted(arms, key=lambda arm: -len(arm.ranks)):
        if rank in arm.ranks:
            step = by_plan(
                Model(speed),
                arm.plan,
                batch,
                group=near if arm.ranks == NEAR else None,
                spec=spec,
                learning_rate=LEARNING_RATE,
            )
            steps[arm.name] = partial(_part_of_loss, step, len(arm.ranks))
        else:
            steps[arm.name] = lambda: 0.0
    steps |= {STOCK[number]: step for number, step in stock.items()}
    check_same_steps(steps)
    taken = take_turns(
        {name: partial(_announced, name, step) for name, step in steps.items()},
        rounds,
        in_line=True,
    )
    forms: dict[str, tuple[str, float | None]] = {
        arm.name: (_form(arm.plan), arm.predicted_s) for arm in arms
    }
    forms |= {
        name: (f"5 + 5 units, {number} x {GLOBAL_BATCH_SIZE // number} samples", None)
        for number, name in STOCK.items()
    }
    pipelines = [arm for arm in arms if arm.predicted_bytes]
    held = [each for arm in pipelines for each in _held(case.name, arm, spec, batch)]
    return Found(forms=forms, steps=taken, held=held)


def _held(
    case: str, arm: Arm, spec: DeviceSpec, batch: tuple[torch.Tensor, ...]
) -> list[HeldBytes]:
    """What every device of a pipeline holds at its peak.  Collective.

    On an emulated accelerator, which counts the bytes of all storages that are alive, and
    without waiting for any device: bytes do not depend on how fast it is.
    """
    _say(f"memory of {arm.name}")
    os.environ.pop(SWITCH, None)  # of turns over the cable: the emulated NCCL carries messages
    place, peak_bytes = emulated_peak(
        Model(math.inf),
        arm.plan,
        lambda model: [each[arm.plan.sample_indices(model.position)] for each in batch],
        num_steps=NUM_HELD,
        device_spec=spec,
    )
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (place, peak_bytes))
    return [
        HeldBytes(
            case=case,
            plan=arm.name,
            rank=arm.ranks[i],
            predicted_bytes=arm.predicted_bytes[i],
            tracked_bytes=nbytes,
        )
        for i, nbytes in sorted(told)
    ]


def _announced(name: str, step: Callable[[], float], _number: int) -> None:
    _say(name)
    step()


def _say(text: str) -> None:
    """What the first rank does now."""
    if not dist.get_rank():
        console.print(text, markup=False)


def _part_of_loss(step: Callable[[], float], number: int) -> float:
    return step() / number


def _form(plan: Plan) -> str:
    rounds = f"{plan.num_rounds} x {plan.round_size} samples"
    if plan.stages is None:
        return rounds
    cut = " + ".join(str(len(each.units)) for each in plan.stages)
    return f"{cut} units, {rounds}"


# From outside


def main() -> None:
    """Run the cases and keep what they took."""
    parser = parser_of(__doc__, quick="one cluster, one turn of each plan, and keeps nothing")
    options = parse_cases(parser, CASES)
    cases = options.cases[:1] if options.quick else options.cases
    page = Page(HERE, is_kept=len(cases) == len(CASES))
    samples: list[Sample] = []
    held: list[HeldBytes] = []
    rounds = Rounds(num_rounds=1, num_steps=1) if options.quick else ROUNDS
    for case in cases:
        console.print(case.name, markup=False)
        found = run_over_cable(train, (2, 2), case.mbit_per_s, case, rounds)[0]
        samples += [
            Sample(
                case=case.name,
                plan=each.system,
                form=found.forms[each.system][0],
                predicted_s=found.forms[each.system][1],
                turn=each.round,
                seconds=each.slowest_rank_s,
            )
            for each in found.steps
        ]
        held += found.held
    report(cases, samples, page, memory_bars(held, page))
    page.keep({"results.csv": samples, "memory.csv": held})


def memory_bars(held: Sequence[HeldBytes], page: Page) -> list[Bar]:
    """A row for each pipeline's fullest device and its least exact one; and the bar."""
    rows = []
    for case, plan in dict.fromkeys((each.case, each.plan) for each in held):
        own = [each for each in held if (each.case, each.plan) == (case, plan)]
        fullest = max(own, key=lambda each: each.tracked_bytes)
        ratios = [each.predicted_bytes / each.tracked_bytes - 1 for each in own]
        cells = (fullest.predicted_bytes / MIB, fullest.tracked_bytes / MIB)
        of_all = (min(ratios), max(ratios))
        numbers = [*(f"{each:.2f}" for each in cells), *(f"{each:+.1%}" for each in of_all)]
        rows.append([f"{case}: {plan}", *numbers])
    header = [
        *("plan", "predicted, fullest device (MiB)", "held (MiB)"),
        *("the device that is predicted the lowest, off", "the highest, off"),
    ]
    page.table("Memory of the pipelines' devices at the peak of a step", header, rows)
    errors = [abs(each.predicted_bytes / each.tracked_bytes - 1) for each in held]
    claim = f"predicted memory of {len(rows)} pipelines' {len(errors)} devices, off on average"
    return [Bar(claim=claim, measured=mean(errors), at_most=0.05)]


class Turns:
    """Steps of one case, by plan and turn."""

    def __init__(self, samples: Sequence[Any], case: str, min_s: float) -> None:
        own = [each for each in samples if each.case == case]
        self.case, self.min_s = case, min_s
        self.plans = {each.plan: each for each in own}
        turns = {(each.plan, each.turn): [] for each in own}
        for each in own:
            turns[each.plan, each.turn].append(each.seconds)
        self._s = {key: median(seconds) for key, seconds in turns.items()}

    def of(self, plan: str) -> list[float]:
        """Seconds of a step, turn by turn."""
        return [seconds for (name, _), seconds in self._s.items() if name == plan]

    def ratio(self, plan: str, other: str) -> Spread:
        """Of one plan's seconds, turn by turn, to another's."""
        return Spread.of([a / b for a, b in zip(self.of(plan), self.of(other), strict=True)])

    def share(self, plan: str) -> float:
        """Of the sum of the devices' speeds."""
        return self.min_s / median(self.of(plan))

    def error(self, plan: str) -> float | None:
        """Of the prediction."""
        predicted_s = self.plans[plan].predicted_s
        return None if predicted_s is None else predicted_s / median(self.of(plan)) - 1

    def rows(self, than: str, *, is_inverse: bool = False) -> list[list[str]]:
        """Of the table: every plan, at last its time over another's, or the reverse."""
        rows = []
        for plan, one in self.plans.items():
            error = self.error(plan)
            ratio = self.ratio(than, plan) if is_inverse else self.ratio(plan, than)
            rows.append(
                [
                    f"{self.case}: {plan}",
                    one.form,
                    "-" if one.predicted_s is None else f"{one.predicted_s:.2f}",
                    Spread.of(self.of(plan)).cell(2),
                    "-" if error is None else f"{error:+.1%}",
                    f"{self.share(plan):.2f}",
                    ratio.cell(2),
                ]
            )
        return rows


STEPS = "Steps (median of turns, 10th and 90th percentile)"
HEADER = ["plan", "form", "predicted (s)", "step (s)", "off", "of the sum of speeds"]


def report(
    cases: Sequence[Case], samples: Sequence[Sample], page: Page, others: Sequence[Bar]
) -> None:
    """A row for each plan, and the bars with the others."""
    rows, errors, gains, bars = [], [], [], list(others)
    for case in cases:
        turns = Turns(samples, case.name, GLOBAL_BATCH_SIZE / sum(case.speeds))
        rows += turns.rows(PLANNED)
        found = {plan: turns.error(plan) for plan in turns.plans if plan not in (FLAT, ALONE)}
        errors += [abs(error) for error in found.values() if error is not None]
        gains.append(min(turns.ratio(rival, PLANNED).median for rival in (FLAT, ALONE)))
        if case.is_judged:
            bars += _bars_by_hand(case, turns)
    page.table(STEPS, [*HEADER, "of the planned pipeline's time"], rows)
    bars += [
        Bar(
            claim=f"predicted time of {len(errors)} pipelines, off on average",
            measured=mean(errors),
            at_most=0.07,
        ),
        Bar(
            claim="the better of the same planner without stages and without the slow group, "
            "of the planned pipeline's time; median of the clusters",
            measured=median(gains),
            at_least=1.3,
        ),
    ]
    page.bars(bars)


def _bars_by_hand(case: Case, turns: Turns) -> list[Bar]:
    mine = case.by_hand[0].name
    rival = min((FLAT, ALONE, *STOCK.values()), key=lambda plan: median(turns.of(plan)))
    part = "part of the sum of the devices' speeds"
    return [
        Bar(claim=f"{case.name}, without stages: {part}", measured=turns.share(FLAT)),
        Bar(claim=f"{case.name}, {mine}: {part}", measured=turns.share(mine), at_least=0.75),
        Bar(
            claim=f"{case.name}: {rival}, of the time {mine}",
            measured=turns.ratio(rival, mine).median,
            at_least=1.4,
        ),
    ]


if __name__ == "__main__":
    main()
