"""Peak memory as predicted from the profile, and as the allocator counted it."""

from dataclasses import fields

from experiments.gpu import systems
from experiments.gpu.clock import PeakMeter, free_everything
from experiments.gpu.profiling import (
    in_training,
    measure_here,
    plans_by_hand,
)
from experiments.gpu.results import GIB, Metric, Recorder, noting_failure
from experiments.gpu.scale import Job
from shardhet import Plan, simulate
from shardhet.apps.launch.joining import choose_allocator
from shardhet.pricing.cost import CostModel
from shardhet.pricing.step_cost import MemoryParts
from shardhet.profiler.measure import Measurement

NAME = "memory"
NUM_STEPS = 3  # optimizer state is there after the first
PREDICTED, SIMULATED, MEASURED = "predicted GiB", "simulated GiB", "measured GiB"
RESERVED = "reserved GiB"  # what the caching allocator took for it
METRICS = (
    *(Metric(name=each) for each in (PREDICTED, SIMULATED, MEASURED, RESERVED)),
    Metric(name="measured / predicted", at_least=0.95, at_most=1.05),
    Metric(name="reserved / predicted", at_most=1.10),
)


def run(job: Job, record: Recorder) -> None:
    """Predict every plan, then train it."""
    choose_allocator()  # as `shardhet train` does
    measured = measure_here(job, seconds=job.budget_s / 2)
    for case, plan in plans_by_hand(job).items():
        free_everything(job.device)
        with noting_failure(case, record):
            train(job, case, plan, predict(case, plan, measured, record), record)


def predict(case: str, plan: Plan, measured: Measurement, record: Recorder) -> float:
    """What tensors will need, in all and by what it is for."""
    scenario = measured.scenario
    parts = CostModel(scenario).predict(plan).ranks[0].memory
    # The context and libraries' own memory are not the allocator's.
    predicted = parts.total_bytes - parts.reserved_bytes
    simulated = simulate(plan, scenario).ranks[0].peak_bytes - parts.reserved_bytes
    record(case, PREDICTED, predicted / GIB, "GiB")
    record(case, SIMULATED, simulated / GIB, "GiB")
    for field in fields(MemoryParts):
        record(case, field.name, getattr(parts, field.name) / GIB, "GiB")
    return predicted


def train(job: Job, case: str, plan: Plan, predicted: float, record: Recorder) -> None:
    """A few steps, from the first weight on."""
    meter = PeakMeter(job.device)
    system = in_training(job, plan)
    batch = systems.random_batch(job.scale.config, plan.global_batch_size, job.device)
    for _ in range(NUM_STEPS):
        system.step(*batch)
    peak = meter.read()
    record(case, MEASURED, peak.allocated / GIB, "GiB")
    record(case, RESERVED, peak.reserved / GIB, "GiB")
    record(case, "measured / predicted", peak.allocated / predicted)
    record(case, "reserved / predicted", peak.reserved / predicted)
