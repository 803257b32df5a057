"""What the host of a device has for what plans keep there: memory, and an optimizer's pace."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from shardhet.comm.devices import processors, share_of_processors
from shardhet.pricing.hosts import UPDATE_BYTES
from shardhet.profiler.stopwatch import Stopwatch
from shardhet.records.cluster import USABLE_MEMORY_FRACTION
from shardhet.training.emulation import EmulatedDevice

NUMEL = 2**22  # 16 MiB, of which a step moves 112: more than caches hold
LEAST_BYTES_PER_S = 1e8  # that a cluster may state


@dataclass(frozen=True, slots=True)
class HostPartReport:
    """What one rank finds of its host while the others of the host do the same."""

    bytes_per_s: float  # its processors' share, in the optimizer's step
    free_bytes: int | None  # before anything was placed there; None: it does not say
    device_bytes: int | None  # of it, that an emulated device has; None: all, it has no other

    @classmethod
    def measured(
        cls,
        neighbours: Sequence[Sequence[int]],
        free_bytes: int | None,
        device_bytes: int | None,
        *,
        num_repeats: int,
        emulated: EmulatedDevice | None,
    ) -> "HostPartReport":
        """Time torch's fused AdamW; ``neighbours`` are the processors of the host's others."""
        before = torch.get_num_threads()
        param = torch.nn.Parameter(torch.zeros(NUMEL))
        param.grad = torch.ones(NUMEL)
        optimizer = torch.optim.AdamW([param], fused=True)
        stopwatch, seconds = Stopwatch(torch.device("cpu"), emulated), []
        torch.set_num_threads(share_of_processors(processors(), neighbours))
        try:
            optimizer.step()  # makes its states
            for _ in range(num_repeats):
                with stopwatch.running():
                    optimizer.step()
                seconds.append(stopwatch.seconds)
        finally:
            torch.set_num_threads(before)
        pace = UPDATE_BYTES * NUMEL / median(seconds)
        return cls(pace, free_bytes, device_bytes)


def pace_of(parts: Sequence[HostPartReport]) -> float | None:
    """Bytes that a host's processors read and write per second, of all its ranks' reports."""
    return max(LEAST_BYTES_PER_S, sum(each.bytes_per_s for each in parts)) if parts else None


def room_of(parts: Sequence[HostPartReport]) -> int | None:
    """Bytes of a host for what plans keep there; None if devices have all of its memory."""
    free = [each.free_bytes for each in parts if each.free_bytes is not None]
    taken = [each.device_bytes for each in parts if each.device_bytes is not None]
    if not free or len(taken) < len(parts):
        return None
    return max(1, int(USABLE_MEMORY_FRACTION * (min(free) - sum(taken))))
