"""Measure the time of links and collectives, with the same collectives that training uses.

All ranks take part in everything here, in the same order.  A collective ends when its last
rank ends, so every figure is that of the slowest rank.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from shardhet.comm import devices
from shardhet.comm.collectives import all_gather_uneven
from shardhet.comm.groups import in_two_levels
from shardhet.comm.members import Members
from shardhet.fsdp.params.row_params import set_sharded_grads
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.flat import FlatTensor, ParamSlot
from shardhet.profiler.stopwatch import typical_mean
from shardhet.profiler.unit_runner import UnitRunner
from shardhet.records.cluster import DeviceSpec
from shardhet.records.layout import FlatLayout
from shardhet.records.plan import Plan
from shardhet.records.stages import TwoLevels
from shardhet.records.workload import Workload

SMALLEST_NBYTES = 2**14
LARGEST_NBYTES = 2**28
CALL_S = 5e-3  # collectives are repeated to fill this time; the sample is then divided
MAX_CALLS = 32
MAX_CASE_S = 2.0  # slow collectives are repeated less often, but at least MIN_REPEATS times
MIN_REPEATS = 3
PAIR_NBYTES = 2**22
LATENCY_NBYTES = 64
MAX_BESIDE = 8
BESIDE_S = 2e-2  # of communication that overlaps compute
MAX_BESIDE_S = 5.0  # for the whole overlap measurement, if devices are slow
COMPUTE_PER_COMM = 3  # compute is this many times longer, so that it covers all communication
LARGEST_SHARE = 0.75  # in the uneven cut

Launch = Callable[[], Callable[[], None]]  # starts a collective, returns its wait


class Channels(Members):
    """The process groups to measure, created as in HetFSDP."""

    __slots__ = ()

    @classmethod
    def meet(
        cls, group: dist.ProcessGroup | None, device: torch.device, device_spec: DeviceSpec
    ) -> Self:
        """The channels of the ranks of ``group``, in their order.  Collective."""
        anyone = Plan.even(1 if group is None else group.size(), microbatch_size=1)
        return cls.of_plan(group, anyone, device=device, device_spec=device_spec)

    def in_two_levels(self, device: torch.device) -> Self | None:
        """The same, in which every row crosses between nodes once per node.  Collective.

        None where rows cross no more often as it is, and over gloo.
        """
        geometry = TwoLevels.among(self.nodes, [True] * self.world_size)
        gather, reduce = (
            in_two_levels(each, geometry, control=self.control, device=device)
            for each in (self.gather, self.reduce)
        )
        return None if gather.levels is None else replace(self, gather=gather, reduce=reduce)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.control.world_size

    def wait_for_all(self) -> None:
        """Sleep until every rank has arrived here, without disturbing the others."""
        self.control.exchange([0.0])

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The maximum over all ranks of each entry."""
        return [max(column) for column in zip(*self.control.exchange(seconds), strict=True)]


@dataclass(frozen=True, slots=True)
class CollectiveSamples:
    """Seconds of gathers and reductions of one size, with even and with uneven shares."""

    nbytes: int
    gather_s: list[float]
    reduce_s: list[float]
    uneven_gather_s: list[float]
    uneven_reduce_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSamples:
    """Times of sending from one rank to another, in one direction."""

    sender: int
    receiver: int
    latency_s: float
    bandwidth_bytes_per_s: float


def even_shares(world_size: int) -> list[float]:
    """Shares with which every rank stores the same."""
    return [1 / world_size] * world_size


def uneven_shares(world_size: int) -> list[float]:
    """Shares with which the first rank stores most."""
    rest = (1 - LARGEST_SHARE) / max(1, world_size - 1)
    return [LARGEST_SHARE, *([rest] * (world_size - 1))]


