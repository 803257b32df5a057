"""Profile, plan, simulate, train: does a step take as long as was said?"""

from collections.abc import Sequence
from functools import partial

from experiments.common.results import Bar, Table
from experiments.gpu import systems
from experiments.gpu.clock import free_everything, take_turns
from experiments.gpu.profiling import (
    in_training,
    measure_here,
    plans_by_hand,
)
from experiments.gpu.results import (
    Recorder,
    Row,
    cases_of,
    comparison,
    median_of,
    noting_failure,
    shown,
    spread_cell,
    values_of,
)
from experiments.gpu.scale import Job
from shardhet import Plan, simulate
from shardhet.planner import Constraints, solve
from shardhet.profiler.measure import Measurement

NAME = "prediction"
PREDICTED, SIMULATED, MEASURED = "predicted step", "simulated step", "measured step"
BOUND = "lower bound of any plan"
MAX_STEPS_OF_A_TURN = 5
TOLERANCE = 0.10


def run(job: Job, record: Recorder) -> None:
    """The plan that was found first, then plans by hand."""
    measured = measure_here(job, seconds=job.budget_s / 2)
    setting = measured.setting
    plans = found_plan(job, measured, record) | plans_by_hand(job)
    for case, plan in plans.items():
        free_everything(job.device)
        with noting_failure(case, record):
            record(case, SIMULATED, simulate(plan, setting).step_time_s, "s")
            train(job, case, plan, job.budget_s / 2 / len(plans), record)


def train(job: Job, case: str, plan: Plan, budget_s: float, record: Recorder) -> None:
    """Turns of a few steps each."""
    step = partial(
        in_training(job, plan).step,
        *systems.random_batch(job.scale.config, plan.global_batch_size, job.device),
    )
    step()
    turns = take_turns(
        {case: step},
        job.device,
        num_rounds=job.pick(full=5, short=2),
        budget_s=budget_s,
        at_most=MAX_STEPS_OF_A_TURN,
    )
    for turn in turns:
        record(case, MEASURED, turn.seconds, "s", turn.number)


def found_plan(job: Job, measured: Measurement, record: Recorder) -> dict[str, Plan]:
    """What the planner chooses for twice what fits at once."""
    size = job.scale.microbatch_size
    solution = solve(
        measured.setting,
        global_batch_size=2 * size,
        constraints=Constraints(max_microbatch_size=size),
    )
    [rank] = solution.plan.ranks
    sizes = " + ".join(map(str, rank.microbatch_sizes))
    num_recomputed = sum(rank.recomputes(unit.fqn) for unit in solution.plan.units)
    name = f"planned: {sizes}, {num_recomputed} units recomputed"
    record(name, PREDICTED, solution.predicted.step_time_s, "s")
    record(name, BOUND, solution.lower_bound_s, "s")
    return {name: solution.plan}


# Tables


def tables(rows: Sequence[Row]) -> list[Table]:
    """One line per plan."""
    lines = []
    for case in cases_of(rows, SIMULATED):
        simulated, measured = (
            median_of(rows, case, SIMULATED),
            median_of(rows, case, MEASURED),
        )
        error = shown(simulated / measured - 1, "{:+.1%}") if simulated and measured else ""
        spread = spread_cell(values_of(rows, case, MEASURED), 1, scale=1000)
        lines.append([case, shown(simulated, "{:.1f}", scale=1000), spread, error])
    header = ["plan", "simulated ms", "measured ms (p10-p90)", "error"]
    return [Table("Step time", header, lines)]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Simulated within ten per cent of measured."""
    return comparison(rows, "step time", (SIMULATED, MEASURED), TOLERANCE)
