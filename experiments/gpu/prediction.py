"""Profile, plan, simulate, train: does a step take as long as was said?"""

from collections.abc import Sequence

from experiments.common.results import Bar, Table
from experiments.gpu import systems
from experiments.gpu.clock import free_everything, seconds_per_call, turns_that_fit
from experiments.gpu.profiling import (
    PlannedCase,
    in_training,
    measure_here,
    noting_lack_of_memory,
    planned_cases,
)
from experiments.gpu.results import (
    Recorder,
    Row,
    cases_of,
    median_of,
    ratio_bar,
    shown,
    spread_cell,
    values_of,
)
from experiments.gpu.scale import Job
from shardhet import simulate
from shardhet.planner import Demands, solve
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
    cases = [found_case(job, measured, record), *planned_cases(job)]
    for case in cases:
        timeline = simulate(case.plan, setting)
        record(case.name, SIMULATED, timeline.step_time_s, "s")
        free_everything(job.device)
        with noting_lack_of_memory(case, record):
            train(job, case, job.budget_s / 2 / len(cases), record)


def train(job: Job, case: PlannedCase, budget_s: float, record: Recorder) -> None:
    """Turns of a few steps each."""
    system = in_training(job, case.plan)
    batch = systems.random_batch(job.scale.config, case.batch_size, job.device)

    def step() -> None:
        system.step(*batch)

    for _ in range(2):
        step()
    num_rounds = job.pick(full=5, short=2)
    step_s = seconds_per_call(step, 1, job.device)
    num_steps = turns_that_fit(step_s, budget_s / num_rounds, at_most=MAX_STEPS_OF_A_TURN)
    for turn in range(num_rounds):
        seconds = seconds_per_call(step, num_steps, job.device)
        record(case.name, MEASURED, seconds, "s", turn)


def found_case(job: Job, measured: Measurement, record: Recorder) -> PlannedCase:
    """What the planner chooses for twice what fits at once."""
    size = job.scale.microbatch_size
    solution = solve(
        measured.setting,
        global_batch_size=2 * size,
        demands=Demands(max_microbatch_size=size),
    )
    [rank] = solution.plan.ranks
    sizes = " + ".join(map(str, rank.microbatch_sizes))
    num_recomputed = sum(rank.recomputes(unit.fqn) for unit in solution.plan.units)
    name = f"planned: {sizes}, {num_recomputed} units recomputed"
    record(name, PREDICTED, solution.predicted.step_time_s, "s")
    record(name, BOUND, solution.lower_bound_s, "s")
    return PlannedCase(name=name, plan=solution.plan)


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
        simulated_ms = None if simulated is None else 1000 * simulated
        ms = [1000 * seconds for seconds in values_of(rows, case, MEASURED)]
        lines.append([case, shown(simulated_ms, "{:.1f}"), spread_cell(ms, 1), error])
    header = ["plan", "simulated ms", "measured ms (p10-p90)", "error"]
    return [Table("Step time", header, lines)]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Simulated within ten per cent of measured."""
    found = []
    for case in cases_of(rows, MEASURED):
        found += ratio_bar(
            f"{case}: step time, simulated / measured",
            median_of(rows, case, SIMULATED),
            median_of(rows, case, MEASURED),
            at_least=1 - TOLERANCE,
            at_most=1 + TOLERANCE,
        )
    return found
