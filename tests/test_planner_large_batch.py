"""Batches so large that a coarse search comes first, and those that are refused at once."""

from dataclasses import replace

import pytest

from shardhet.planner import Constraints, PlanError, solve
from shardhet.planner.candidates.candidates import TableBuilder
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, Node
from shardhet.records.workload import Workload
from tests.test_planner import WORKLOAD, random_case


def roomy(seed: int) -> Scenario:
    """Memory for millions of samples."""
    cluster, profile, _ = random_case(seed)
    devices = tuple(
        replace(each, memory_capacity_bytes=2**45) for each in cluster.nodes[0].devices
    )
    return Scenario(Cluster(nodes=(Node(host="a", devices=devices),)), WORKLOAD, profile)


def test_a_large_batch_is_planned_from_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    most, table = [0], TableBuilder.table

    def counted(builder: TableBuilder, *args: float, **kwargs: int) -> object:
        made = table(builder, *args, **kwargs)
        most.append(max(len(set(group.batch.tolist())) for group in made.problem.groups))
        return made

    monkeypatch.setattr(TableBuilder, "table", counted)
    solution = solve(roomy(2), global_batch_size=6000)
    assert solution.plan.global_batch_size == 6000
    assert solution.relative_gap < 1e-3
    assert max(most) < 1500


def test_a_batch_that_is_too_large_is_refused_before_anything_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listed(*_: object, **__: object) -> None:
        raise AssertionError("candidates were listed")

    monkeypatch.setattr(TableBuilder, "table", listed)
    with pytest.raises(PlanError, match="plans are searched up to 131,072 on one device"):
        solve(roomy(2), global_batch_size=10**7, constraints=Constraints(max_rounds=1))


def test_what_would_take_minutes_is_refused_by_name() -> None:
    layers = Workload.transformer(
        num_layers=100_000, width=8, num_heads=1, seq_len=4, vocab_size=8, hidden_width=8
    )
    with pytest.raises(PlanError, match=r"100,00\d units of the model but plans are searched"):
        solve(replace(roomy(2), workload=layers), global_batch_size=2)
