"""Seconds of what a device does, and what is kept of many such measurements."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from shardhet.fsdp.observer import Activity, Observed
from shardhet.records.profiles import Timing
from shardhet.training.emulation import EmulatedDevice


class Stopwatch:
    """``seconds`` of what happened inside ``running()`` last, stretched if emulated."""

    def __init__(self, device: torch.device, emulated: EmulatedDevice | None = None) -> None:
        self.seconds = 0.0
        self.waits_for_device = True  # else nothing is timed on an accelerator
        self._is_cuda = device.type == "cuda"
        self._stretch = None if emulated is None else emulated.observer()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what is inside; on an accelerator by its own clock, until it is done.

        There it begins with an idle device, so a single short kernel is mostly its launch:
        have several things done inside, so that the host runs ahead as it does in training.
        """
        if self._is_cuda and not self.waits_for_device:
            yield
            return
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        if self._is_cuda:
            torch.cuda.synchronize()
            begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            begin.record()
            yield
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1000
        else:
            yield
            seconds = time.perf_counter() - start_s
        stop_s = time.perf_counter()
        if self._stretch is not None:
            cpu_s = time.thread_time() - start_cpu_s
            self._stretch(Observed("", Activity.FORWARD, None, stop_s - seconds, stop_s, cpu_s))
        self.seconds = seconds + time.perf_counter() - stop_s


# A sample further above the median than so many times the last decile is a rare event of the
# machine, which most steps do not meet.
FURTHEST = 3.0


def typical_mean(samples: Sequence[float]) -> float:
    """The mean of at least one sample; those far above the others count less."""
    median, p90 = (float(q) for q in np.quantile(samples, [0.5, 0.9]))
    return float(np.minimum(samples, median + FURTHEST * (p90 - median)).mean())


def timing_of(samples_s: Sequence[float]) -> Timing:
    """Mean, median, first and last decile of at least one sample."""
    p10, median, p90 = (float(q) for q in np.quantile(samples_s, [0.1, 0.5, 0.9]))
    return Timing(
        mean_s=typical_mean(samples_s),
        median_s=median,
        p10_s=min(p10, median),
        p90_s=max(p90, median),
        num_samples=len(samples_s),
    )
