"""How much faster is a step over a slow cable if rows cross it once per node?

python -m experiments.slow_cable.run            some minutes; needs an administrator's rights
python -m experiments.slow_cable.run --quick    one short case, and keeps nothing
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from experiments.common.cable import DEVICE, TIMEOUT_S, run_over_cable
from experiments.common.results import Bar, Page, Spread, console, parse_cases, parser_of
from experiments.common.systems import (
    Rounds,
    System,
    TimedStep,
    check_same_losses,
    first_losses,
    fused_adamw,
    take_turns,
)
from experiments.decoders import decoder_config, make_decoder, random_batches
from shardhet import DeviceSpec, HetFSDP, Plan, find_plan
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.records.schedule import straight_schedule
from shardhet.training.emulation import EmulatedDevice

HERE = Path(__file__).parent
AS_PLANNED, ONE_LEVEL, TWO_LEVELS = "as planned", "one level", "two levels"
CONFIG = decoder_config(width=256, num_layers=4, seq_len=64)
GLOBAL_BATCH_SIZE = 32
SPEEDS = (0.3, 0.15)  # of the two hosts' ranks, emulated: together they need 1.2 cores
ALIKE_MBIT_PER_S = 1e5  # as fast as memory, for these processes
LEARNING_RATE = 1e-3
HEADER = ["case", "levels", "step (s)", "of one level", "predicted (s)", "MB over the cable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two hosts of ``numbers`` ranks each, and what joins them."""

    name: str
    numbers: tuple[int, int]
    mbit_per_s: float | None  # in each direction; None: as fast as memory
    rounds: Rounds

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.numbers)