def sizes_to_measure(workload: Workload) -> list[int]:
    """Bytes of the collectives to measure: those of the units, and some around and between."""
    kinds = [kind for kind in workload.kinds if kind.numel]
    of_units = {workload.gathered_bytes(kind) for kind in kinds}
    of_units |= {kind.trained_numel * workload.reduce_itemsize for kind in kinds} - {0}
    nbytes, sizes = SMALLEST_NBYTES, set(of_units)
    while nbytes < 2 * max(of_units):
        if nbytes >= min(of_units) / 4:
            sizes.add(nbytes)
        nbytes *= 4
    return sorted(min(size, LARGEST_NBYTES) for size in sizes if size >= 8)


class Traffic:
    """Times collectives over all ranks."""

    def __init__(
        self,
        channels: Channels,
        workload: Workload,
        device: torch.device,
        *,
        orig_dtype: torch.dtype,
    ) -> None:
        """``orig_dtype`` is the dtype of stored parameters."""
        self._channels = channels
        self._orig_dtype = orig_dtype
        self._device = device
        self._param_dtype: torch.dtype = getattr(torch, workload.param_dtype)
        self._reduce_dtype: torch.dtype = getattr(torch, workload.reduce_dtype)
        self._comm = CommContext(device, channels.gather, channels.reduce)
        self._comm.set_receivers(tuple(range(channels.world_size)))

    def collectives(self, nbytes: int, num_repeats: int) -> CollectiveSamples:
        """Time gathers and reductions of ``nbytes`` bytes."""
        world_size = self._channels.world_size
        launches = [
            launch
            for shares in (even_shares(world_size), uneven_shares(world_size))
            for launch in (
                self._gather(self._flat(nbytes // self._param_dtype.itemsize, shares)),
                self._reduce(self._flat(nbytes // self._reduce_dtype.itemsize, shares)),
            )
        ]
        samples = [self.seconds(partial(_complete, [each]), num_repeats) for each in launches]
        return CollectiveSamples(nbytes, *samples)

    def seconds(self, call: Callable[[], None], num_repeats: int) -> list[float]:
        """Seconds of one call, ``num_repeats`` times; short calls are timed many in a row."""
        call()
        first_s = self._timed(call, 1)
        num_calls = min(MAX_CALLS, max(1, round(CALL_S / first_s)))
        num_repeats = min(num_repeats, max(MIN_REPEATS, round(MAX_CASE_S / first_s)))
        return [self._timed(call, num_calls) for _ in range(num_repeats)]

    def _timed(self, call: Callable[[], None], num_calls: int) -> float:
        self._channels.wait_for_all()
        start_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        return self._channels.slowest([(time.perf_counter() - start_s) / num_calls])[0]

    def _flat(self, numel: int, shares: Sequence[float]) -> FlatTensor:
        """A unit's flat tensor as in HetFSDP, with a single one-dimensional parameter."""
        module = nn.Module()
        param = nn.Parameter(torch.zeros(numel, device=self._device, dtype=self._orig_dtype))
        module.register_parameter("flat", param)
        slot = ParamSlot(
            fqns=("flat",),
            owners=((module, "flat"),),
            shape=param.shape,
            is_trainable=True,
        )
        flat = FlatTensor(
            [slot],
            FlatLayout.of_shapes([(numel,)]).cut(shares),
            comm=self._comm,
            orig_dtype=param.dtype,
            param_dtype=self._param_dtype,
            reduce_dtype=self._reduce_dtype,
        )
        flat.show_shards()
        return flat

    def _gather(self, flat: FlatTensor) -> Launch:
        """A launch of a gather, which also allocates memory for the whole tensor."""

        def launch() -> Callable[[], None]:
            self._comm.mark_compute()  # the shard, or what was computed here before
            flat.unshard()
            return wait

        def wait() -> None:
            flat.wait_for_unshard()
            self._synchronize()
            flat.reshard()

        return launch

    def _reduce(self, flat: FlatTensor) -> Launch:
        """A launch of a reduction, from the unit's gradient to that of the shard."""

        def launch() -> Callable[[], None]:
            flat.grad.begin()
            flat.grad.reduce()
            return wait

        def wait() -> None:
            flat.grad.finish()
            set_sharded_grads(flat, [True])
            flat.sharded_params[0].grad = None
            self._synchronize()

        return launch

    def overlap_slowdowns(
        self, runner: UnitRunner, num_samples: int, nbytes: int, num_repeats: int
    ) -> list[float]:
        """Seconds that compute loses per second of overlapping collectives, by position.

        A slow device may lose more: if the host's processor does the sending, its sending is
        as slow as its computing.  Compute and communication are timed alone and then together,
        like turns of training: some collectives are launched, then some microbatches computed.
        The time of launching counts: on a CPU, a thread that it wakes may take the processor
        at once; the host of an accelerator runs ahead, as in training.
        """
        numel = nbytes // self._param_dtype.itemsize
        shares = even_shares(self._channels.world_size)

        def both() -> list[Launch]:
            flats = [self._flat(numel, shares) for _ in range(2)]
            return [self._gather(flats[0]), self._reduce(flats[1])]

        comm_s = typical_mean(self.seconds(partial(_complete, both()), num_repeats))
        num_turns = min(MAX_BESIDE, max(1, round(BESIDE_S / comm_s)))
        turns = [both() for _ in range(num_turns)]
        launches = [launch for turn in turns for launch in turn]
        comm_s = typical_mean(self.seconds(partial(_complete, launches), num_repeats))
        wanted_s = COMPUTE_PER_COMM * comm_s / num_turns
        run_s = sum(runner.run(num_samples))
        # Turns are equally long on all ranks: a collective begins once all have launched it.
        while (turn_s := self._channels.slowest([run_s])[0]) > wanted_s and num_samples > 1:
            num_samples //= 2
            run_s = sum(runner.run(num_samples))
        turn_s = max(turn_s, wanted_s)
        num_runs = max(1, round(turn_s / run_s))
        num_repeats = max(
            MIN_REPEATS, min(num_repeats, int(MAX_BESIDE_S / (num_turns * turn_s)))
        )

        def seconds(turns: Sequence[Sequence[Launch]]) -> float:
            """Seconds of all turns' compute and of launching the overlapping collectives."""
            self._channels.wait_for_all()
            start_s = time.perf_counter()
            waits = []
            with runner.running_ahead():
                for launches in turns:
                    waits += [launch() for launch in launches]
                    for _ in range(num_runs):
                        runner.run(num_samples)
            self._synchronize()
            taken_s = time.perf_counter() - start_s
            for wait in waits:
                wait()
            return taken_s

        slowdowns = []
        for _ in range(num_repeats):
            alone_s = seconds([()] * num_turns)
            slowdowns.append((seconds(turns) - alone_s) / comm_s)
        rows = self._channels.control.exchange([typical_mean(slowdowns)])
        return [max(0.0, slowdown) for (slowdown,) in rows]

    def pair(self, sender: int, receiver: int, num_repeats: int) -> PairSamples:
        """Time messages between two positions while the others wait."""
        channel = self._channels.gather
        is_receiver = channel.position == receiver

        def seconds(nbytes: int) -> float:
            splits = [nbytes * (i == sender) for i in range(channel.world_size)]
            shard = self._comm.empty(splits[channel.position], torch.uint8).zero_()
            output = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

            def call() -> None:
                all_gather_uneven(
                    output if is_receiver else None,
                    shard,
                    splits,
                    channel=channel,
                    receivers=(receiver,),
                ).complete()
                self._synchronize()

            return median(self.seconds(call, num_repeats))

        latency_s = seconds(LATENCY_NBYTES)
        transfer_s = max(1e-9, seconds(PAIR_NBYTES) - latency_s)
        return PairSamples(
            sender=sender,
            receiver=receiver,
            latency_s=latency_s,
            bandwidth_bytes_per_s=PAIR_NBYTES / transfer_s,
        )

    def _synchronize(self) -> None:
        if not devices.is_on_host(self._device):
            devices.module_of(self._device).synchronize(self._device)


def _complete(launches: Sequence[Launch]) -> None:
    """Launch all collectives, then wait for all."""
    for wait in [launch() for launch in launches]:
        wait()
