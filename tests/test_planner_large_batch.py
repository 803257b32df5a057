"""Batches so large that a coarse search comes first, and those that are refused at once."""

from dataclasses import replace

import pytest

from shardhet.planner import Demands, PlanError, solve
from shardhet.planner.candidates.candidates import TableBuilder
from shardhet.pricing.part import part_of
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.profiles import Collectives, Profile, Source
from shardhet.records.workload import Workload
from tests.made_up import device_profile
from tests.test_planner import WORKLOAD, random_case


def roomy(seed: int) -> Setting:
    """Memory for millions of samples."""
    cluster, profile, _ = random_case(seed)
    devices = tuple(
        replace(each, memory_capacity_bytes=2**45) for each in cluster.nodes[0].devices
    )
    return Setting(Cluster(nodes=(Node(host="a", devices=devices),)), WORKLOAD, profile)


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


def test_a_single_device_computes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, table = set(), TableBuilder.table

    def noted(builder: TableBuilder, *args: float, **kwargs: int) -> object:
        made = table(builder, *args, **kwargs)
        listed.update(made.problem.groups[0].batch.tolist())
        return made

    monkeypatch.setattr(TableBuilder, "table", noted)
    setting = roomy(2)
    alone = part_of(setting, (0,))
    solution = solve(alone, global_batch_size=1000, demands=Demands(max_rounds=1))
    assert solution.plan.global_batch_size == 1000
    assert listed == {1000}


def test_a_batch_that_is_too_large_is_refused_before_anything_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def listed(*_: object, **__: object) -> None:
        raise AssertionError("candidates were listed")

    monkeypatch.setattr(TableBuilder, "table", listed)
    with pytest.raises(PlanError, match="plans are searched up to 131,072 on one device"):
        solve(roomy(2), global_batch_size=10**7, demands=Demands(max_rounds=1))


def test_microbatches_are_as_large_as_memory_allows() -> None:
    """Of a device whose every visit takes long, whatever the size."""
    device = DeviceSpec(kind="A", memory_capacity_bytes=2**34)
    times = device_profile("A", lambda m: (1 + 0.01 * m, 1 + 0.02 * m), sizes=(1, 2, 4))
    setting = Setting(
        Cluster(nodes=(Node(host="a", devices=(device,)),)),
        WORKLOAD,
        Profile(devices=(times,), collectives=Collectives(source=Source.DERIVED, points=())),
    )
    solution = solve(setting, global_batch_size=64)
    assert solution.plan.ranks[0].microbatch_sizes == (64,)
    huge = Demands(max_microbatch_size=10**12)
    assert solve(setting, global_batch_size=64, demands=huge).plan == solution.plan


def test_what_would_take_minutes_is_refused_by_name() -> None:
    layers = Workload.transformer(
        num_layers=100_000, width=8, num_heads=1, seq_len=4, vocab_size=8, hidden_width=8
    )
    with pytest.raises(PlanError, match=r"100,00\d units of the model but plans are searched"):
        solve(replace(roomy(2), workload=layers), global_batch_size=2)
