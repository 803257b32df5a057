"""One rank of a run in which a device becomes slower."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from experiments.decoders import decoder_config, make_decoder, random_batches
from shardhet import (
    DeviceSpec,
    HetFSDP,
    Hooks,
    Plan,
    Rebalancer,
    Setting,
    find_plan,
    redistribute,
)
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.training.emulation import EmulatedDevice, Stretch
from shardhet.training.optim import OptimizerSpec

CONFIG = decoder_config(width=64, num_layers=4, seq_len=32)
BATCH = 48
OPTIMIZER = OptimizerSpec(learning_rate=1e-3)
EFFORT = MeasuringEffort(max_microbatch_size=8, num_repeats=5, time_limit_s=12.0)
NUM_STEPS = 22  # after the device has slowed down
BLOCK = 6  # steps under one plan, of which the first does not count
NUM_BLOCKS = 6  # by turns of the plan that was found and the fresh one


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster, and which of its devices becomes half as fast, and when."""

    name: str
    speeds: tuple[float, ...]
    slowed: int  # rank
    after: int  # steps

    def speed(self, rank: int, *, is_slowed: bool) -> float:
        """The speed of a rank, before or after."""
        return self.speeds[rank] / (2 if is_slowed and rank == self.slowed else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a rank saw; the same on every rank."""

    found_after: int | None  # steps after the device had slowed down
    moved_in_s: float
    samples: str  # of each rank: planned, planned anew, and in the fresh plan
    before_s: Sequence[float]  # of steps before
    slowed_s: Sequence[float]  # until there was a new plan
    rebalanced_s: Sequence[float]  # by turns with the fresh plan
    fresh_s: Sequence[float]
    loss_error: float  # relative to an undisturbed run, the most


def measure_case(rank: int, case: Case, is_slowed: bool) -> Setting:
    """The profile of the cluster, before or after."""
    speed = case.speed(rank, is_slowed=is_slowed)
    tokens, targets = random_batches(CONFIG, 2, seed=0)[0]
    return measure(
        TrainedModel(module=make_decoder(CONFIG), batch=ExampleBatch(args=(tokens, targets))),
        device_spec=_spec(rank, speed),
        emulated=EmulatedDevice(speed=speed),
        optimizer=OPTIMIZER,
        effort=EFFORT,
    ).setting


def run_case(rank: int, case: Case, settings: Sequence[Setting]) -> Course:
    """Train undisturbed, then with a device that slows down, then compare plans.

    ``settings`` were measured with the device fast and slow.
    """
    planned, fresh = (find_plan(each, global_batch_size=BATCH) for each in settings)
    undisturbed = _Run(rank, case, planned)
    expected = [undisturbed.step()[0] for _ in range(case.after + NUM_STEPS)]
    run = _Run(rank, case, planned)
    rebalancer = Rebalancer(settings[0])
    hooks = Hooks(run.model, run.optimizer, [rebalancer])
    losses, times_s, found, moved_in_s = [], [], None, 0.0
    with hooks:
        for step in range(1, case.after + NUM_STEPS + 1):
            if step == case.after + 1:
                run.slow_down()
            loss, seconds = run.step()
            losses.append(loss)
            times_s.append(seconds)
            hooks.after_step(loss)
            imbalance = rebalancer.found
            if imbalance is not None and imbalance.new_plan is not None and step > case.after:
                found = found or step
                moved_in_s = moved_in_s or imbalance.new_plan.moved_in_s
    rebalanced = run.model.plan
    by_turns: tuple[list[float], list[float]] = ([], [])
    for block in range(NUM_BLOCKS):
        redistribute(run.model, run.optimizer, (rebalanced, run.own(fresh))[block % 2])
        by_turns[block % 2].extend([run.step()[1] for _ in range(BLOCK)][1:])
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return Course(
        found_after=None if found is None else found - case.after,
        moved_in_s=moved_in_s,
        samples="; ".join(map(_samples, (planned, rebalanced, fresh))),
        before_s=times_s[3 : case.after],
        slowed_s=times_s[case.after : found],
        rebalanced_s=by_turns[0],
        fresh_s=by_turns[1],
        loss_error=max(errors),
    )


def _samples(plan: Plan) -> str:
    return " ".join(str(rank.rank_batch_size) for rank in plan.ranks)


def _spec(rank: int, speed: float) -> DeviceSpec:
    kind = f"emulated {speed:g}x"
    return DeviceSpec(host="here", kind=kind, memory_capacity_bytes=2**32)


class _Run:
    """A model that is trained on the same batches in every run."""

    def __init__(self, rank: int, case: Case, plan: Plan) -> None:
        self._rank, self._case = rank, case
        speed = case.speed(rank, is_slowed=False)
        self.model = HetFSDP(make_decoder(CONFIG), plan, device_spec=_spec(rank, speed))
        self.optimizer = OPTIMIZER.build(list(self.model.parameters()))
        device = EmulatedDevice(speed=speed)
        stretch = device.slow_down(self.model, self.optimizer, changes=True)
        assert isinstance(stretch, Stretch)
        self._stretch = stretch

    def slow_down(self) -> None:
        """From now on the device of the case is half as fast."""
        self._stretch.speed = self._case.speed(self._rank, is_slowed=True)

    def own(self, plan: Plan) -> Plan:
        """A plan for the cluster after, as one for this run's devices."""
        ranks = tuple(
            replace(new, device=old.device)
            for new, old in zip(plan.ranks, self.model.plan.ranks, strict=True)
        )
        return replace(plan, ranks=ranks, units=())

    def step(self) -> tuple[float, float]:
        """One step; its loss, and its seconds on the slowest rank.  Collective."""
        model = self.model
        [(tokens, targets)] = random_batches(CONFIG, BATCH, seed=model.step)
        first = model.plan.first_sample(model.position)
        rows = slice(first, first + model.plan.ranks[model.position].rank_batch_size)
        dist.barrier()
        start_s = time.perf_counter()
        loss = model.backward(*model(tokens[rows], targets[rows]))
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = torch.tensor(time.perf_counter() - start_s)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        assert loss is not None
        return loss, float(seconds)
