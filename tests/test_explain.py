"""What limits a plan is what a little more of would help, found by planning again."""

import re
from pathlib import Path

import pytest

from shardhet.apps.plan import SPEC
from shardhet.apps.plan import main as plan_main
from shardhet.apps.planning.inputs import load, read_request
from shardhet.apps.planning.report import limit_lines
from shardhet.config.planning import PlannerConf
from shardhet.planner import Constraints, DeviceLimits, PlanError, PlanSolution, solve
from shardhet.planner.advice.explain import (
    OFF,
    Gain,
    Reach,
    Resource,
    Situation,
    Variant,
    at_other_speed,
    larger_situations,
    lost_at_other_speeds,
    more_of_each,
    tried,
    with_another,
)
from shardhet.planner.problem.constraints import TOLERANCE
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.margin import with_libraries
from shardhet.records.profiles import Profile
from shardhet.records.workload import Workload
from tests.made_up import collectives, device_profile
from tests.selection import for_campaign
from tests.test_planner import WORKLOAD as CASES_WORKLOAD
from tests.test_planner import random_case

WORKLOAD = Workload.transformer(
    num_layers=4, width=64, num_heads=2, seq_len=32, vocab_size=128, hidden_width=128
)
STATE_BYTES = 16 * WORKLOAD.numel
BATCH = 24
TWO_KINDS = "cluster=rtx4090_2x3090"
SLOW_CARDS = "cards=GTX 1060 3GB | GTX 1660 Ti | 2x GTX 1660 Ti | 2x GTX 1060 3GB + GTX 1660 Ti"


