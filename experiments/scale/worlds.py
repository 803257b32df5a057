"""World size: is the step of many unlike ranks as long as the simulator says?

Ranks of speeds 1, 1/2, 1/4, 1/4, over and over, compute asleep; collectives, schedule and
runtime are real.  The profile is made of the sleeps and of gathers and reductions that the
same ranks have just measured; nothing of the step that is predicted goes into it.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from experiments.common import launch, systems
from experiments.common.results import Bar, Table
from experiments.common.systems import HET, Rounds, System
from experiments.scale.paced import ROW_NUMEL, PacedModel, Sleeper
from experiments.scale.records import (
    Effort,
    Part,
    Report,
    Sample,
    cases_in,
    median,
    ms,
    ms_spread,
    samples_of,
    spread,
    step_seconds,
)
from experiments.scale.slept_profile import (
    SPEEDS,
    cluster_of,
    measured_profile,
    speed_of,
    workload_of,
)
from shardhet import HetFSDP, Plan, simulate
from shardhet.pricing.setting import Setting

NAME = "worlds"
WORLD_SIZES = (4, 8, 16, 32)
FAR_WORLD_SIZES = (*WORLD_SIZES, 64)
QUICK_WORLD_SIZES = (4,)
BAR_WORLD_SIZE = 32
MOST_ERROR = 0.10

NUM_UNITS = 6
QUICK_NUM_UNITS = 2
UNIT_NUMEL = 256 * ROW_NUMEL  # 64 KiB: two cores carry the collectives of all ranks
# Of a unit, at speed 1: beside it the processor's time of 32 runtimes on two cores is little.
FORWARD_S_PER_SAMPLE = 10e-3
MICROBATCH_SIZE = 2
SAMPLES_PER_RANK = 4
STATE = (0.4, 0.3, 0.2, 0.1)  # what four neighbours store of what the four store together

STEP, SIMULATED = "step_s", "simulated_s"
GATHER, REDUCE = "gather_s", "reduce_s"
COLLECTIVES = "collectives"


def measure(effort: Effort) -> list[Sample]:
    """One launch for each world size."""
    sizes = FAR_WORLD_SIZES if effort.is_far else WORLD_SIZES
    sizes = QUICK_WORLD_SIZES if effort.is_quick else sizes
    num_units, num_repeats = (QUICK_NUM_UNITS, 5) if effort.is_quick else (NUM_UNITS, 15)
    extent = (num_units, effort.rounds(2, 2), num_repeats)
    return [
        sample
        for size in sizes
        for sample in launch.run_ranks(measure_rank, size, *extent, context=launch.FORKED)[0]
    ]


def plans_of(world_size: int) -> dict[str, Plan]:
    """By name: batches that suit the speeds, and equal ones that make the fast ranks wait."""
    shares = [STATE[i % len(STATE)] * len(STATE) / world_size for i in range(world_size)]
    total = world_size * SAMPLES_PER_RANK
    speeds = {"by speed": [speed_of(i) for i in range(world_size)], "equal": [1.0] * world_size}
    return {
        name: Plan.proportional(
            speeds=each,
            global_batch_size=total,
            microbatch_size=MICROBATCH_SIZE,
            state_shares=shares,
        )
        for name, each in speeds.items()
    }


def measure_rank(rank: int, num_units: int, rounds: Rounds, num_repeats: int) -> list[Sample]:
    """Collectives first, then predictions, then the steps."""
    size = dist.get_world_size()
    cluster = cluster_of(size)
    workload = workload_of(num_units, UNIT_NUMEL)
    profile, gather_s, reduce_s = measured_profile(
        cluster, workload, FORWARD_S_PER_SAMPLE, num_repeats=num_repeats
    )
    plans = plans_of(size)
    contestants = []
    for name, plan in plans.items():
        model = PacedModel(num_units, UNIT_NUMEL, Sleeper())
        model.set_pace(FORWARD_S_PER_SAMPLE / speed_of(rank))
        system = systems.het_fsdp(HetFSDP(model, plan), None, name=name)
        batch = torch.randn(plan.ranks[rank].rank_batch_size, 1)
        contestants.append(System(name, partial(system.step, batch)))
    measured_s = step_seconds(contestants, (), rounds)
    setting = Setting(cluster, workload, profile)
    simulated_s = {name: [simulate(plan, setting).step_time_s] for name, plan in plans.items()}
    return [
        sample
        for quantity, values in (
            (GATHER, {COLLECTIVES: gather_s}),
            (REDUCE, {COLLECTIVES: reduce_s}),
            (SIMULATED, simulated_s),
            (STEP, measured_s),
        )
        for sample in samples_of(NAME, f"{size} ranks", quantity, values)
    ]


def errors(samples: Sequence[Sample], case: str) -> dict[str, float]:
    """Of the simulated step time, relative, by plan; below zero where steps were longer."""
    return {
        name: median(samples, case, name, SIMULATED) / median(samples, case, name, STEP) - 1
        for name in plans_of(len(SPEEDS))
    }


def report(samples: Sequence[Sample]) -> Report:
    """One row per world and plan; a bar for the largest world that was asked for."""
    rows = []
    for case in cases_in(samples):
        gather_s, reduce_s = (median(samples, case, COLLECTIVES, q) for q in (GATHER, REDUCE))
        rows += [
            [
                case,
                name,
                f"{ms(gather_s)} + {ms(reduce_s)}",
                ms(median(samples, case, name, SIMULATED)),
                ms_spread(spread(samples, case, name, STEP)),
                f"{error:+.1%}",
            ]
            for name, error in errors(samples, case).items()
        ]
    header = ["world", "batches", "gather + reduction", "simulated", "measured", "error"]
    largest = f"{BAR_WORLD_SIZE} ranks"
    judged = largest if largest in cases_in(samples) else cases_in(samples)[-1]
    bar = Bar(
        claim=f"worlds, {judged}: simulated against measured step time, the worse plan",
        measured=max(map(abs, errors(samples, judged).values())),
        at_most=MOST_ERROR,
    )
    title = f"Worlds of {HET}: speeds 1, 1/2, 1/4, 1/4 over and over, ms (p10-p90)"
    return Report(tables=[Table(title=title, header=header, rows=rows)], bars=[bar])


PART = Part(name=NAME, measure=measure, report=report)
