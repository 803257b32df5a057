"""Is communication hidden behind compute?  Sleeps on the streams, and a profiler's trace.

With one rank over NCCL (``SHARDHET_GROUPS_FOR_ONE=1``) every gather and reduction is launched
and waited for as with many, but takes next to no time.  So each of them gets a sleep on its
stream before it, and each unit a sleep on the compute stream:

    compute   ####----####----####----####   without overlap: the sum of all sleeps
    gather        ####    ####    ####

    compute   ####################            with it: compute, the first gather and the last
    gather    ################                reduction

In the control every launch waits for compute, and compute for it: that must hide nothing.  The
trace is of the model of the other parts, whose transfers are copies of the card to itself.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from experiments.common.results import Bar, Table
from experiments.gpu import systems
from experiments.gpu.clock import synchronize
from experiments.gpu.results import Recorder, Row, median_of, noting_failure, shown
from experiments.gpu.scale import RECOMPUTED, Job
from shardhet import HetFSDP
from shardhet.comm.groups import GROUPS_FOR_ONE
from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.step.schedule_executor import RUNS, Handling
from shardhet.records.schedule import GATHER, LaunchKind

NAME, TRACE = "overlap", "trace"
NUM_UNITS, WIDTH, NUM_STEPS = 8, 256, 3
COMPUTE_S, TRANSFER_S = 4e-3, 3e-3  # far longer than the host takes to launch
AS_IT_IS, SERIAL = "as it is", "control: launches and compute wait for each other"
STEP, HIDDEN = "step", "hidden"
LEAST_HIDDEN, MOST_OF_CONTROL = 0.9, 0.2
COMMUNICATION, HIDDEN_IN_TRACE = "communication", "hidden in the trace"
Sleep = Callable[[float], object]  # makes the current stream sleep for seconds


class _Asleep(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Sleep) -> Tensor:
        ctx.sleep = sleep
        sleep(COMPUTE_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.sleep(COMPUTE_S)
        return grads[0], None


class Sleeper(nn.Module):
    """A unit that sleeps on the compute stream."""

    def __init__(self, sleep: Sleep) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self._sleep = sleep

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH] as it is."""
        slept: Tensor = _Asleep.apply(x @ self.weight, self._sleep)
        return slept


def run(job: Job, record: Recorder) -> None:
    """Steps as they are, and the control."""
    sleep = sleep_of(job.device)
    clock = partial(_seconds, job.device)
    with systems.one_rank_group(job.device):
        for case in (AS_IT_IS, SERIAL):
            with noting_failure(case, record):
                times = step_times(job.device, sleep, clock, is_serial=case == SERIAL)
                for repeat, (seconds, hidden) in enumerate(times):
                    record(case, STEP, seconds, "s", repeat)
                    record(case, HIDDEN, hidden, "", repeat)


