"""Devices that are better left out: which, what is gained, and what the others' links take."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shardhet.apps.plan import SPEC
from shardhet.apps.plan import main as plan_main
from shardhet.apps.planning.fewer_devices import (
    BetterWithout,
    estimated,
    named,
    ranges,
    whole_hosts,
)
from shardhet.apps.planning.inputs import load, read_request
from shardhet.apps.planning.what_if import WhatIfQuery, without_some
from shardhet.config.planning import PlannerConf
from shardhet.planner import Constraints, DeviceLimits, solve
from shardhet.planner.idle import Positions, SubsetPlan, active_positions
from shardhet.planner.search.search import Effort
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.profiles import (
    PairLink,
    Profile,
    Source,
)
from shardhet.records.workload import Workload
from tests.made_up import collectives, device_profile

WORKLOAD = Workload.transformer(num_layers=2, width=64, num_heads=2, vocab_size=100, seq_len=16)
SLOW_LINKS = 1e-5  # seconds per byte: some ten seconds a step for collectives
FAST_LINKS = 1e-12


def scenario_of(
    kinds: str,
    *,
    s_per_byte: float,
    hosts: str = "",
    seconds: dict[str, float] | None = None,
    capacity: int = 2**34,
) -> Scenario:
    """A measured scenario; kinds are letters, and "f" is ten times as fast as the others."""
    paces = {kind: 0.01 if kind == "f" else 0.1 for kind in kinds} | (seconds or {})
    nodes: dict[str, list[DeviceSpec]] = {}
    for kind, host in zip(kinds, hosts or "h" * len(kinds), strict=True):
        device = DeviceSpec(host=host, kind=kind, memory_capacity_bytes=capacity)
        nodes.setdefault(host, []).append(device)
    cluster = Cluster(
        nodes=tuple(Node(host=host, devices=tuple(each)) for host, each in nodes.items())
    )
    links = collectives(
        (2**14, 2**18), gather_s_per_byte=s_per_byte, reduce_s_per_byte=s_per_byte
    )
    profile = Profile(
        devices=tuple(
            device_profile(
                kind, lambda m, pace=pace: (pace * m, 2 * pace * m), sizes=(1, 2, 4, 8)
            )
            for kind, pace in paces.items()
        ),
        collectives=links,
    )
    return Scenario(cluster, WORKLOAD, profile)


@pytest.mark.parametrize(
    ("kinds", "s_per_byte", "active"),
    [("fss", SLOW_LINKS, (0,)), ("fss", FAST_LINKS, (0, 1, 2))],
)
def test_devices_are_idle_where_links_are_slow(
    kinds: str, s_per_byte: float, active: Positions
) -> None:
    scenario = scenario_of(kinds, s_per_byte=s_per_byte)
    found = solve(scenario, global_batch_size=16)
    assert active_positions(found) == active
    alone = solve(part_of(scenario, active), global_batch_size=16)
    assert found.predicted.step_time_s == pytest.approx(alone.predicted.step_time_s, rel=1e-12)


def test_demanded_devices_stay_and_demands_move_with_their_devices() -> None:
    scenario = scenario_of("sfs", s_per_byte=SLOW_LINKS)
    limits = {0: DeviceLimits(rank_batch_size=1), 1: DeviceLimits(max_microbatch_size=2)}
    found = solve(scenario, global_batch_size=16, constraints=Constraints(limits=limits))
    assert [rank.rank_batch_size for rank in found.plan.ranks] == [1, 15, 0]
    assert active_positions(found) == (0, 1)
    alike = solve(scenario, global_batch_size=16, constraints=Constraints(equal=((0, 1),)))
    assert [rank.rank_batch_size for rank in alike.plan.ranks] == [8, 8, 0]
    together = Constraints(equal=((0, 2), (1,)), limits={2: DeviceLimits(max_state_share=0.1)})
    assert together.only((1, 2)) == Constraints(limits={1: DeviceLimits(max_state_share=0.1)})


def test_collectives_among_some_are_estimated_from_those_of_all() -> None:
    scenario = scenario_of("abcd", s_per_byte=1e-6)
    estimate = part_of(scenario, (0, 1)).profile.collectives
    assert estimate.source is Source.DERIVED
    assert estimate.gather_s is not None
    # Half of the bytes pass each of two devices, three quarters each of four.
    assert estimate.gather_s.at(2**18) == pytest.approx(1e-6 * 2**18 * 2 / 3)
    pairs = tuple(
        PairLink(
            sender=i, receiver=j, latency_s=0.0, bandwidth_bytes_per_s=1e9 * (1 + (j == 1))
        )
        for i in range(4)
        for j in range(i + 1, 4)
    )
    with_pairs = replace(scenario, profile=replace(scenario.profile, pairs=pairs))
    faster = part_of(with_pairs, (0, 1)).profile.collectives
    assert faster.gather_s is not None
    assert faster.gather_s.at(2**18) == pytest.approx(1e-6 * 2**18 / 3)
    assert "measure the others alone" in estimated(scenario, (0, 1))
    assert estimated(scenario, (0,)) == estimated(scenario, (0, 1, 2, 3)) == ""


def test_devices_are_named_by_kind_and_hosts_where_they_stay_whole() -> None:
    cluster = scenario_of("abbcb", s_per_byte=1.0, hosts="hhhgg").cluster
    assert ranges((0, 2, 3, 4, 7)) == "0, 2-4, 7"
    assert named(cluster, (1, 2, 4)) == "the 3 b (devices 1-2, 4)"
    assert named(cluster, (0, 1)) == "the a (device 0), b (device 1)"
    assert whole_hosts(cluster, (0, 1, 2)) == ["h"]
    assert whole_hosts(cluster, (0, 1)) is None
    assert [node.host for node in cluster.only((3,)).nodes] == ["g"]


def test_a_pattern_of_hosts_fits_none_of_those_left_out() -> None:
    of = scenario_of("aabb", s_per_byte=1.0, hosts="wxyz")
    names = ("g-0", "g-1", "g-x-0", "g-x-1")
    nodes = [
        replace(node, host=name) for node, name in zip(of.cluster.nodes, names, strict=True)
    ]
    whole = replace(of.cluster, nodes=tuple(nodes))
    part = SubsetPlan((0, 1), of, solve(of, global_batch_size=4))
    better = BetterWithout(
        whole=whole,
        part=part,
        param_dtype="float32",
        samples_per_s_with_all=1.0,
        is_described=True,
        estimate="",
    )
    assert better.hosts_key == "hosts=[g-0,g-1]"
    assert better.left_out == [2, 3]
    other = replace(part, positions=(2, 3))
    assert replace(better, part=other).hosts_key == "hosts=[g-x-*]"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    plan_main(arguments)
    return " ".join(capsys.readouterr().out.split())


def test_measured_profiles_are_asked_as_well(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario = scenario_of("fss", s_per_byte=SLOW_LINKS)
    scenario.save(tmp_path)
    quick = ("global_batch_size=16", "what_if_s=0")
    text = said(capsys, f"measured={tmp_path}", *quick[:1], "for_tokens=1M")
    assert "Unused devices: 1-2. They compute and store nothing" in text
    assert re.search(r"1M tokens take [\d,.]+ \w+\.", text)
    assert "estimated from" not in text  # a single device has no collectives
    scenario_of("ffss", s_per_byte=1e-6).save(tmp_path)
    text = said(capsys, f"measured={tmp_path}", *quick, "leave_out=auto")
    assert "Better without the 2 s (devices 2-3)" in text
    assert "Collectives among the others are estimated from those of all devices" in text
    assert "Times were measured, but collectives are estimated from those of 4 devices" in text


def test_parts_of_hosts_are_named_by_their_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario_of("fss", s_per_byte=SLOW_LINKS, hosts="hhh").save(tmp_path)
    text = said(capsys, f"measured={tmp_path}", "global_batch_size=16", "leave_out=auto")
    assert "To launch without them: start ranks on devices 0 of h only (" in text


def test_of_many_devices_the_best_kinds_of_the_best_region_are_kept(tmp_path: Path) -> None:
    """540 devices of three kinds, in 20 nodes of two regions."""
    kinds = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla T4")
    lines = [
        "version: 1",
        "between_nodes: {latency_s: 0.00005, bandwidth_bytes_per_s: 12000000000.0}",
        "between_regions: {latency_s: 0.001, bandwidth_bytes_per_s: 1000000000.0}",
        "nodes:",
    ]
    lines += [
        f"- {{host: n{i}, region: r{i // 10}, devices: [{{kind: {kinds[i % 3]}, count: 27}}], "
        "link: {latency_s: 0.00002, bandwidth_bytes_per_s: 300000000000.0}}"
        for i in range(20)
    ]
    (tmp_path / "cards.yaml").write_text("\n".join(lines))
    line = [f"cluster={tmp_path / 'cards.yaml'}", "model=llama_7b", "global_batch_size=1024"]
    request = read_request(SPEC, line)
    assert request is not None
    conf, inputs = load(SPEC, request, PlannerConf)
    effort, cluster = Effort(relative_gap=1e-3), inputs.scenario.cluster
    search = partial(solve, global_batch_size=1024, effort=effort, is_bounded=False)
    best, demands = search(inputs.scenario), Constraints()
    asked = WhatIfQuery(conf=conf, inputs=inputs, constraints=demands, best=best, effort=effort)
    fewer = without_some(asked)
    assert fewer is not None
    for some in (kinds[:1], kinds[:2]):
        part = tuple(
            i
            for i, node in enumerate(cluster.node_of)
            if node.region == "r0" and cluster.devices[i].kind in some
        )
        other = search(conf.derived(cluster.only(part), "").scenario)
        assert fewer.part.solution.samples_per_s > 0.95 * other.samples_per_s
