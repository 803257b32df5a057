"""Peak memory as predicted from the profile, and as the allocator counted it."""

from collections.abc import Sequence
from dataclasses import fields

from experiments.common.results import Bar, Table
from experiments.gpu import systems
from experiments.gpu.clock import PeakMeter, free_everything
from experiments.gpu.profiling import (
    in_training,
    measure_here,
    plans_by_hand,
)
from experiments.gpu.results import (
    GIB,
    Recorder,
    Row,
    cases_of,
    comparison,
    median_of,
    noting_failure,
    ratio_bar,
    shown,
)
from experiments.gpu.scale import Job
from shardhet import Plan, simulate
from shardhet.apps.launch.joining import choose_allocator
from shardhet.pricing.cost import CostModel
from shardhet.pricing.step_cost import MemoryParts
from shardhet.profiler.measure import Measurement

NAME = "memory"
NUM_STEPS = 3  # optimizer state is there after the first
PREDICTED, SIMULATED, MEASURED = "predicted peak", "simulated peak", "measured peak"
RESERVED = "reserved peak"  # what the caching allocator took for it
TOLERANCE = 0.05
RESERVED_TOLERANCE = 0.10


def run(job: Job, record: Recorder) -> None:
    """Predict every plan, then train it."""
    choose_allocator()  # as `shardhet train` does
    measured = measure_here(job, seconds=job.budget_s / 2)
    for case, plan in plans_by_hand(job).items():
        free_everything(job.device)
        with noting_failure(case, record):
            predict(case, plan, measured, record)
            train(job, case, plan, record)


def predict(case: str, plan: Plan, measured: Measurement, record: Recorder) -> None:
    """What tensors will need, in all and by what it is for."""
    setting = measured.setting
    parts = CostModel(setting).predict(plan).ranks[0].memory
    # The context and libraries' own memory are not the allocator's.
    predicted = parts.total_bytes - parts.reserved_bytes
    simulated = simulate(plan, setting).ranks[0].peak_bytes - parts.reserved_bytes
    record(case, PREDICTED, predicted / GIB, "GiB")
    record(case, SIMULATED, simulated / GIB, "GiB")
    for field in fields(MemoryParts):
        record(case, field.name, getattr(parts, field.name) / GIB, "GiB")


def train(job: Job, case: str, plan: Plan, record: Recorder) -> None:
    """A few steps, from the first weight on."""
    meter = PeakMeter(job.device)
    system = in_training(job, plan)
    batch = systems.random_batch(job.scale.config, plan.global_batch_size, job.device)
    for _ in range(NUM_STEPS):
        system.step(*batch)
    peak = meter.read()
    record(case, MEASURED, peak.allocated / GIB, "GiB")
    record(case, RESERVED, peak.reserved / GIB, "GiB")


# Tables


def tables(rows: Sequence[Row]) -> list[Table]:
    """One line per plan."""
    lines = []
    for case in cases_of(rows, PREDICTED):
        values = [median_of(rows, case, metric) for metric in (PREDICTED, SIMULATED, MEASURED)]
        reserved = median_of(rows, case, RESERVED)
        lines.append([case, *map(shown, [*values, reserved])])
    header = ["plan", "predicted GiB", "simulated GiB", "measured GiB", "reserved GiB"]
    return [Table("Peak memory of a rank's tensors", header, lines)]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Measured within five per cent of predicted, and the allocator takes little more."""
    found = comparison(rows, "peak memory", (MEASURED, PREDICTED), TOLERANCE)
    for case in cases_of(rows, RESERVED):
        reserved, predicted = (median_of(rows, case, each) for each in (RESERVED, PREDICTED))
        claim = f"{case}: reserved / predicted"
        found += ratio_bar(claim, reserved, predicted, at_most=1 + RESERVED_TOLERANCE)
    return found
