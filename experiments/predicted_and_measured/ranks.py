"""What runs in the ranks: measure, plan, predict, and take the steps."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.common.unlike import Slowness
from experiments.decoders import make_decoder
from experiments.predicted_and_measured.cases import Case, plans_of
from shardhet import HetFSDP, Plan, simulate
from shardhet.fsdp.step.around import Activity, Observed
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import Measurement, MeasuringEffort, measure
from shardhet.training.emulation import EmulatedDevice
from shardhet.training.optim import OptimizerSpec

OPTIMIZER = OptimizerSpec(learning_rate=1e-4)
WAITS = (Activity.WAIT_GATHER, Activity.WAIT_REDUCE, Activity.AGREE)
# The first finds the order of units and makes the optimizer's state.  Later ones still touch
# memory that is new to the process, which takes longer than computing in it.
NUM_WARMUP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step as it was, or as the simulator sees it with the profile of its sitting."""

    plan_name: str
    sitting: int
    step_time_s: float  # of the slowest rank
    waits: tuple[float, ...]  # of each rank, for the slowest one's end too; parts of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    """Everything of one launch; the same on every rank."""

    plans: Mapping[str, Plan]
    predictions: Sequence[Step]
    steps: Sequence[Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much to measure of a case."""

    effort: MeasuringEffort  # of each profile
    num_sittings: int  # launches
    num_steps: int  # of each plan, in each launch


def sit(
    rank: int,
    case: Case,
    slownesses: Sequence[Slowness],
    extent: Extent,
    number: int,
    plans: Mapping[str, Plan],
) -> Sitting:
    """A profile, its predictions, and steps of one plan after the other.

    Without ``plans`` they are made from this profile.
    """
    slowness = slownesses[rank]
    with slowness.applied():
        measurement = _measure(case, slowness, extent.effort)
        plans = plans or plans_of(case, measurement.scenario)
        predictions = [
            _predict(name, plan, number, measurement) for name, plan in plans.items()
        ]
        steps = [
            step
            for name, plan in plans.items()
            for step in _steps(case, name, plan, slowness.device, number, extent.num_steps)
        ]
    return Sitting(plans=plans, predictions=predictions, steps=steps)


def _steps(
    case: Case, name: str, plan: Plan, device: EmulatedDevice, sitting: int, num_steps: int
) -> list[Step]:
    """Of a model that is alone in its processes."""
    run = _Run(case, name, plan, device)
    for _ in range(NUM_WARMUP_STEPS):
        run.step(sitting)
    return [run.step(sitting) for _ in range(num_steps)]


def _measure(case: Case, slowness: Slowness, effort: MeasuringEffort) -> Measurement:
    return measure(
        TrainedModel(
            module=make_decoder(case.config), batch=ExampleBatch(args=_batch(case, 0, 2))
        ),
        device_spec=case.cluster.device_spec(dist.get_rank()),
        emulated=slowness.device,
        optimizer=OPTIMIZER,
        effort=effort,
    )


def _predict(name: str, plan: Plan, sitting: int, measurement: Measurement) -> Step:
    timeline = simulate(plan, measurement.scenario)
    return Step(
        plan_name=name,
        sitting=sitting,
        step_time_s=timeline.step_time_s,
        waits=tuple(rank.waiting_s / timeline.step_time_s for rank in timeline.ranks),
    )


class _Run:
    """HetFSDP under one plan."""

    def __init__(self, case: Case, name: str, plan: Plan, device: EmulatedDevice) -> None:
        spec = case.cluster.device_spec(dist.get_rank())
        self._name = name
        self._model = HetFSDP(make_decoder(case.config), plan, device_spec=spec)
        self._optimizer = OPTIMIZER.build(list(self._model.parameters()))
        device.slow_down(self._model, self._optimizer)
        position = self._model.position
        self._batch = _batch(
            case, plan.first_sample(position), plan.ranks[position].rank_batch_size
        )
        self._waited_s = 0.0
        self._model.add_observer(self._add)

    def step(self, sitting: int) -> Step:
        """One optimizer step.  Collective."""
        dist.barrier()
        self._waited_s = 0.0
        start_s = time.perf_counter()
        self._model.backward(*self._model(*self._batch))
        self._optimizer.step()
        seconds = time.perf_counter() - start_s
        self._optimizer.zero_grad()
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, (self._model.position, seconds, seconds - self._waited_s))
        rows.sort()
        step_time_s = max(seconds for _, seconds, _ in rows)
        return Step(
            plan_name=self._name,
            sitting=sitting,
            step_time_s=step_time_s,
            waits=tuple(1 - busy_s / step_time_s for *_, busy_s in rows),
        )

    def _add(self, event: Observed) -> None:
        if event.activity in WAITS:
            self._waited_s += event.end_s - event.start_s


def _batch(case: Case, first: int, num_samples: int) -> tuple[Tensor, Tensor]:
    """Samples of the global batch; targets are as random as tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.global_batch_size, case.config.seq_len)
    tokens = torch.randint(case.config.vocab_size, shape, generator=generator)
    own = tokens[first : first + num_samples]
    return own, own