LONG = Rounds(num_rounds=6, num_steps=3)
CASES = (
    Case(name="2 + 4 over 0.2 Gbit/s", numbers=(2, 4), mbit_per_s=200.0, rounds=LONG),
    Case(name="1 + 3 over 0.2 Gbit/s", numbers=(1, 3), mbit_per_s=200.0, rounds=LONG),
    Case(name="2 + 4, links alike", numbers=(2, 4), mbit_per_s=None, rounds=LONG),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One plan of a case; the same on every rank."""

    name: str
    predicted_s: float
    state_shares: list[float]
    sent_bytes: int  # of one step, by both hosts, as their devices count them
    needed_bytes: int  # of one step, if each row crosses once per node


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step."""

    case: str
    levels: str
    round: int
    step: int
    seconds: float


# On each rank


def train(rank: int, case: Case) -> tuple[list[Arm], list[TimedStep]]:
    """Measure, plan with and without two levels, and take steps of all plans in turn."""
    side = rank >= case.numbers[0]
    emulated, kind = EmulatedDevice(speed=SPEEDS[side]), f"{SPEEDS[side]:g} of a core"
    spec = DeviceSpec(host="ab"[side], kind=kind, memory_capacity_bytes=2**32)
    batch = random_batches(CONFIG, GLOBAL_BATCH_SIZE, seed=1)[0]
    setting = measure(
        TrainedModel(module=make_decoder(CONFIG), batch=ExampleBatch(args=batch)),
        device_spec=spec,
        emulated=emulated,
        effort=MeasuringEffort(max_microbatch_size=8, num_repeats=3, time_limit_s=TIMEOUT_S),
    ).setting
    plans = _plans(setting)
    systems = {name: _system(plan, spec, emulated) for name, plan in plans.items()}
    check_same_losses(
        {
            name: first_losses(system, [_own(batch, plans[name])], 2)
            for name, system in systems.items()
        }
    )
    steps = {
        name: lambda _step, name=name: systems[name].step(*_own(batch, plans[name]))
        for name in plans
    }
    arms = []
    for name, plan in plans.items():
        before = _sent_bytes(case)
        steps[name](0)
        arms.append(
            Arm(
                name=name,
                predicted_s=CostModel(setting).predict(plan).step_time_s,
                state_shares=[each.state_share for each in plan.ranks],
                sent_bytes=_sent_bytes(case) - before,
                needed_bytes=_needed_bytes(setting, plan),
            )
        )
    return arms, take_turns(steps, case.rounds, in_line=True)


def _plans(setting: Setting) -> dict[str, Plan]:
    """The planner's, its best without two levels, and that one with all units in two."""
    flat_setting = replace(setting, profile=replace(setting.profile, two_levels=None))
    planned, flat = (
        find_plan(each, global_batch_size=GLOBAL_BATCH_SIZE) for each in (setting, flat_setting)
    )
    return {
        AS_PLANNED: planned,
        ONE_LEVEL: flat,
        TWO_LEVELS: replace(flat, two_level_units=("*",)),
    }


def _needed_bytes(setting: Setting, plan: Plan) -> int:
    """Of gathers and reductions, each of whose rows crosses to the other of two nodes once."""
    workload = setting.workload
    units = workload.units
    launches = straight_schedule(len(units), plan.form).launches()
    return sum(workload.gathered_bytes(workload.kind_of(units[each.unit])) for each in launches)


def _system(plan: Plan, spec: DeviceSpec, emulated: EmulatedDevice) -> System:
    model = HetFSDP(make_decoder(CONFIG), plan, device_spec=spec)
    optimizer = fused_adamw(model.parameters(), LEARNING_RATE)
    emulated.slow_down(model, optimizer)

    def step(*batch: torch.Tensor) -> float | None:
        mean_loss = model.forward_backward(*batch)
        optimizer.step()
        optimizer.zero_grad()
        return mean_loss

    return System("HetFSDP", step)


def _own(batch: Sequence[torch.Tensor], plan: Plan) -> tuple[torch.Tensor, ...]:
    mine = plan.sample_indices(dist.get_rank())
    return tuple(each[mine] for each in batch)


def _sent_bytes(case: Case) -> int:
    """What both hosts have sent over the cable so far.  Collective."""
    dist.barrier()
    sent = torch.tensor(0)
    if dist.get_rank() in (0, case.numbers[0]):
        # The columns of a device (proc(5)): eight of what it has received, then bytes sent.
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        [counts] = [line for line in lines if line.split(":")[0].strip() == os.environ[DEVICE]]
        sent += int(counts.partition(":")[2].split()[8])
    dist.all_reduce(sent)
    return int(sent)


# From outside


def run(case: Case) -> tuple[list[Arm], list[TimedStep]]:
    """All ranks of a case, each on its side of the cable."""
    mbit_per_s = ALIKE_MBIT_PER_S if case.mbit_per_s is None else case.mbit_per_s
    return run_over_cable(train, case.numbers, mbit_per_s, case)[0]


def main() -> None:
    """Run the cases and keep what they took."""
    parser = parser_of(__doc__, quick="one case, one turn of each plan, and keeps nothing")
    options = parse_cases(parser, CASES)
    cases = options.cases
    page = Page(HERE, is_kept=len(cases) == len(CASES) and not options.quick)
    if options.quick:
        cases = cases[:1]
    arms_by_case, samples = {}, []
    for case in cases:
        console.print(case.name, markup=False)
        arms, steps = run(case)
        arms_by_case[case.name] = arms
        samples += [
            Sample(
                case=case.name,
                levels=each.system,
                round=each.round,
                step=each.step,
                seconds=each.slowest_rank_s,
            )
            for each in steps
        ]
    report(arms_by_case, samples, page)
    page.keep({"results.csv": samples})


def report(arms_by_case: dict[str, list[Arm]], samples: Sequence[Sample], page: Page) -> None:
    """A row for each plan, and the bars."""
    rows, bars = [], []
    for case, arms in arms_by_case.items():
        ratios = {}
        for arm in arms:
            of_arm = _medians(samples, case, arm.name)
            one_level = _medians(samples, case, ONE_LEVEL)
            ratio = Spread.of([one_level[i] / of_arm[i] for i in of_arm])
            ratios[arm.name] = ratio.median
            rows.append(
                [
                    case,
                    f"{arm.name}, shares {' '.join(f'{x:.2f}' for x in arm.state_shares)}",
                    Spread.of(list(of_arm.values())).cell(3),
                    ratio.cell(2),
                    f"{arm.predicted_s:.3f}",
                    f"{arm.sent_bytes / 1e6:.1f}",
                ]
            )
        bars += _bars(case, arms, ratios)
    page.table("Steps (median of rounds, 10th and 90th percentile)", HEADER, rows)
    page.bars(bars)


def _bars(case: str, arms: Sequence[Arm], ratios: dict[str, float]) -> list[Bar]:
    gain = Bar(
        claim=f"{case}: steps of one level, as long as those as planned",
        measured=ratios[AS_PLANNED],
        at_least=1.3 if "2 + 4 over" in case else 0.97 if "alike" in case else None,
    )
    two = next(each for each in arms if each.name == TWO_LEVELS)
    once = Bar(
        claim=f"{case}: bytes over the cable, of each row once per node (frames, both ways)",
        measured=two.sent_bytes / two.needed_bytes,
    )
    return [gain, once]


def _medians(samples: Sequence[Sample], case: str, levels: str) -> dict[int, float]:
    """Seconds by round."""
    found: dict[int, list[float]] = {}
    for each in samples:
        if each.case == case and each.levels == levels:
            found.setdefault(each.round, []).append(each.seconds)
    return {turn: median(seconds) for turn, seconds in found.items()}


if __name__ == "__main__":
    main()
