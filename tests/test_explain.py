"""What limits a plan is what a little more of would help, found by planning again."""

import re
from pathlib import Path

import pytest

from shardhet.apps.plan import DOOR
from shardhet.apps.plan import main as plan_main
from shardhet.apps.planning.inputs import load, read_request
from shardhet.apps.planning.report import limit_lines
from shardhet.apps.planning.sentences import form_lines
from shardhet.config.planning import PlannerConf
from shardhet.planner import Demands, DeviceLimits, PlanSolution, solve
from shardhet.planner.advice import explain
from shardhet.planner.advice.explain import (
    Explanation,
    Resource,
    Situation,
    full_kind,
    gain_of,
    larger_situations,
    more_of_each,
    with_another,
)
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.margin import with_libraries
from shardhet.records.profiles import Profile, Source
from shardhet.records.workload import Workload
from tests.made_up import collectives, device_profile

WORKLOAD = Workload.transformer(
    num_layers=4, width=64, num_heads=2, seq_len=32, vocab_size=128, hidden_width=128
)
STATE_BYTES = 16 * WORKLOAD.numel
BATCH = 24
TWO_KINDS = "cluster=rtx4090_2x3090"
SLOW_CARDS = "cards=GTX 1060 3GB | GTX 1660 Ti | 2x GTX 1660 Ti | 2x GTX 1060 3GB + GTX 1660 Ti"


def situation(
    *, capacity: float = 50.0, bytes_per_s: float = 1e12, demands: Demands | None = None
) -> Situation:
    """Two fast devices and a slow one, each with ``capacity`` times the state."""
    devices = tuple(
        DeviceSpec(kind=kind, memory_capacity_bytes=int(capacity * STATE_BYTES))
        for kind in ("fast", "fast", "slow")
    )
    setting = Setting(
        Cluster(nodes=(Node(host="a", devices=devices),)),
        WORKLOAD,
        Profile(
            devices=tuple(
                device_profile(kind, lambda m, s=s: (s * m, 2 * s * m), sizes=(1, 2, 4))
                for kind, s in (("fast", 1e-3), ("slow", 2e-3))
            ),
            collectives=collectives(
                (10**4, 10**6),
                gather_s_per_byte=1 / bytes_per_s,
                reduce_s_per_byte=1 / bytes_per_s,
            ),
        ),
    )
    return Situation(setting=setting, demands=demands or Demands())


def solved(of: Situation) -> PlanSolution:
    return solve(of.setting, global_batch_size=BATCH, demands=of.demands)


def explained(of: Situation) -> Explanation:
    solution = solved(of)
    more = more_of_each(of, lambda each: solved(each).samples_per_s)
    gains = [gain_of(each, solution.samples_per_s) for each in more]
    return explain.explained(solution, of, gains)


def test_where_devices_compute_all_the_time_compute_limits() -> None:
    explanation = explained(situation())
    assert explanation.limit is not None
    assert explanation.limit.variant.resource is Resource.COMPUTE
    assert explanation.limit.relative == pytest.approx(0.1, rel=0.05)
    assert explanation.compute_s > 100 * explanation.links_s
    assert explanation.endless_memory is not None
    assert explanation.endless_memory.relative < 1e-3
    memory = [g for g in explanation.gains if g.variant.resource is Resource.MEMORY]
    assert all(gain.relative < 1e-3 for gain in memory)


def test_where_links_are_slow_links_limit() -> None:
    # None of them can be left idle.
    explanation = explained(situation(bytes_per_s=1e5, capacity=0.9))
    assert explanation.limit is not None
    assert explanation.limit.variant.resource is Resource.LINKS
    assert explanation.limit.relative == pytest.approx(0.1, rel=0.1)
    assert explanation.links_s > 10 * explanation.compute_s
    # With less recomputed, or in fewer rounds, there may be no room for it.
    said = next(limit_lines(explanation))
    assert said.endswith("a larger global batch would cost little if memory has room for it.")


