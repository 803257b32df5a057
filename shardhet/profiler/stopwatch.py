"""Time what a device does, and summarise many such measurements."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from shardhet.comm import devices
from shardhet.fsdp.step.around import Activity, Observed
from shardhet.records.profiles import Timing
from shardhet.training.emulation import EmulatedDevice


class Stopwatch:
    """Times what runs inside ``running()``; ``seconds`` is the last time, as emulated."""

    def __init__(self, device: torch.device, emulated: EmulatedDevice | None = None) -> None:
        self.seconds = 0.0
        self.waits_for_device = True  # if false, nothing is timed on an accelerator
        # None: the host itself is the device
        self._module = None if devices.is_on_host(device) else devices.module_of(device)
        self._stretch = None if emulated is None else emulated.observer()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time what runs inside; on an accelerator by the device's clock, until it is done.

        An accelerator starts idle, so a single short kernel would mostly measure its launch.
        Run several things inside, so that the host runs ahead as in training.
        """
        if self._module is not None and not self.waits_for_device:
            yield
            return
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        if self._module is not None:
            self._module.synchronize()
            begin, end = [self._module.Event(enable_timing=True) for _ in range(2)]
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


# A sample that exceeds the median by more than this many times what the last decile does is a
# rare event of the machine, which most steps do not meet.
OUTLIER_FACTOR = 3.0


def typical_mean(samples: Sequence[float]) -> float:
    """The mean of one or more samples; those far above the others count less."""
    median, p90 = (float(q) for q in np.quantile(samples, [0.5, 0.9]))
    return float(np.minimum(samples, median + OUTLIER_FACTOR * (p90 - median)).mean())


def timing_of(samples_s: Sequence[float]) -> Timing:
    """Mean, median, first and last decile of one or more samples."""
    p10, median, p90 = (float(q) for q in np.quantile(samples_s, [0.1, 0.5, 0.9]))
    return Timing(
        mean_s=typical_mean(samples_s),
        median_s=median,
        p10_s=min(p10, median),
        p90_s=max(p90, median),
        num_samples=len(samples_s),
    )
