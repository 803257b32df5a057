"""What links and collectives take: measured through those that training uses.

All ranks take part in everything here, in the same order.  A collective has ended when its
last rank has, so every figure is the slowest rank's.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from shardhet.collectives import BufferPool, all_gather_uneven, reduce_scatter_uneven
from shardhet.distributed import Channel
from shardhet.messages import Pending
from shardhet.profiler.unit_runner import UnitRunner
from shardhet.workload import Workload

SMALLEST_NBYTES = 2**14
LARGEST_NBYTES = 2**28
CALL_S = 5e-3  # collectives are repeated until a sample takes so long, then divided
MAX_CALLS = 32
PAIR_NBYTES = 2**22
LATENCY_NBYTES = 64
BESIDE_S = 2e-2  # of communication beside compute, and ...
COMPUTE_PER_COMM = 2  # ... so much longer the compute, so that all of it lies beside
MAX_EXCESS = 0.99  # of collectives' time that compute beside them loses
LARGEST_SHARE = 0.75  # of the uneven cut

Launch = Callable[[], Callable[[], None]]  # starts a collective, returns what waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The process groups that are measured, as HetFSDP makes them."""

    gather: Channel
    reduce: Channel
    control: Channel

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.control.world_size

    def wait_for_all(self) -> None:
        """Until every rank has come here; asleep, so that the others are not disturbed."""
        self.control.exchange([0.0])

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """For each entry that of the rank where it is largest."""
        return [max(column) for column in zip(*self.control.exchange(seconds), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSamples:
    """One size: seconds of gathers and reductions, with even shares and with uneven ones."""

    nbytes: int
    gather_s: list[float]
    reduce_s: list[float]
    uneven_gather_s: list[float]
    uneven_reduce_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSamples:
    """What two ranks can send each other, in one direction."""

    sender: int
    receiver: int
    latency_s: float
    bandwidth_bytes_per_s: float


def even_shares(world_size: int) -> list[float]:
    """Everybody stores the same."""
    return [1 / world_size] * world_size


def uneven_shares(world_size: int) -> list[float]:
    """The first stores most."""
    rest = (1 - LARGEST_SHARE) / max(1, world_size - 1)
    return [LARGEST_SHARE, *([rest] * (world_size - 1))]


def cut(numel: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers near to ``shares`` of ``numel`` that add up to it."""
    borders = [0, *(round(numel * sum(shares[: i + 1])) for i in range(len(shares) - 1)), numel]
    return [stop - start for start, stop in pairwise(borders)]


def sizes_to_measure(workload: Workload) -> list[int]:
    """Bytes of collectives: those of the units, and some around and between them."""
    kinds = [kind for kind in workload.kinds if kind.numel]
    of_units = {kind.numel * workload.param_itemsize for kind in kinds}
    of_units |= {kind.numel * workload.reduce_itemsize for kind in kinds}
    nbytes, sizes = SMALLEST_NBYTES, set(of_units)
    while nbytes < 2 * max(of_units):
        if nbytes > min(of_units) / 4:
            sizes.add(nbytes)
        nbytes *= 4
    return sorted(min(size, LARGEST_NBYTES) for size in sizes if size >= 8)


class Traffic:
    """Collectives over all ranks, timed."""

    def __init__(self, channels: Channels, workload: Workload, device: torch.device) -> None:
        self._channels = channels
        self._device = device
        self._param_dtype: torch.dtype = getattr(torch, workload.param_dtype)
        self._reduce_dtype: torch.dtype = getattr(torch, workload.reduce_dtype)
        self._scratch = BufferPool()

    def collectives(self, nbytes: int, num_repeats: int) -> CollectiveSamples:
        """Gathers and reductions of this many bytes."""
        world_size = self._channels.world_size
        launches = [
            make(nbytes, shares)
            for shares in (even_shares(world_size), uneven_shares(world_size))
            for make in (self._gather, self._reduce)
        ]
        samples = [self.seconds(partial(_complete, [each]), num_repeats) for each in launches]
        return CollectiveSamples(
            nbytes=nbytes,
            gather_s=samples[0],
            reduce_s=samples[1],
            uneven_gather_s=samples[2],
            uneven_reduce_s=samples[3],
        )

    def seconds(self, call: Callable[[], None], num_repeats: int) -> list[float]:
        """Of one call, ``num_repeats`` times; short ones are called many times in a row."""
        call()
        first_s = self._timed(call, 1)
        num_calls = min(MAX_CALLS, max(1, round(CALL_S / first_s)))
        return [self._timed(call, num_calls) for _ in range(num_repeats)]

    def _timed(self, call: Callable[[], None], num_calls: int) -> float:
        self._channels.wait_for_all()
        start_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        return self._channels.slowest([(time.perf_counter() - start_s) / num_calls])[0]

    def _gather(self, nbytes: int, shares: Sequence[float]) -> Launch:
        """What launches a gather."""
        channel = self._channels.gather
        splits = cut(nbytes // self._param_dtype.itemsize, shares)
        output = torch.zeros(sum(splits), dtype=self._param_dtype, device=self._device)
        shard = torch.zeros(
            splits[channel.position], dtype=self._param_dtype, device=self._device
        )

        def launch() -> Callable[[], None]:
            pending = all_gather_uneven(
                output, shard, splits, channel=channel, receivers=range(channel.world_size)
            )
            return partial(self._finish, pending)

        return launch

    def _reduce(self, nbytes: int, shares: Sequence[float]) -> Launch:
        """What launches a reduction."""
        channel = self._channels.reduce
        splits = cut(nbytes // self._reduce_dtype.itemsize, shares)
        full = torch.zeros(sum(splits), dtype=self._reduce_dtype, device=self._device)
        output = torch.zeros(
            splits[channel.position], dtype=self._reduce_dtype, device=self._device
        )

        def launch() -> Callable[[], None]:
            pending = reduce_scatter_uneven(
                output,
                full,
                splits,
                channel=channel,
                contributors=range(channel.world_size),
                scratch=self._scratch,
            )
            return partial(self._finish, pending)

        return launch

    def overlap_slowdown(
        self, runner: UnitRunner, num_samples: int, nbytes: int, num_repeats: int
    ) -> float:
        """How many times as long compute takes while collectives run beside it.

        The profile's kappa: of a second of communication beside it, compute loses
        1 - 1 / kappa.  Compute and communication are timed alone and then together.
        """
        shares = even_shares(self._channels.world_size)
        both = [self._gather(nbytes, shares), self._reduce(nbytes, shares)]
        comm_s = median(self.seconds(partial(_complete, both), num_repeats))
        launches = both * min(MAX_CALLS, max(1, round(BESIDE_S / comm_s)))
        comm_s = median(self.seconds(partial(_complete, launches), num_repeats))
        once_s = self._channels.slowest([sum(runner.run(num_samples))])[0]
        num_runs = max(1, round(COMPUTE_PER_COMM * comm_s / once_s))

        def compute() -> None:
            for _ in range(num_runs):
                runner.run(num_samples)
            self._synchronize()

        excesses = []
        for _ in range(num_repeats):
            self._channels.wait_for_all()
            start_s = time.perf_counter()
            compute()
            alone_s = time.perf_counter() - start_s
            self._channels.wait_for_all()
            start_s = time.perf_counter()
            waits = [launch() for launch in launches]
            compute()
            for wait in waits:
                wait()
            excesses.append((time.perf_counter() - start_s - alone_s) / comm_s)
        rows = self._channels.control.exchange([median(excesses)])
        excess = sum(row[0] for row in rows) / len(rows)
        return 1 / (1 - min(MAX_EXCESS, max(0.0, excess)))

    def pair(self, sender: int, receiver: int, num_repeats: int) -> PairSamples:
        """Two positions alone; the others wait."""
        channel = self._channels.gather
        is_receiver = channel.position == receiver

        def seconds(nbytes: int) -> float:
            splits = [nbytes * (i == sender) for i in range(channel.world_size)]
            shard = torch.zeros(
                splits[channel.position], dtype=torch.uint8, device=self._device
            )
            output = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

            def call() -> None:
                pending = all_gather_uneven(
                    output if is_receiver else None,
                    shard,
                    splits,
                    channel=channel,
                    receivers=(receiver,),
                )
                self._finish(pending)

            return median(self.seconds(call, num_repeats))

        latency_s = seconds(LATENCY_NBYTES)
        transfer_s = max(1e-9, seconds(PAIR_NBYTES) - latency_s)
        return PairSamples(
            sender=sender,
            receiver=receiver,
            latency_s=latency_s,
            bandwidth_bytes_per_s=PAIR_NBYTES / transfer_s,
        )

    def _finish(self, pending: Pending) -> None:
        pending.wait()
        pending.wait_sent()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _complete(launches: Sequence[Launch]) -> None:
    """Launch all, then wait for all."""
    for wait in [launch() for launch in launches]:
        wait()
