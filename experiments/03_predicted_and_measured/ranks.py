"""What runs in the ranks: measure, plan, predict, and then take the steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, plans_of
from torch import Tensor

from experiments.decoders import make_decoder
from experiments.unlike import Slowness
from shardhet import HetFSDP, Plan, simulate
from shardhet.emulation import EmulatedDevice
from shardhet.fsdp.observer import Activity, Event
from shardhet.optim import AdamW
from shardhet.profiler.batch import ExampleBatch
from shardhet.profiler.measure import Effort, measure
from shardhet.profiler.unit_runner import TrainedModel

OPTIMIZER = AdamW(learning_rate=1e-4)
WAITS = (Activity.WAIT_GATHER, Activity.WAIT_REDUCE, Activity.AGREE)
NUM_WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step as the simulator sees it."""

    plan_name: str
    plan: Plan
    step_time_s: float
    waits: tuple[float, ...]  # of each rank, as a fraction of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step as it was."""

    plan_name: str
    round: int
    step_time_s: float  # of the slowest rank
    waits: tuple[float, ...]  # for the end of the slowest rank, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything of one case; the same on every rank."""

    predictions: tuple[Prediction, ...]
    steps: tuple[Step, ...]


def compare(
    rank: int, case: Case, slownesses: Sequence[Slowness], effort: Effort, num_rounds: int
) -> Comparison:
    """Measure once, then take steps of all plans in turn."""
    slowness = slownesses[rank]
    with slowness.applied():
        measurement = measure(
            TrainedModel(
                module=make_decoder(case.config),
                batch=ExampleBatch(args=_batch(case, 0, 2)),
            ),
            device_spec=case.cluster.device_spec(rank),
            emulated=slowness.device,
            optimizer=OPTIMIZER,
            effort=effort,
        )
    records = (measurement.cluster, measurement.workload, measurement.profile)
    predictions = []
    for name, plan in plans_of(case, *records).items():
        timeline = simulate(plan, *records)
        predictions.append(
            Prediction(
                plan_name=name,
                plan=plan,
                step_time_s=timeline.step_time_s,
                waits=tuple(rank.waiting_s / timeline.step_time_s for rank in timeline.ranks),
            )
        )
    runs = [_Run(case, each, slowness.device) for each in predictions]
    with slowness.applied():
        for run in runs:
            for _ in range(NUM_WARMUP_STEPS):
                run.step(0)
        steps = [run.step(number) for number in range(num_rounds) for run in runs]
    return Comparison(predictions=tuple(predictions), steps=tuple(steps))


class _Run:
    """HetFSDP under one plan."""

    def __init__(self, case: Case, prediction: Prediction, device: EmulatedDevice) -> None:
        plan = prediction.plan
        spec = case.cluster.device_spec(dist.get_rank())
        self._name = prediction.plan_name
        self._model = HetFSDP(make_decoder(case.config), plan, device_spec=spec)
        self._optimizer = OPTIMIZER.build(list(self._model.parameters()))
        device.slow_down(self._model, self._optimizer)
        position = self._model.position
        self._batch = _batch(
            case, plan.first_sample(position), plan.ranks[position].rank_batch_size
        )
        self._waited_s = 0.0
        self._model.add_observer(self._add)

    def step(self, number: int) -> Step:
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
            round=number,
            step_time_s=step_time_s,
            waits=tuple(1 - busy_s / step_time_s for *_, busy_s in rows),
        )

    def _add(self, event: Event) -> None:
        if event.activity in WAITS:
            self._waited_s += event.end_s - event.start_s


def _batch(case: Case, first: int, num_samples: int) -> tuple[Tensor, Tensor]:
    """Samples of the global batch; targets are as random as tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.global_batch_size, case.config.seq_len)
    tokens = torch.randint(case.config.vocab_size, shape, generator=generator)
    own = tokens[first : first + num_samples]
    return own, own
