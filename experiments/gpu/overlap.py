"""Is communication hidden behind compute?  Sleeps on the streams.

With one rank over NCCL (``SHARDHET_GROUPS_FOR_ONE=1``) every gather and reduction is launched
and waited for as with many, but takes next to no time.  So each of them gets a sleep on its
stream before it, and each unit a sleep on the compute stream:

    compute   ####----####----####----####   without overlap: the sum of all sleeps
    gather        ####    ####    ####

    compute   ####################            with it: compute, the first gather and the last
    gather    ################                reduction

In the control every launch waits for compute, and compute for it: that must hide nothing.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from experiments.gpu import systems
from experiments.gpu.clock import synchronize
from experiments.gpu.results import Metric, Recorder, noting_failure
from experiments.gpu.scale import Job
from shardhet import HetFSDP
from shardhet.comm.groups import GROUPS_FOR_ONE
from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.step.schedule_executor import RUNS, Handling
from shardhet.records.schedule import GATHER, LaunchKind

NAME = "overlap"
NUM_UNITS, WIDTH, NUM_STEPS = 8, 256, 3
COMPUTE_S, TRANSFER_S = 4e-3, 3e-3  # far longer than the host takes to launch
AS_IT_IS, SERIAL = "as it is", "control: launches and compute wait for each other"
STEP, HIDDEN = "step, s", "hidden of what can be"
LEAST_HIDDEN, MOST_OF_CONTROL = 0.9, 0.2
METRICS = (
    Metric(name=STEP),
    Metric(name=HIDDEN, of=AS_IT_IS, at_least=LEAST_HIDDEN),
    Metric(name=HIDDEN, of=SERIAL, at_most=MOST_OF_CONTROL),
)
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