def test_where_the_fast_devices_are_full_their_memory_limits() -> None:
    capped = Demands(
        limits={i: DeviceLimits(memory_budget_bytes=int(1.9 * STATE_BYTES)) for i in (0, 1)},
        max_rounds=1,
    )
    whole, tight = situation(), situation(demands=capped)
    assert solved(tight).samples_per_s < 0.99 * solved(whole).samples_per_s
    explanation = explained(tight)
    assert explanation.endless_memory is not None
    assert explanation.endless_memory.relative > 0.1
    gain = {(g.variant.resource, g.variant.device_kind): g.relative for g in explanation.gains}
    assert gain[Resource.MEMORY, "fast"] > 10 * gain[Resource.MEMORY, "slow"]


def test_more_memory_is_for_devices_of_the_kind_alone() -> None:
    of = situation()
    for resource, kind, _, larger in larger_situations(of):
        devices = zip(of.cluster.devices, larger.cluster.devices, strict=True)
        if resource is Resource.MEMORY:
            assert [
                (after.memory_capacity_bytes or 0) > (before.memory_capacity_bytes or 0)
                for before, after in devices
            ] == [kind in (None, each.kind) for each in of.cluster.devices]


def test_another_device_helps_by_what_it_can_do() -> None:
    gain = {
        g.variant.device_kind: g.relative
        for g in explained(situation()).gains
        if g.variant.resource is Resource.DEVICES
    }
    # The three devices are as fast as two and a half.
    assert gain["fast"] == pytest.approx(1 / 2.5, abs=0.1)
    assert gain["slow"] == pytest.approx(0.5 / 2.5, abs=0.1)


def test_demands_move_with_their_devices_when_one_is_added() -> None:
    demands = Demands(limits={0: DeviceLimits(), 2: DeviceLimits()}, equal=((1, 2),))
    larger = with_another(situation(demands=demands), "fast")
    assert larger is not None
    assert [device.kind for device in larger.cluster.devices] == [*["fast"] * 3, "slow"]
    assert sorted(larger.demands.limits) == [0, 3]
    assert larger.demands.equal == ((1, 3),)


def alone(of: Situation) -> Situation:
    """The first device only."""
    cluster = Cluster(nodes=(Node(host="a", devices=of.cluster.devices[:1]),))
    return of.with_cluster(cluster, Demands())


def test_one_device_has_no_links_to_be_faster_and_another_none_to_meet_it() -> None:
    resources = [resource for resource, _, _, _ in larger_situations(alone(situation()))]
    assert Resource.LINKS not in resources
    assert Resource.DEVICES not in resources
    assert resources.count(Resource.COMPUTE) == 1


@pytest.mark.parametrize("numbers", [(1, 1), (2, 2), (1,), (1, 2)])
def test_another_device_meets_the_others_as_if_it_was_described(
    numbers: tuple[int, ...],
) -> None:
    """GeForce cards of one host share its memory, so each more slows the links of all."""
    kinds = ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090")

    def described(numbers: tuple[int, ...]) -> Situation:
        nodes = [
            {
                "host": kind,
                "link": {"latency_s": 2e-5, "bandwidth_bytes_per_s": 12e9},
                "devices": [{"kind": kind, "count": number}],
            }
            for kind, number in zip(kinds, numbers, strict=False)
        ]
        slow = {"latency_s": 5e-5, "bandwidth_bytes_per_s": 1e9}
        document = {"version": 1, "nodes": nodes, "between_nodes": slow}
        cluster = with_libraries(Cluster.from_document(document, source="test"))
        setting = Setting(cluster, WORKLOAD, derive_profile(cluster, WORKLOAD))
        return Situation(setting=setting, demands=Demands())

    more = with_another(described(numbers), kinds[0])
    wanted = described((numbers[0] + 1, *numbers[1:]))
    assert more is not None
    assert more.cluster == wanted.cluster
    made, found = more.profile.collectives, wanted.profile.collectives
    for one, other in ((made, found), (more.profile.two_levels, wanted.profile.two_levels)):
        assert (one is None) == (other is None)
        for a, b in zip(one.points if one else (), other.points if other else (), strict=True):
            assert a.gather.mean_s == pytest.approx(b.gather.mean_s)
            assert a.reduce.mean_s == pytest.approx(b.reduce.mean_s)
    for device in wanted.profile.devices:
        points = zip(
            more.profile.device(device.device_kind).units[0].points,
            device.units[0].points,
            strict=True,
        )
        assert all(a.forward.mean_s == pytest.approx(b.forward.mean_s) for a, b in points)