def _seconds(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def sleep_of(device: torch.device) -> Sleep:
    """A kernel that does nothing for a time, or on a CPU the host."""
    if device.type != "cuda":
        return time.sleep
    cycles = 50_000_000
    begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(cycles)  # the clock rises
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    per_s = cycles / begin.elapsed_time(end) * 1000
    return lambda seconds: torch.cuda._sleep(int(seconds * per_s))


def step_times(
    device: torch.device, sleep: Sleep, clock: Callable[[], float], *, is_serial: bool
) -> Iterator[tuple[float, float]]:
    """Seconds of a step, and what part is hidden of what can be, for a few steps."""
    counts: dict[LaunchKind, int] = dict.fromkeys(RUNS, 0)
    with mock.patch.dict(os.environ, {GROUPS_FOR_ONE: "1"}):
        module = nn.Sequential(*(Sleeper(sleep) for _ in range(NUM_UNITS))).to(device)
        model = HetFSDP(module, systems.one_rank_plan(2), units=[Sleeper], device=device)
    x = torch.randn(2, WIDTH, device=device)
    with mock.patch.dict(RUNS, _sleeping(model, sleep, counts, is_serial=is_serial)):
        for step in range(NUM_STEPS + 1):
            counts.update(dict.fromkeys(counts, 0))
            begin_s = clock()
            model.backward(model(x).sum(), 2)
            seconds = clock() - begin_s
            model.zero_grad()
            if step:  # the first one is examined, and connects
                compute_s = 2 * NUM_UNITS * COMPUTE_S
                transfers_s = sum(counts.values()) * TRANSFER_S
                could_s = transfers_s - 2 * TRANSFER_S  # the first gather, the last reduction
                yield seconds, (compute_s + transfers_s - seconds) / could_s


def _sleeping(
    model: HetFSDP, sleep: Sleep, counts: dict[LaunchKind, int], *, is_serial: bool
) -> dict[LaunchKind, Handling]:
    """The runtime's launches, each after a sleep on its stream."""
    comm = model._comm
    streams = {
        kind: comm.all_gather_stream if kind is GATHER else comm.reduce_scatter_stream
        for kind in RUNS
    }

    def launch(kind: LaunchKind, really: Callable[[FSDPUnit], None], unit: FSDPUnit) -> None:
        counts[kind] += 1
        if is_serial:
            streams[kind].wait_event(comm.record_event(comm.current_stream()))
        with comm.on_stream(streams[kind]):
            sleep(TRANSFER_S)
        really(unit)
        if is_serial:
            comm.current_stream().wait_event(comm.record_event(streams[kind]))

    return {
        kind: replace(handling, launch=partial(launch, kind, handling.launch))
        for kind, handling in RUNS.items()
    }


# A trace


def trace(job: Job, record: Recorder) -> None:
    """Two steps of the model of the other parts, and how much of their transfers is hidden."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * job.is_cuda
    size = max(1, job.scale.microbatch_size // 2)
    plan = systems.one_rank_plan(size, 2, recompute=RECOMPUTED)
    batch = systems.random_batch(job.scale.config, 2 * size, job.device)
    one = mock.patch.dict(os.environ, {GROUPS_FOR_ONE: "1"})
    with systems.one_rank_group(job.device), one:
        system = systems.het_fsdp(job.scale.config, plan, job.device)
        for _ in range(2):
            system.step(*batch)
        synchronize(job.device)
        with profile(activities=activities) as profiled:
            for _ in range(2):
                system.step(*batch)
            synchronize(job.device)
    if job.out is not None:
        profiled.export_chrome_trace(str(job.out / "trace.json.gz"))
    spans = spans_by_stream(profiled.profiler.kineto_results.events())
    if len(spans) > 1:
        compute, *others = sorted(spans.values(), key=_length, reverse=True)
        transfers = [span for each in others for span in each]
        record("two steps", COMMUNICATION, _length(transfers) / 1e9, "s")
        record("two steps", HIDDEN_IN_TRACE, hidden_part(transfers, compute))
    record("two steps", "streams with work", len(spans))


Spans = list[tuple[int, int]]  # begin and end, ns


def spans_by_stream(events: Iterable[Any]) -> dict[int, Spans]:
    """What each stream of the device was busy with."""
    found: dict[int, Spans] = {}
    for each in events:
        if each.device_type() == DeviceType.CUDA and each.duration_ns():
            span = (each.start_ns(), each.start_ns() + each.duration_ns())
            found.setdefault(each.device_resource_id(), []).append(span)
    return found


def hidden_part(transfers: Spans, compute: Spans) -> float:
    """The part of the time of ``transfers`` in which something of ``compute`` runs."""
    own, other = _joined(transfers), _joined(compute)
    both = sum(
        max(0, min(stop, until) - max(start, begin))
        for start, stop in own
        for begin, until in other
    )
    return both / max(1, sum(stop - start for start, stop in own))


def _joined(spans: Spans) -> Spans:
    """The same moments, in spans that do not overlap."""
    joined: Spans = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _length(spans: Spans) -> int:
    return sum(stop - start for start, stop in _joined(spans))


# Tables


def tables(rows: Sequence[Row]) -> list[Table]:
    """What was hidden."""
    lines = [
        [case, shown(median_of(rows, case, STEP), "{:.1f}", scale=1000), shown(hidden)]
        for case in (AS_IT_IS, SERIAL)
        if (hidden := median_of(rows, case, HIDDEN)) is not None
    ]
    return [Table("Sleeps on all streams", ["case", "step ms", "hidden"], lines)]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Nine tenths are hidden; the control hides nothing."""
    real, control = (median_of(rows, case, HIDDEN) for case in (AS_IT_IS, SERIAL))
    found = []
    if real is not None:
        claim = "hidden, of what can be"
        found.append(Bar(claim=claim, measured=real, at_least=LEAST_HIDDEN))
    if control is not None:
        claim = "control: hidden where launches and compute wait for each other"
        found.append(Bar(claim=claim, measured=control, at_most=MOST_OF_CONTROL))
    return found


def trace_tables(rows: Sequence[Row]) -> list[Table]:
    """One line."""
    cells = [
        shown(median_of(rows, "two steps", COMMUNICATION), scale=1000),
        shown(median_of(rows, "two steps", HIDDEN_IN_TRACE), "{:.1%}"),
    ]
    header = ["trace of", "ms of other streams than compute", "hidden behind it"]
    return [Table("Trace", header, [["two steps", *cells]])] if any(cells) else []


def trace_bars(_rows: Sequence[Row]) -> list[Bar]:
    """None: with one card there is next to nothing to hide."""
    return []
