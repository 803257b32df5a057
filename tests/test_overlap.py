"""Communication beside compute, and peak bytes, in the emulated streams' own time.

Products take time by their rows and collectives by their bytes; a rank's peers are ready as
soon as it is.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.records.schedule import GATHER, Phase
from tests.emulated.accelerator import Accelerator
from tests.worlds import run_ranks

WIDTH, NUM_UNITS = 64, 6
PLANS = {
    "even": Plan.even(3, microbatch_size=4, num_microbatches=2),
    "demo_4": Plan.by_hand(  # conf/plan/demo_4.yaml
        microbatch_sizes=[8, 4, 2, 0],
        num_microbatches=[3, 3, 2, 0],
        state_shares=[0.30, 0.05, 0.25, 0.40],
        recompute=[False, True, False, False],
    ),
    "by_hand": Plan.by_hand(  # README.md
        microbatch_sizes=[8, 4, 0], num_microbatches=[3, 2, 0], state_shares=[0.2, 0.5, 0.3]
    ),
    "rtx4090_2x3090": Plan.by_hand(  # the table in README.md
        microbatch_sizes=[16, 3, 17],
        rank_batch_sizes=[31, 16, 17],
        state_shares=[0.0440, 0.7921, 0.1639],
        recompute=True,
        reshard_after_forward=False,
    ),
}


@dataclass(frozen=True)
class Measured:
    """One rank's step."""

    compute_s: float
    comm_s: float
    step_s: float
    ideal_s: float  # all is hidden that the schedule can hide
    peak_bytes: int  # above what was allocated before the step
    activation_bytes: int

    @property
    def hidden(self) -> float:
        could = self.compute_s + self.comm_s - self.ideal_s
        return (self.compute_s + self.comm_s - self.step_s) / could if could > 0 else 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _seconds_of(whole_s: float) -> Any:
    """Of products, a second a row of their sample; of collectives, ``whole_s`` for a unit."""

    def seconds(what: str, reads: list[Tensor], writes: list[Tensor]) -> float:
        if what == "aten.mm.default":
            rows = [each.shape for each in (*reads, *writes)]
            return float(max(n for shape in rows for n in shape if n != WIDTH))
        if what.startswith(("all_gather", "broadcast", "messages", "reduce")):
            numel = sum(each.numel() for each in (*reads, *writes)) / 2
            return whole_s * numel / WIDTH**2 if numel >= WIDTH else 0.0
        return 0.0

    return seconds


def _measure(rank: int, plan: Plan, whole_s: float) -> Measured:
    mine = plan.ranks[rank].rank_batch_size
    with Accelerator().installed() as accelerator:
        module = nn.Sequential(*(Block() for _ in range(NUM_UNITS)))
        model = HetFSDP(module, plan, units=[Block], device=accelerator.device)
        x = torch.ones(mine, WIDTH, device=accelerator.device)

        def step() -> None:
            model.backward(model(x).sum(), max(1, mine))
            for param in model.parameters():
                param.grad = None

        step()  # its call is examined
        accelerator.module().synchronize()
        accelerator.seconds_of = _seconds_of(whole_s)
        begin_s = accelerator.host.now_s
        accelerator.memory.peak_bytes = before = accelerator.memory.allocated_bytes
        step()
        streams = accelerator.host.streams
        compute = accelerator.current
        comm = model._comm
        sides = (comm.all_gather_stream, comm.reduce_scatter_stream)
        spans = [[b - a for _, a, b in stream.spans] for stream in (compute, *sides)]
        side_s = sum(b - a for each in streams if each is not compute for _, a, b in each.spans)
        return Measured(
            compute_s=sum(spans[0]),
            comm_s=side_s,
            step_s=max(stream.free_at_s for stream in streams) - begin_s,
            ideal_s=_ideal_s(model, mine, side_s),
            peak_bytes=accelerator.memory.peak_bytes - before,
            activation_bytes=(NUM_UNITS + 2) * mine * WIDTH * 4,
        )


def _ideal_s(model: HetFSDP, mine: int, side_s: float) -> float:
    """The longest of compute and transfers in every turn, and the two that nothing hides."""
    schedule = model._runtime._walk._order.schedule
    launches = schedule.launches()
    each_s = side_s / len(launches)
    plan = model.plan.ranks[model.position]

    def compute_s(cursor: int) -> float:
        turn = schedule.turns[cursor]
        if turn.phase is Phase.FORWARD:
            return mine
        recomputed = plan.recomputes(model._runtime.units[turn.unit].fqn)
        return mine * (2 if turn.unit else 1) + mine * recomputed

    total = 2 * each_s  # the first gather and the last reduction
    for cursor in range(len(schedule.turns)):
        kinds = [launch.kind is GATHER for launch in schedule.beside(cursor)]
        longest = max(kinds.count(True), kinds.count(False)) * each_s
        total += max(compute_s(cursor), longest)
    return total


@cache
def measured(name: str, part: float) -> list[Measured]:
    """By position, where a unit's collectives take ``part`` of the smallest rank's forward."""
    plan = PLANS[name]
    least = min(rank.rank_batch_size for rank in plan.ranks if rank.rank_batch_size)
    return run_ranks(_measure, plan.world_size, plan, part * least)


@pytest.mark.parametrize("part", [0.5, 2.0])
@pytest.mark.parametrize("name", PLANS)
def test_nine_tenths_of_what_the_schedule_can_hide_are_hidden(name: str, part: float) -> None:
    for found, rank in zip(measured(name, part), PLANS[name].ranks, strict=True):
        if rank.rank_batch_size:
            assert found.hidden >= 0.9, found


@pytest.mark.parametrize("name", PLANS)
def test_two_units_and_gradients_are_alive_at_once_none_on_ranks_that_store(name: str) -> None:
    unit_bytes = WIDTH**2 * 4
    for found, rank in zip(measured(name, 0.5), PLANS[name].ranks, strict=True):
        # Rounding to rows, the numbers that are shared; and the sums of all own gradients.
        allowed = NUM_UNITS * unit_bytes * rank.state_share + unit_bytes / 2
        if rank.rank_batch_size:
            units = 2 if PLANS[name].reshard_after_forward else NUM_UNITS
            allowed += (units + 2) * unit_bytes + found.activation_bytes
        assert found.peak_bytes <= allowed, (found, allowed)