def test_another_measured_device_takes_part_in_collectives() -> None:
    of = situation(bytes_per_s=1e5)
    larger = with_another(of, "fast")
    assert larger is not None
    before, after = of.profile.collectives, larger.profile.collectives
    assert after.source is Source.DERIVED
    for one, other in zip(before.points, after.points, strict=True):
        # 3 of 4 parts pass every device instead of 2 of 3.
        assert other.gather.mean_s == pytest.approx(9 / 8 * one.gather.mean_s)
    assert [each.positions for each in larger.profile.groups] == [(0, 1, 3)]


@pytest.mark.parametrize(
    ("described", "keys", "of", "amount"),
    [
        # In 6 rounds instead of 8.
        (
            ["model=llama_1b", TWO_KINDS],
            [],
            "compute of NVIDIA GeForce RTX 3090",
            "10 % faster",
        ),
        # The optimizer steps on fewer hosts.
        (
            ["model=llama_3b", TWO_KINDS],
            ["optimizer_on_host=true"],
            "all memory",
            "10 % more",
        ),
        # A plan of all devices that is slower, but leaves three of them idle.
        (
            ["model=tiny", SLOW_CARDS, "network=10GbE"],
            ["global_batch_size=12", "max_rounds=1"],
            "compute of NVIDIA GeForce GTX 1660 Ti",
            "10 % faster",
        ),
    ],
)
def test_what_more_would_give_is_what_the_command_plans_with_more(
    described: list[str],
    keys: list[str],
    of: str,
    amount: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    line = [*described, *keys, "leave_out=never"]
    plan_main([*line, "explain=true"])
    told = re.search(rf"{of} +. {amount} +. +(\S+) . +\+", capsys.readouterr().out)
    assert told is not None
    request = read_request(DOOR, line)
    assert request is not None
    conf, inputs = load(DOOR, request, PlannerConf)
    here = Situation(
        setting=inputs.setting, demands=conf.to_demands(inputs.setting.cluster.devices)
    )
    (more,) = (
        more
        for resource, kind, each, more in larger_situations(here)
        if each == amount and of in (f"{resource.value} of {kind}", f"all {resource.value}")
    )
    more.setting.save(tmp_path)
    plan_main([f"measured={tmp_path}", *keys, "what_if_s=0"])
    assert f": {told[1]} samples/s" in capsys.readouterr().out


def test_rounds_are_for_the_device_whose_memory_is_full_not_for_that_with_most_samples() -> (
    None
):
    of = situation(bytes_per_s=1e9)
    tight = Demands(limits={2: DeviceLimits(memory_budget_bytes=int(0.4 * STATE_BYTES))})
    of = of.with_cluster(of.cluster, tight)
    solution = solve(of.setting, global_batch_size=240, demands=of.demands)
    batches = [rank.rank_batch_size for rank in solution.plan.ranks]
    assert solution.plan.num_rounds > 1
    assert batches[2] < min(batches[:2])

    def samples_per_s(each: Situation) -> float:
        return solve(each.setting, global_batch_size=240, demands=each.demands).samples_per_s

    value = solution.samples_per_s
    full = full_kind(solution, of, value=value, objective=samples_per_s)
    assert full == "slow"
    said = next(form_lines(solution.plan, WORKLOAD, full))
    assert "because slow would otherwise hold" in said
    assert said.endswith(f"it holds those of {batches[2]}.")
    assert "because" not in next(form_lines(solution.plan, WORKLOAD))
