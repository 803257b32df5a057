"""A feature is a file: a kind of launch and a surrounding are added by a line."""

import pytest
import torch
from torch import nn

from shardhet import HetFSDP, Plan
from shardhet.fsdp.step.around import Visits
from shardhet.fsdp.step.schedule_executor import RUNS
from shardhet.pricing.launches import PRICES
from shardhet.pricing.scenario import Scenario
from shardhet.records.schedule import PASSES
from shardhet.simulator.simulation import simulate
from tests.test_cost import CLUSTER, WORKLOAD, plan, profile
from tests.toys import counting, parking


def train_step(recomputes: tuple[str, ...] = ()) -> list[torch.Tensor]:
    """The gradients of two units after a step of two microbatches on one rank."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    alone = Plan.by_hand(
        microbatch_sizes=[2], num_microbatches=[2], state_shares=[1.0], recompute=[recomputes]
    )
    model = HetFSDP(module, alone, units=[nn.Linear])
    loss = model(torch.ones(4, 2)).sum()
    model.backward(loss, 4)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_kind_of_launch_is_planned_simulated_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before, expected = simulate(plan(), Scenario(CLUSTER, WORKLOAD, profile())), train_step()
    monkeypatch.setattr("shardhet.records.schedule.PASSES", [*PASSES, parking.mark])
    monkeypatch.setitem(PRICES, parking.PARK, parking.price)
    monkeypatch.setitem(RUNS, parking.PARK, parking.HANDLING)
    parking.calls.clear()

    timeline = simulate(plan(), Scenario(CLUSTER, WORKLOAD, profile()))
    parks = [each for each in timeline.collectives if each.work is parking.PARK]
    assert [each.seconds for each in parks] == pytest.approx([parking.SECONDS] * 4)
    assert [each.unit for each in parks] == [f"blocks.{i}" for i in range(4)]
    # They have a link of their own; a backward waits for what its unit's forward launched.
    assert timeline.step_time_s == pytest.approx(before.step_time_s + parking.SECONDS)

    assert all(map(torch.equal, train_step(), expected))
    assert [unit for call, unit in parking.calls if call == "launch"] == ["0", "1"]
    assert sorted(parking.calls) == [
        (each, unit) for each in ("launch", "wait") for unit in "01"
    ]


def test_a_surrounding_sees_every_run_of_a_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train_step(recomputes=("0",))
    monkeypatch.setattr(Visits, "around", counting.beside(Visits.around))
    counting.seen.clear()
    assert all(map(torch.equal, train_step(recomputes=("0",)), expected))
    assert counting.seen == {
        **{(unit, phase): 1 for unit in "01" for phase in ("forward", "backward")},
        ("0", "run"): 2,
        ("0", "repeated"): 2,
        ("1", "run"): 2,
    }
