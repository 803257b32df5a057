"""Profile, plan, simulate, train: does a step take as long as was said?"""

from collections.abc import Iterator
from functools import partial

from experiments.gpu import systems
from experiments.gpu.clock import free_everything, take_turns
from experiments.gpu.profiling import (
    in_training,
    measure_here,
    plans_by_hand,
)
from experiments.gpu.results import Metric, Recorder, noting_failure
from experiments.gpu.scale import Job
from shardhet import Plan, simulate
from shardhet.planner import Constraints, solve
from shardhet.profiler.measure import Measurement

NAME = "prediction"
PREDICTED, SIMULATED, MEASURED = "predicted step", "simulated step", "measured step"
BOUND, RATIO = "lower bound of any plan", "simulated / measured"
MAX_STEPS_OF_A_TURN = 5
METRICS = (
    Metric(name=SIMULATED),
    Metric(name=MEASURED),
    Metric(name=RATIO, at_least=0.9, at_most=1.1),
)


def run(job: Job, record: Recorder) -> None:
    """The plan that was found first, then plans by hand."""
    measured = measure_here(job, seconds=job.budget_s / 2)
    scenario = measured.scenario
    plans = found_plan(job, measured, record) | plans_by_hand(job)
    for case, plan in plans.items():
        free_everything(job.device)
        with noting_failure(case, record):
            simulated_s = simulate(plan, scenario).step_time_s
            record(case, SIMULATED, simulated_s, "s")
            for number, seconds in enumerate(turns(job, plan, job.budget_s / 2 / len(plans))):
                record(case, MEASURED, seconds, "s", number)
                record(case, RATIO, simulated_s / seconds, "", number)


def turns(job: Job, plan: Plan, budget_s: float) -> Iterator[float]:
    """Seconds of a step in each of some turns of a few."""
    step = partial(
        in_training(job, plan).step,
        *systems.random_batch(job.scale.config, plan.global_batch_size, job.device),
    )
    step()
    found = take_turns(
        {"": step},
        job.device,
        num_rounds=job.pick(full=5, short=2),
        budget_s=budget_s,
        at_most=MAX_STEPS_OF_A_TURN,
    )
    return (turn.seconds for turn in found)


def found_plan(job: Job, measured: Measurement, record: Recorder) -> dict[str, Plan]:
    """What the planner chooses for twice what fits at once."""
    size = job.scale.microbatch_size
    solution = solve(
        measured.scenario,
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
