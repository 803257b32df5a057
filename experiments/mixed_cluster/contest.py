"""What runs in the ranks: measure and plan, take turns, or train one system by itself."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from experiments.common.systems import System, check_same_losses
from experiments.common.unlike import MIB, Slowness, data_bytes, forget_building, forget_peak
from experiments.decoders import CPU, Batch, random_batches
from experiments.mixed_cluster import systems
from experiments.mixed_cluster.clusters import Case
from experiments.mixed_cluster.plans import MeasuringEffort, Planned, make_plans, measured
from experiments.mixed_cluster.systems import Make, Work
from shardhet.comm.groups import Communicators
from shardhet.training.emulation import THREAD_STACK_BYTES

NUM_BATCHES = 4
NUM_STEPS_COMPARED = 2  # losses of all systems are equal in these
TOGETHER = "plain PyTorch on all ranks at once, nothing shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A few steps of one system, or of plain PyTorch on one rank alone."""

    system: str
    round: int
    samples_per_s: float
    step_time_s: float  # of the slowest rank
    cpu_s: tuple[float, ...]  # of each rank in a step, of all its threads
    peak_mib: tuple[float, ...] = ()  # of each rank, above what it had before the model


def survey(
    rank: int, case: Case, slownesses: Sequence[Slowness], effort: MeasuringEffort
) -> list[Planned]:
    """HetFSDP's plans for the ranks as they are; the same list on every rank."""
    with slownesses[rank].applied():
        measurement = measured(case, slownesses[rank].device, effort)
    return make_plans(case, measurement)


def take_turns(
    rank: int,
    case: Case,
    slownesses: Sequence[Slowness],
    plans: Sequence[Planned],
    num_rounds: int,
    turn_s: float,
) -> list[Turn]:
    """Steps of every system and of plain PyTorch in the same processes; the same list on every
    rank.

    A slow second of the machine meets all of them, and who goes first in one round goes last
    in the next.
    """
    slowness = slownesses[rank]
    batches = batches_of(case)
    plain = systems.plain_pytorch(case.work, case.plain_batch_size, case.microbatch_size)
    contestants = [make() for make in makers(rank, case, slowness, plans).values()]

    def plain_turns(number: int) -> Iterator[Turn]:
        for slow_rank in range(dist.get_world_size()):
            yield _plain_turn(plain, batches, case, number, slow_rank)
        yield _plain_together(plain, batches, case, number)

    with slowness.applied():
        plain.step(*batches[0])  # warms up
        seconds = first_steps(contestants, batches)
        num_steps = {
            system.name: max(1, round(turn_s / each))
            for system, each in zip(contestants, seconds, strict=True)
        }
        return [
            turn
            for number in range(num_rounds)
            for turn in (
                *plain_turns(number),
                *(
                    _turn(system, batches, case.work, number, num_steps[system.name])
                    for system in contestants[:: 1 if number % 2 else -1]
                ),
            )
        ]


def train_by_itself(
    rank: int,
    case: Case,
    slowness: Sequence[Slowness],
    plans: Sequence[Planned],
    name: str,
    num_steps: int,
) -> Turn:
    """One system in these fresh processes; the same on every rank.

    Memory is counted once the system is built: what building takes is another question.
    """
    own = slowness[rank]
    make = makers(rank, case, own, plans)[name]
    batches = batches_of(case)
    threading.stack_size(THREAD_STACK_BYTES)
    Communicators.over(dist.group.WORLD, CPU)  # their threads are nobody's memory
    level_bytes = data_bytes("VmRSS")
    peaks_bytes = []
    system = make()
    forget_building()
    with own.applied():
        # The first makes the optimizer's state, and runs what has not run yet.
        for number, steps in enumerate((1, num_steps)):
            forget_peak()
            turn = _turn(system, batches, case.work, number, steps)
            peaks_bytes.append(data_bytes("VmHWM"))
    peak_mib = [(max(peaks_bytes) - level_bytes) / MIB]
    return replace(turn, peak_mib=tuple(round(mib, 1) for (mib,) in _rows(peak_mib)))


