"""Measure the runtime's overhead: the time of a unit's turn without compute and waits."""

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardhet.comm import devices
from shardhet.fsdp import HetFSDP
from shardhet.fsdp.step.around import Observed
from shardhet.records.plan import Plan
from shardhet.records.schedule import Phase

NUM_UNITS = 24
NUM_MICROBATCHES = 5
NUM_WARMUP_STEPS = 2  # the first step records the order of units


def unit_overhead_seconds(
    group: dist.ProcessGroup | None, device: torch.device, num_repeats: int
) -> float:
    """Host seconds per unit and phase outside of microbatches and waits.  Collective.

    Measured in training steps of a chain of units that compute next to nothing, with one
    microbatch and with several: what grows with the number of microbatches belongs to them and
    is part of the times of units.  On an accelerator it is 0, because the host runs ahead and
    the device's work hides this time.
    """
    world_size = 1 if group is None else group.size()
    model = HetFSDP(
        _Chain(),
        Plan.even(world_size, microbatch_size=1, num_microbatches=NUM_MICROBATCHES),
        group=group,
        device=device,
        units=[_Link],
    )
    inside_s = 0.0

    def add(event: Observed) -> None:
        nonlocal inside_s
        inside_s += event.end_s - event.start_s

    model.add_observer(add)
    seconds: dict[int, list[float]] = {1: [], NUM_MICROBATCHES: []}
    for _ in range(NUM_WARMUP_STEPS + num_repeats):
        for num_microbatches, outside_s in seconds.items():
            inside_s = 0.0
            batch = torch.arange(1.0, num_microbatches + 1, device=device).view(-1, 1)
            start_s = time.perf_counter()
            model.backward(*model(batch))
            outside_s.append(time.perf_counter() - start_s - inside_s)
            model.zero_grad()
    if not devices.is_on_host(device):
        return 0.0
    one_s, several_s = (median(each[NUM_WARMUP_STEPS:]) for each in seconds.values())
    each_s = (several_s - one_s) / (NUM_MICROBATCHES - 1)
    return max(0.0, one_s - each_s) / (NUM_UNITS * len(Phase))


class _Link(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.links = nn.Sequential(*(_Link() for _ in range(NUM_UNITS)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.links(x)
        return y.sum(), torch.tensor(len(x), device=x.device)
