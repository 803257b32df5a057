"""``measure``: measure this machine and model as a cluster, a workload and a profile.

All ranks call it together.  They compute at once, as in training, because ranks that share a
host's memory and caches slow each other down.  Then the optimizer, collectives, links, compute
that overlaps collectives, and collectives without some of the ranks are measured.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardhet.comm import devices
from shardhet.comm.devices import available_bytes, processors
from shardhet.comm.groups import default_group
from shardhet.comm.members import local_device_spec
from shardhet.pricing.scenario import Scenario
from shardhet.profiler.assemble import RankReport, TrafficReport, make_cluster, make_profile
from shardhet.profiler.batch import TrainedModel
from shardhet.profiler.compute import MIN_ROUNDS, ComputeMeasurement, peaks_into
from shardhet.profiler.describe import describe_spec, trained_dtype
from shardhet.profiler.here import HostPartReport
from shardhet.profiler.model_spec import ModelSpec, trace_model
from shardhet.profiler.reserved import Reserved, find_reserved
from shardhet.profiler.traffic import (
    Channels,
    CollectiveSamples,
    PairSamples,
    Traffic,
    sizes_to_measure,
)
from shardhet.profiler.turns import unit_overhead_seconds
from shardhet.records.cluster import DeviceSpec
from shardhet.records.workload import Workload
from shardhet.training.emulation import EmulatedDevice
from shardhet.training.optim import OptimizerSpec

MAX_PAIRS = 28  # all pairs of eight ranks; with more ranks, each with the next one only
PART_OF_COMPUTE = 0.35  # of the time limit
OnProgress = Callable[[str, float], None]  # the next activity, and the fraction done so far


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringEffort:
    """How much to measure."""

    max_microbatch_size: int = 32
    num_repeats: int = 10
    time_limit_s: float = 60.0  # approximate; slow devices still run every case a few times


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The result of ``measure``; the same on every rank."""

    scenario: Scenario  # measured with all ranks computing at once; use it to plan
    pairs: tuple[PairSamples, ...]

    def save(self, folder: Path) -> None:
        """Write cluster.json, workload.json and, as the last, profile.json."""
        self.scenario.save(folder)


def measure(
    model: TrainedModel,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    device_spec: DeviceSpec | None = None,
    emulated: EmulatedDevice | None = None,
    optimizer: OptimizerSpec | None = None,
    effort: MeasuringEffort | None = None,
    on_progress: OnProgress = lambda _text, _fraction: None,
) -> Measurement:
    """Measure the ranks of ``group`` and the workload of ``model``.  Collective.

    If ``group`` is None, the default group is used, or no group for a single process.
    ``device_spec`` is how this rank describes its device; None asks the driver.  A failure on
    one rank raises on all.
    """
    group = default_group(group)
    device = device or torch.device("cpu")
    found = device_spec or local_device_spec(device)
    channels = Channels.meet(group, device, found)
    with channels.peers.fail_together("measuring"):
        session = _Session(
            model,
            channels,
            device=device,
            found=found,
            emulated=emulated,
            optimizer=optimizer or OptimizerSpec(learning_rate=1e-4),
            effort=effort or MeasuringEffort(),
            on_progress=on_progress,
        )
        return session.run()


