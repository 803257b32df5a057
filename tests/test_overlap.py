"""Communication beside compute, and peak bytes, in the emulated streams' own time.

Products take as long as the profile prices them by their rows, and collectives by their bytes;
a rank's peers are ready as soon as it is.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.ops import Op, ops_of
from shardhet.records.profiles import Profile
from shardhet.records.schedule import GATHER, LaunchKind, Phase
from shardhet.records.workload import Unit, UnitKind, Workload
from shardhet.simulator.simulation import simulate
from tests.emulated.accelerator import Accelerator
from tests.made_up import collectives, device_profile
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


def _scenario_of(plan: Plan, part: float) -> Scenario:
    """A product takes a second a sample; a collective ``part`` of the smallest forward."""
    whole_s = part * min(rank.rank_batch_size for rank in plan.ranks if rank.rank_batch_size)
    unit_bytes = 4 * WIDTH**2
    block = UnitKind(
        name="block",
        param_shapes=((WIDTH, WIDTH),),
        forward_flops=1,
        backward_flops=2,
        input_bytes=4 * WIDTH,
        activation_bytes=4 * WIDTH,
        transient_bytes=0,
    )
    units = tuple(Unit(fqn=str(i), kind="block") for i in range(NUM_UNITS))
    device = DeviceSpec(kind="card", memory_capacity_bytes=2**30)
    card = device_profile(
        "card", lambda m: (float(m), 2.0 * m), sizes=(1, 64), unit_kinds=("block",)
    )
    pace = whole_s / unit_bytes
    links = collectives(
        (unit_bytes // 2, unit_bytes), gather_s_per_byte=pace, reduce_s_per_byte=pace
    )
    return Scenario(
        Cluster(nodes=(Node(host="a", devices=(device,) * plan.world_size),)),
        Workload(kinds=(block,), units=units),
        Profile(devices=(card,), collectives=links),
    )


def _seconds_of(scenario: Scenario) -> Any:
    """By the prices: a product is a forward, or half a backward; pieces of a collective."""
    block, links = scenario.profile.unit("card", "block"), scenario.profile.collectives
    assert links.gather_s is not None
    assert links.reduce_s is not None
    curves = {"all_gather": links.gather_s, "broadcast": links.gather_s}
    curves |= {"messages": links.gather_s, "reduce": links.reduce_s}

    def seconds(what: str, reads: list[Tensor], writes: list[Tensor]) -> float:
        if what == "aten.mm.default":
            shapes = [each.shape for each in (*reads, *writes)]
            rows = max(n for shape in shapes for n in shape if n != WIDTH)
            assert block.backward_s.at(rows) == 2 * block.forward_s.at(rows)
            return block.forward_s.at(rows)
        for name, curve in curves.items():
            if what.startswith(name):
                numel = max(sum(each.numel() for each in some) for some in (reads, writes))
                return curve.at(4 * numel) if numel >= WIDTH else 0.0
        return 0.0

    return seconds


def _measure(rank: int, plan: Plan, scenario: Scenario) -> Measured:
    mine = plan.ranks[rank].rank_batch_size
    with Accelerator().installed() as accelerator:
        module = nn.Sequential(*(Block() for _ in range(NUM_UNITS)))
        model = HetFSDP(module, plan, units=[Block], device=accelerator.device)
        x = torch.randn(mine, WIDTH).to(accelerator.device)

        def step() -> None:
            model.backward(model(x).sum(), mine)
            for param in model.parameters():
                param.grad = None

        step()  # its call is examined
        accelerator.module().synchronize()
        accelerator.seconds_of = _seconds_of(scenario)
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
    schedule = model._runtime.executor.schedule
    ops = ops_of(schedule)
    each_s = side_s / sum(isinstance(op.kind, LaunchKind) for op in ops)
    plan = model.plan.ranks[model.position]

    def compute_s(op: Op) -> float:
        if op.kind is Phase.FORWARD:
            return mine
        recomputed = plan.recomputes(model._runtime.units[op.unit].fqn)
        return mine * (2 if op.unit else 1) + mine * recomputed

    total = 2 * each_s  # the first gather and the last reduction
    beside = dict[int, bool]()  # launched since the turn before
    for i, op in enumerate(ops):
        if isinstance(op.kind, LaunchKind):
            beside[i] = op.kind is GATHER
        elif isinstance(op.kind, Phase):
            kinds = [is_gather for j, is_gather in beside.items() if j not in op.after]
            longest = max(kinds.count(True), kinds.count(False)) * each_s
            total += max(compute_s(op), longest)
            beside.clear()
    return total


@cache
def measured(name: str, part: float) -> list[Measured]:
    """By position, where a unit's collectives take ``part`` of the smallest rank's forward."""
    plan = PLANS[name]
    return run_ranks(_measure, plan.world_size, plan, _scenario_of(plan, part))


@pytest.mark.sampled(2)
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", [0.5, 2.0])
@pytest.mark.parametrize("name", PLANS)
def test_a_step_takes_as_long_as_is_simulated(name: str, part: float) -> None:
    plan = PLANS[name]
    simulated_s = simulate(plan, _scenario_of(plan, part)).step_time_s
    for found, rank in zip(measured(name, part), plan.ranks, strict=True):
        assert found.step_s <= simulated_s, found  # in which all share the links, and wait
        if part < 1 and rank.rank_batch_size == max(e.rank_batch_size for e in plan.ranks):
            # The input of the first unit has no gradient: a product less than priced.
            expected_s = simulated_s - rank.rank_batch_size
            assert found.step_s == pytest.approx(expected_s, rel=0.01), found


def _reserved(rank: int, plan: Plan) -> tuple[int, int]:
    """What the pools of all streams have held at most, and the most of a step."""
    mine = plan.ranks[rank].rank_batch_size
    with Accelerator().installed() as accelerator:
        module = nn.Sequential(*(Block() for _ in range(NUM_UNITS)))
        model = HetFSDP(module, plan, units=[Block], device=accelerator.device)
        x = torch.randn(mine, WIDTH).to(accelerator.device)
        for _ in range(2):  # its call is examined
            model.backward(model(x).sum(), mine)
            for param in model.parameters():
                param.grad = None
        return sum(accelerator.memory.most_by_pool.values()), accelerator.memory.peak_bytes


def test_activations_take_the_memory_that_gradients_had() -> None:
    # At the fullest moment, the end of forward, there are no gradients.
    plan = Plan.by_hand(microbatch_sizes=[16 * WIDTH] * 2, state_shares=[0.9, 0.1])
    for reserved, peak in run_ranks(_reserved, 2, plan):
        assert reserved - peak <= WIDTH**2 * 4 / 2, (reserved, peak)  # half a unit