def situation(
    *, capacity: float = 50.0, bytes_per_s: float = 1e12, constraints: Constraints | None = None
) -> Situation:
    """Two fast devices and a slow one, each with ``capacity`` times the state."""
    devices = tuple(
        DeviceSpec(kind=kind, memory_capacity_bytes=int(capacity * STATE_BYTES))
        for kind in ("fast", "fast", "slow")
    )
    scenario = Scenario(
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
    return Situation(scenario=scenario, constraints=constraints or Constraints())


def solved(of: Situation, batch: int = BATCH) -> PlanSolution:
    return solve(of.scenario, global_batch_size=batch, constraints=of.constraints)


def reached(of: Situation, _least: float) -> float:
    return solved(of).samples_per_s


def gains_of(of: Situation) -> list[Gain]:
    return [*tried(more_of_each(of, reached), solved(of).samples_per_s)]


def limits(of: Situation, gains: list[Gain]) -> list[str]:
    return [*limit_lines(solved(of), gains)]


def test_what_is_no_better_than_the_best_is_not_asked_how_much_it_gives() -> None:
    of = situation()
    value, asked = solved(of).samples_per_s, list[float]()

    def noted(there: Situation, least: float) -> float:
        asked.append(least)
        return reached(there, least)

    every = gains_of(of)
    best = sorted((gain.value for gain in every), reverse=True)[:2]
    few = [*tried(more_of_each(of, noted), value, num_best=2)]
    assert sorted((gain.value for gain in few), reverse=True)[:2] == best
    assert asked == sorted(asked)
    assert asked[-1] > 1.05 * asked[0]
    assert len([*tried(more_of_each(of, reached), value, within_s=0)]) == 1


def test_what_is_within_a_change_that_gives_nothing_is_not_asked() -> None:
    asked = list[str]()

    def reach(name: str, value: float) -> Reach:
        def of(least: float) -> tuple[float, str]:
            asked.append(name)
            if value < least:
                raise PlanError("slower")
            return value, ""

        return of

    variants = [
        Variant("hosts", "both", reach("both", 1.0)),
        Variant("hosts", "one", reach("one", 2.0), within="both"),
        Variant("memory", "much", reach("much", 3.0)),
        Variant("memory", "more", reach("more", 2.0), within="much"),
    ]
    assert [gain.value for gain in tried(variants, 1.0)] == [1.0, 1.0, 3.0, 2.0]
    assert asked == ["both", "much", "more"]


@pytest.mark.parametrize("seed", [1])
def test_what_is_lost_at_other_speeds_is_against_the_best_plan_there(seed: int) -> None:
    cluster, profile, batch = random_case(seed)
    of = Situation(
        scenario=Scenario(cluster, CASES_WORKLOAD, profile), constraints=Constraints()
    )
    here = solved(of, batch)
    loss = lost_at_other_speeds(here, of, lambda there, _: solved(there, batch).samples_per_s)
    lost = []
    for kind in of.kinds:
        for speed in (1 - OFF, 1 + OFF):
            there = at_other_speed(of, frozenset({kind}), speed)
            step_s = CostModel(there.scenario).predict(here.plan).step_time_s
            lost.append(step_s / solved(there, batch).predicted.step_time_s - 1)
    assert len(lost) > 2
    assert loss is not None
    assert loss.relative == pytest.approx(max(0.0, *lost), abs=3e-3)
    assert lost_at_other_speeds(here, alone(situation()), reached) is None


def test_more_memory_is_for_devices_of_the_kind_alone() -> None:
    of = situation()
    for resource, kind, _, larger in larger_situations(of):
        devices = zip(of.cluster.devices, larger.cluster.devices, strict=True)
        if resource is Resource.MEMORY:
            assert [
                (after.memory_capacity_bytes or 0) > (before.memory_capacity_bytes or 0)
                for before, after in devices
            ] == [kind in (None, each.kind) for each in of.cluster.devices]


def test_demands_move_with_their_devices_when_one_is_added() -> None:
    constraints = Constraints(limits={0: DeviceLimits(), 2: DeviceLimits()}, equal=((1, 2),))
    larger = with_another(situation(constraints=constraints), "fast")
    assert larger is not None
    assert [device.kind for device in larger.cluster.devices] == [*["fast"] * 3, "slow"]
    assert sorted(larger.constraints.limits) == [0, 3]
    assert larger.constraints.equal == ((1, 3),)


def alone(of: Situation) -> Situation:
    """The first device only."""
    cluster = Cluster(nodes=(Node(host="a", devices=of.cluster.devices[:1]),))
    return of.with_cluster(cluster, Constraints())


def test_one_more_of_many_devices_that_are_alike_is_not_asked_about() -> None:
    of = situation()
    many = Node(host="many", devices=of.cluster.devices[2:] * 400)
    cluster = Cluster(nodes=(*of.cluster.nodes, many))
    added = [
        kind
        for resource, kind, *_ in larger_situations(of.with_cluster(cluster, of.constraints))
        if resource is Resource.DEVICES
    ]
    assert added == ["fast"]


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
        scenario = Scenario(cluster, WORKLOAD, derive_profile(cluster, WORKLOAD))
        return Situation(scenario=scenario, constraints=Constraints())

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
        # The optimizer steps on fewer hosts; a minute and more of searches.
        for_campaign(
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
    told = re.search(rf"{re.escape(of)} +. {amount} +. +(\S+) . +\+", capsys.readouterr().out)
    assert told is not None
    request = read_request(SPEC, line)
    assert request is not None
    conf, inputs = load(SPEC, request, PlannerConf)
    here = Situation(
        scenario=inputs.scenario,
        constraints=conf.to_constraints(inputs.scenario.cluster.devices),
    )
    (more,) = (
        more
        for resource, kind, each, more in larger_situations(here)
        if each == amount and of in (f"{resource.value} of {kind}", f"all {resource.value}")
    )
    more.scenario.save(tmp_path)
    plan_main([f"measured={tmp_path}", *keys, "what_if_s=0"])
    found = re.search(r": (\S+) samples/s", capsys.readouterr().out)
    assert found is not None
    # Of equally fast plans the command prefers one.
    assert float(found[1]) == pytest.approx(float(told[1]), rel=TOLERANCE)