def makers(
    rank: int, case: Case, slowness: Slowness, plans: Sequence[Planned]
) -> dict[str, Make]:
    """All systems by name."""
    found = systems.stock_systems(case.work, case.cluster.cores, case.microbatch_size)
    for planned in plans:
        found[planned.system] = partial(
            systems.het_fsdp,
            case.work,
            planned.system,
            planned.plan,
            device=slowness.device,
            device_spec=case.cluster.device_spec(rank),
        )
    return found


# Steps


def batches_of(case: Case) -> list[Batch]:
    """Of all ranks together, so the same on every rank."""
    work = case.work
    return random_batches(work.config, work.global_batch_size, seed=0, num_batches=NUM_BATCHES)


class _Clock:
    """Seconds of the clock and of all threads of this process since it was made."""

    def __init__(self) -> None:
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()

    def read(self) -> list[float]:
        return [time.perf_counter() - self._start_s, time.process_time() - self._start_cpu_s]


def _turn(
    system: System, batches: Sequence[Batch], work: Work, number: int, num_steps: int
) -> Turn:
    dist.barrier()
    clock = _Clock()
    for step in range(num_steps):
        system.step(*batches[step % len(batches)])
    rows = _rows([each / num_steps for each in clock.read()])
    step_time_s = max(seconds for seconds, _ in rows)
    return Turn(
        system=system.name,
        round=number,
        samples_per_s=work.global_batch_size / step_time_s,
        step_time_s=step_time_s,
        cpu_s=tuple(round(cpu_s, 4) for _, cpu_s in rows),
    )


def _plain_turn(
    plain: System,
    batches: Sequence[Batch],
    case: Case,
    number: int,
    slow_rank: int,
) -> Turn:
    """A step of ``slow_rank`` while the others sleep in a barrier."""
    dist.barrier()
    mine = [0.0, 0.0]
    if dist.get_rank() == slow_rank:
        clock = _Clock()
        plain.step(*batches[number % len(batches)])
        mine = clock.read()
    seconds, cpu_s = _rows(mine)[slow_rank]
    return Turn(
        system=plain_name(slow_rank),
        round=number,
        samples_per_s=case.plain_batch_size / seconds,
        step_time_s=seconds,
        cpu_s=(round(cpu_s, 4),),
    )


def _plain_together(plain: System, batches: Sequence[Batch], case: Case, number: int) -> Turn:
    """All ranks at once, each for itself: what sharing memory and caches leaves of the ideal.

    They go on until the slowest has finished a step.
    """
    dist.barrier()
    store, num_steps = dist.distributed_c10d._get_default_store(), 0
    key = f"slowest has finished, round {number}"
    is_slowest = dist.get_rank() == case.cluster.slowest_rank
    clock = _Clock()
    while not num_steps or not (is_slowest or store.check([key])):
        plain.step(*batches[num_steps % len(batches)])
        num_steps += 1
    seconds, cpu_s = clock.read()
    if is_slowest:
        store.set(key, "")
    rows = _rows([num_steps * case.plain_batch_size / seconds, cpu_s / num_steps])
    return Turn(
        system=TOGETHER,
        round=number,
        samples_per_s=sum(samples_per_s for samples_per_s, _ in rows),
        step_time_s=seconds / num_steps,
        cpu_s=tuple(round(cpu_s, 4) for _, cpu_s in rows),
    )


def _rows(mine: list[float]) -> list[list[float]]:
    """Every rank's numbers."""
    rows = [mine] * dist.get_world_size()
    dist.all_gather_object(rows, mine)
    return rows


def plain_name(rank: int) -> str:
    """Of plain PyTorch on one rank, as ``Turn.system``."""
    return f"plain PyTorch on rank {rank} alone"


def first_steps(contestants: Sequence[System], batches: Sequence[Batch]) -> list[float]:
    """How long a step of each takes; raises unless all train the same model in the same way."""
    losses_by_system, step_times_s = {}, []
    for system in contestants:
        losses = []
        for step in range(NUM_STEPS_COMPARED):
            start_s = time.perf_counter()
            losses.append(float(system.step(*batches[step])))
            last_s = time.perf_counter() - start_s
        mean = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(mean)
        losses_by_system[system.name] = mean
        step_times_s.append(max(seconds for (seconds,) in _rows([last_s])))
    check_same_losses(losses_by_system)
    return step_times_s