class _Session:
    """One measurement, from the units of the model to the records."""

    def __init__(
        self,
        model: TrainedModel,
        channels: Channels,
        *,
        device: torch.device,
        found: DeviceSpec,
        emulated: EmulatedDevice | None,
        optimizer: OptimizerSpec,
        effort: MeasuringEffort,
        on_progress: OnProgress,
    ) -> None:
        self._model = model
        self._channels = channels
        self._device = device
        self._emulated = emulated
        self._optimizer = optimizer
        self._effort = effort
        self._on_progress = on_progress
        self._reserved = find_reserved(device, channels.control)
        if has_own_memory(emulated):
            self._reserved = Reserved(0, "memory that the emulation caps")
        hosts = channels.control.exchange_objects(found.host)
        neighbours = [i for i, host in enumerate(hosts) if host == found.host]
        num_sharing = len(neighbours) if devices.is_on_host(device) else 1
        used = channels.control.exchange_objects(processors())
        self._processors = [used[i] for i in neighbours if i != channels.control.position]
        self._free_bytes = available_bytes()
        self._spec = _own_spec(found, emulated, num_sharing)

    def run(self) -> Measurement:
        """Measure everything."""
        self._on_progress("counting the model's FLOPs and bytes", 0.0)
        model_spec = trace_model(self._model, self._device)
        workload = self._workload(model_spec)
        compute = ComputeMeasurement(
            self._model,
            model_spec,
            workload,
            device=self._device,
            memory_bytes=(self._spec.memory_capacity_bytes or 2**62) - self._reserved.nbytes,
            max_microbatch_size=self._effort.max_microbatch_size,
            emulated=self._emulated,
        )
        report = self._compute(compute)
        reports = self._channels.control.exchange_objects(report)
        traffic = self._traffic(workload, compute)
        specs = [each.device for each in reports]
        cluster = make_cluster(specs, traffic.pairs, [each.host for each in reports])
        profile = make_profile(reports, traffic, cluster, workload)
        self._on_progress("done", 1.0)
        return Measurement(
            scenario=Scenario(cluster, workload, profile),
            pairs=tuple(traffic.pairs),
        )

    def _workload(self, model_spec: ModelSpec) -> Workload:
        """The workload, counted once by the first rank."""
        workload = None
        if self._channels.control.position == 0:
            workload = describe_spec(
                model_spec,
                self._model,
                num_moments=self._optimizer.count_moments(),
                device=self._device,
            )
        counted: Workload = self._channels.control.exchange_objects(workload)[0]
        return counted

    def _compute(self, compute: ComputeMeasurement) -> RankReport:
        effort, channels = self._effort, self._channels
        self._on_progress("warming up", 0.05)
        most_s = PART_OF_COMPUTE * effort.time_limit_s
        round_s, peaks = compute.warm_up(most_s / MIN_ROUNDS)
        self._on_progress("all ranks computing at once", 0.2)
        [slowest_round_s] = channels.slowest([round_s])
        samples = compute.run_rounds(min(most_s, effort.num_repeats * slowest_round_s))
        self._on_progress("the optimizer", 0.7)
        channels.wait_for_all()
        optimizer_s = compute.optimizer_seconds(
            self._optimizer, 1 / channels.world_size, effort.num_repeats
        )
        self._on_progress("the host", 0.72)
        channels.wait_for_all()
        host = self._host()
        self._on_progress("the runtime's own time", 0.73)
        overhead_s = unit_overhead_seconds(channels.group, self._device, effort.num_repeats)
        return RankReport(
            device=self._spec,
            samples=peaks_into(samples, peaks),
            optimizer_s_per_element=optimizer_s,
            unit_overhead_s=overhead_s,
            reserved_bytes=self._reserved.nbytes,
            note=f"{_note(self._spec)}; reserved: {self._reserved.counted}",
            host=host,
        )

    def _host(self) -> HostPartReport:
        """What the host has besides the device, and does for its part."""
        is_host = devices.is_on_host(self._device)
        device_bytes: int | None = None if is_host else 0
        if has_own_memory(self._emulated):
            device_bytes = self._spec.memory_capacity_bytes
        return HostPartReport.measured(
            self._processors,
            self._free_bytes,
            device_bytes,
            num_repeats=self._effort.num_repeats,
            emulated=self._emulated,
        )

    def _traffic(self, workload: Workload, compute: ComputeMeasurement) -> TrafficReport:
        if self._channels.world_size == 1:
            return TrafficReport(
                collectives=[],
                two_levels=[],
                pairs=[],
                overlap_slowdowns=[0.0],
                note="one device",
            )
        traffic = self._traffic_over(self._channels, workload)
        num_repeats = self._effort.num_repeats
        sizes = sizes_to_measure(workload)
        collectives = []
        for i, nbytes in enumerate(sizes):
            self._on_progress(f"collectives of {nbytes:,} bytes", 0.75 + 0.15 * i / len(sizes))
            collectives.append(traffic.collectives(nbytes, num_repeats))
        two_levels: list[CollectiveSamples] = []
        in_two_levels = self._channels.in_two_levels(self._device)
        if in_two_levels is not None:
            self._on_progress("collectives that cross between nodes once per node", 0.9)
            crossing_once = self._traffic_over(in_two_levels, workload)
            two_levels = [crossing_once.collectives(each, num_repeats) for each in sizes]
        self._on_progress("compute during collectives", 0.9)
        kind = max(workload.num_units_by_kind, key=workload.num_units_by_kind.__getitem__)
        nbytes = workload.kind_by_name[kind].numel * workload.param_itemsize
        size = int(self._common(max(compute.sizes(kind)) / 2))
        slowdowns = traffic.overlap_slowdowns(
            compute.runner(kind), max(1, size), nbytes, num_repeats
        )
        self._on_progress("links between pairs", 0.95)
        pairs = [traffic.pair(a, b, num_repeats) for a, b in self._pairs()]
        return TrafficReport(
            collectives=collectives,
            two_levels=two_levels,
            pairs=pairs,
            overlap_slowdowns=slowdowns,
            note=_note(None),
        )

    def _traffic_over(self, channels: Channels, workload: Workload) -> Traffic:
        dtype = trained_dtype(self._model.module)
        return Traffic(channels, workload, self._device, orig_dtype=dtype)

    def _common(self, value: float) -> float:
        return min(row[0] for row in self._channels.control.exchange([value]))

    def _pairs(self) -> list[tuple[int, int]]:
        world_size = self._channels.world_size
        pairs = [(i, j) for i in range(world_size) for j in range(i + 1, world_size)]
        if len(pairs) > MAX_PAIRS:
            pairs = [(i, (i + 1) % world_size) for i in range(world_size)]
        return pairs


def has_own_memory(emulated: EmulatedDevice | None) -> bool:
    """Whether the emulated memory comes on top of what the process already has."""
    return emulated is not None and emulated.memory_bytes is not None


def _own_spec(
    found: DeviceSpec, emulated: EmulatedDevice | None, num_sharing: int
) -> DeviceSpec:
    """The device with the memory that this rank may use; processes of a host share memory.

    The uuid is left out, because a plan does not depend on the individual card.
    """
    memory_bytes = found.memory_capacity_bytes
    if emulated is not None and emulated.memory_bytes is not None:
        memory_bytes = emulated.memory_bytes
    elif memory_bytes is not None:
        memory_bytes //= num_sharing
    return replace(found, memory_capacity_bytes=memory_bytes, uuid=None)


def _note(spec: DeviceSpec | None) -> str:
    date = time.strftime("%Y-%m-%d")
    place = "" if spec is None else f"{spec.kind} on {spec.host}, "
    return f"{place}{date}, torch {torch.__version__}, Python {platform.python_version()}"
