"""Collectives in two levels: results, bits, and that rows cross between nodes once per node."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from shardhet import Cluster, DeviceSpec, HetFSDP, Plan, Workload, find_plan
from shardhet.planner import Constraints, DeviceLimits
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.scenario import Scenario
from shardhet.records.stages import Nodes, Stage, TwoLevels
from shardhet.simulator.simulation import simulate
from tests.emulated.accelerator import Accelerator
from tests.worlds import run_ranks

WORLD_SIZE = 4


def ring_crossings(nodes: Sequence[int], owner: int) -> int:
    """How often the rows of ``owner`` cross between nodes in a ring of all positions."""
    order = [*range(owner, len(nodes)), *range(owner)]
    return sum(nodes[a] != nodes[b] for a, b in pairwise(order))


@pytest.mark.parametrize(("numbers", "part"), [((2, 4), 0.60), ((1, 3), 0.67)])
def test_rows_cross_once_per_node_and_not_twice(numbers: tuple[int, ...], part: float) -> None:
    nodes = [node for node, number in enumerate(numbers) for _ in range(number)]
    geometry = TwoLevels.among(Nodes(tuple(nodes)), [True] * len(nodes))
    assert geometry is not None
    once = sum(len(takers) - 1 for takers in geometry.node_leaders)
    in_a_ring = sum(ring_crossings(nodes, owner) for owner in range(len(nodes)))
    assert once / in_a_ring == pytest.approx(part, abs=0.005)


def test_a_level_inside_has_to_have_somebody() -> None:
    assert TwoLevels.among(Nodes((0, 1, 2)), [True] * 3) is None  # rings cross no more often
    assert TwoLevels.among(Nodes((0, 0, 1)), [True, True, False]) is None
    assert TwoLevels.among(Nodes((0, 0, 1)), [True, True, True]) is not None


HOSTS = ("a", "b", "b", "b")
PLANS = {
    "1 + 3": Plan.by_hand(
        microbatch_sizes=[2, 1, 1, 2],
        num_microbatches=[2, 1, 2, 1],
        state_shares=[0.4, 0.1, 0.3, 0.2],
        two_level_units=True,
    ),
    "stores only, and nothing": Plan.by_hand(
        microbatch_sizes=[0, 1, 3, 2], state_shares=[0.5, 0.0, 0.25, 0.25], two_level_units=True
    ),
    "some units": Plan.by_hand(
        microbatch_sizes=[1, 1, 0, 2],
        state_shares=[0.3, 0.2, 0.4, 0.1],
        two_level_units=["0", "2"],
        num_rounds=2,
    ),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(7, 7, dtype=torch.float64) for _ in range(4)))


def _gradients(rank: int, name: str, hosts: Sequence[str]) -> list[list[Tensor]]:
    """Of two steps on the same samples, whole."""
    plan = PLANS[name]
    accelerator = Accelerator()
    with accelerator.installed():
        device = accelerator.device
        spec = DeviceSpec(host=hosts[rank])
        model = HetFSDP(_model(), plan, units=[nn.Linear], device=device, device_spec=spec)
        samples = torch.randn(
            plan.global_batch_size, 7, generator=torch.Generator().manual_seed(1)
        ).double()
        found = []
        for _ in range(2):
            for i in range(plan.num_rounds):
                start = plan.first_sample(rank) + i * plan.round_size
                own = samples[start : start + plan.ranks[rank].rank_batch_size].to(device)
                model.backward((model(own) ** 2).sum(), len(own))
            found.append([each.grad.clone().cpu() for each in model.parameters()])
            model.zero_grad()
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_those_of_one_process(name: str) -> None:
    plan = PLANS[name]
    ranks = run_ranks(_gradients, WORLD_SIZE, name, HOSTS)
    alone = _model()
    samples = torch.randn(
        plan.global_batch_size, 7, generator=torch.Generator().manual_seed(1)
    ).double()
    ((alone(samples) ** 2).sum() / len(samples)).backward()
    for i, param in enumerate(alone.parameters()):
        whole = torch.cat([first[i] for first, _ in ranks])
        bar = 1e-12 * param.grad.abs().max()
        torch.testing.assert_close(whole.view_as(param), param.grad, rtol=0, atol=float(bar))
        for first, second in ranks:
            assert torch.equal(first[i], second[i])


def _scenario(numbers: Sequence[int], bytes_per_s: float) -> Scenario:
    nodes = [
        {
            "host": f"node{i}",
            "devices": [{"kind": "NVIDIA A10", "count": number}],
            "link": {"latency_s": 1e-5, "bandwidth_bytes_per_s": 25e9},
        }
        for i, number in enumerate(numbers)
    ]
    cable = {"latency_s": 3e-5, "bandwidth_bytes_per_s": bytes_per_s}
    document = {"version": 1, "nodes": nodes, "between_nodes": cable}
    cluster = Cluster.from_document(document, source="test")
    workload = Workload.transformer(
        num_layers=4, width=1024, num_heads=8, vocab_size=1000, seq_len=512
    )
    return Scenario(cluster, workload, derive_profile(cluster, workload))


def _in_one_level(scenario: Scenario) -> Scenario:
    return replace(scenario, profile=replace(scenario.profile, two_levels=None))


@pytest.mark.parametrize(
    ("numbers", "bytes_per_s", "gain"),
    [((4, 4), 1.25e9, 1.5), ((2, 4), 1.25e9, 1.1), ((1, 3), 1.25e9, 1.0), ((4, 4), 25e9, 1.0)],
)
def test_the_planner_takes_two_levels_where_they_are_faster(
    numbers: tuple[int, ...], bytes_per_s: float, gain: float
) -> None:
    """The links of a slow cable both ways; not where all links are alike.

    All have samples: of so few, one node alone would take less time.
    """
    scenario = _scenario(numbers, bytes_per_s)
    each = DeviceLimits(rank_batch_size=2)
    demands = Constraints(limits=dict.fromkeys(range(sum(numbers)), each))
    batch = 2 * sum(numbers)
    plan = find_plan(scenario, global_batch_size=batch, constraints=demands)
    flat = find_plan(_in_one_level(scenario), global_batch_size=batch, constraints=demands)
    assert bool(plan.two_level_units) == (gain > 1)
    assert not flat.two_level_units
    step_s, flat_s = (simulate(each, scenario).step_time_s for each in (plan, flat))
    assert flat_s / step_s >= gain
    if plan.two_level_units:  # links set the pace of each turn, as in the simulation
        predicted_s = CostModel(scenario).predict(plan).step_time_s
        assert predicted_s == pytest.approx(step_s, rel=0.02)


def test_stages_gather_among_themselves() -> None:
    stages = [Stage(units=("a",), num_ranks=1), Stage(units=("b",), num_ranks=1)]
    with pytest.raises(ValueError, match="two_level_units with stages"):
        Plan.by_hand(microbatch_sizes=[1, 1], num_rounds=2, two_level_units=True, stages=stages)
