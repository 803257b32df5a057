"""Devices without samples and rows: priced, simulated and planned as if they were not there."""

from dataclasses import replace
from itertools import combinations
from math import inf
from pathlib import Path

import numpy as np
import pytest

from shardhet.planner import Constraints, DeviceLimits, PlanError, PlanSolution, solve
from shardhet.planner.advice.explain import Situation, larger_situations
from shardhet.planner.idle import SubsetSearch, active_positions, with_idle
from shardhet.planner.search.search import Effort
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.profiles import PairLink
from shardhet.records.workload import Workload
from shardhet.simulator.simulation import simulate
from shardhet.simulator.timeline import Work
from tests.pipeline_problems import drawn
from tests.selection import one_in
from tests.test_fewer import SLOW_LINKS, scenario_of
from tests.test_planner import WORKLOAD as PLANNER_WORKLOAD
from tests.test_planner import random_case

WORKLOAD = Workload.transformer(
    num_layers=4, width=256, num_heads=4, seq_len=128, vocab_size=1000
)
DESCRIBED = Path(__file__).parents[1] / "conf/cluster/described"
COARSE = Effort(relative_gap=1e-3)
CLOSE = 1e-12


def derived(cluster: Cluster, **options: float) -> Scenario:
    return Scenario(cluster, WORKLOAD, derive_profile(cluster, WORKLOAD, **options))


def spread_over(plan: Plan, kept: tuple[int, ...], cluster: Cluster) -> Plan:
    """The plan of some devices, with idle ones between them."""
    taken = dict(zip(kept, plan.ranks, strict=True))
    idle = RankPlan(microbatch_sizes=(), state_share=0.0)
    every = enumerate(cluster.devices)
    return replace(
        plan, ranks=tuple(taken.get(i, replace(idle, device=each)) for i, each in every)
    )


def assert_priced_alike(whole: Scenario, part: Scenario, kept: tuple[int, ...]) -> None:
    """Of the best plan of the part: seconds, simulated ones, and memory."""
    small = solve(part, global_batch_size=24, effort=COARSE, is_bounded=False)
    plan = spread_over(small.plan, kept, whole.cluster)
    here, there = CostModel(whole).predict(plan), small.predicted
    assert here.step_time_s == pytest.approx(there.step_time_s, rel=CLOSE)
    assert here.exposed_comm_s == pytest.approx(there.exposed_comm_s, rel=CLOSE)
    assert here.optimizer_s == pytest.approx(there.optimizer_s, rel=CLOSE)
    for one, other in zip(here.turns, there.turns, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=CLOSE)
        assert one.comm_s == pytest.approx(other.comm_s, rel=CLOSE)
    for position, rank in enumerate(here.ranks):
        if position in kept and len(kept) > 1 and not plan.two_level_units:
            assert rank.memory == there.ranks[kept.index(position)].memory
        elif position not in kept:
            assert (rank.forward_s, rank.backward_s, rank.stored_numel) == (0, 0, 0)
    times, times_there = simulate(plan, whole), simulate(small.plan, part)
    assert times.step_time_s == pytest.approx(times_there.step_time_s, rel=CLOSE)
    for position, rank_times in enumerate(times.ranks):
        if position not in kept:
            assert {event.work for event in rank_times.events} == {Work.AGREE}


@pytest.mark.parametrize(
    "name", one_in(3, sorted(path.stem for path in DESCRIBED.glob("*.yaml")))
)
def test_described_clusters_without_some_devices(name: str) -> None:
    """Links, participants, levels and the slowest of alike devices are those of the others."""
    cluster = Cluster.load(DESCRIBED / f"{name}.yaml")
    if cluster.world_size > 70:
        cluster = cluster.only(range(0, cluster.world_size, 8))
    rng = np.random.default_rng(len(name))
    whole = derived(cluster)
    for number in {1, 2, cluster.world_size // 2, cluster.world_size - 1}:
        kept = tuple(sorted(rng.choice(cluster.world_size, number, replace=False).tolist()))
        assert_priced_alike(whole, derived(cluster.only(kept)), kept)


def test_links_that_are_faster_than_derived_are_faster_among_some_too() -> None:
    situation = Situation(
        scenario=derived(Cluster.load(DESCRIBED / "lab.yaml")), constraints=Constraints()
    )
    [faster] = [
        more.scenario
        for resource, _, _, more in larger_situations(situation)
        if resource.value == "links"
    ]
    among = [part_of(each, (0, 1, 2)).profile for each in (situation.scenario, faster)]
    seconds = [each.collectives.points[-1].gather.mean_s for each in among]
    assert seconds[0] == pytest.approx(1.1 * seconds[1])


def test_measured_clusters_without_some_devices() -> None:
    scenario = scenario_of("fssa", s_per_byte=1e-7)
    pairs = tuple(
        PairLink(sender=i, receiver=j, latency_s=1e-5, bandwidth_bytes_per_s=(i + j) * 1e7)
        for i, j in combinations(range(4), 2)
    )
    profile = replace(scenario.profile, pairs=pairs)
    measured = replace(scenario, profile=profile)
    for kept in ((1, 2, 3), (0, 2), (3,), (0, 1, 3)):
        assert_priced_alike(measured, part_of(measured, kept), kept)


def demanded_idle(*positions: int) -> Constraints:
    nothing = DeviceLimits(rank_batch_size=0, max_state_share=0.0)
    return Constraints(limits=dict.fromkeys(positions, nothing))


def test_devices_may_not_be_idle_where_they_have_no_room_for_their_process() -> None:
    scenario = scenario_of("fss", s_per_byte=SLOW_LINKS)
    reserving = tuple(replace(each, reserved_bytes=2**30) for each in scenario.profile.devices)
    scenario = replace(scenario, profile=replace(scenario.profile, devices=reserving))
    demands = demanded_idle(1).with_budgets({1: 2**29})
    with pytest.raises(PlanError):
        solve(scenario, global_batch_size=16, constraints=demands)


def every_plan_of_parts(scenario: Scenario, batch: int) -> list[PlanSolution]:
    """The best plan of each set of devices, as one of all."""
    world_size = scenario.cluster.world_size
    found = []
    for number in range(1, world_size + 1):
        for kept in combinations(range(world_size), number):
            part = part_of(scenario, kept)
            small = solve(part, global_batch_size=batch)
            if number == world_size:
                found.append(small)
            elif (
                plan := with_idle(small, kept, CostModel(scenario), Constraints())
            ) is not None:
                found.append(plan)
    return found


@pytest.mark.parametrize("kinds", ["fss", "ffs", "fa", "fabs", "aaas"])
@pytest.mark.parametrize("s_per_byte", [1e-8, 1e-7, 1e-6, SLOW_LINKS])
def test_no_set_of_devices_is_faster_than_the_one_that_was_found(
    kinds: str, s_per_byte: float
) -> None:
    scenario = scenario_of(kinds, s_per_byte=s_per_byte, seconds={"a": 0.02})
    min_s = min(each.predicted.step_time_s for each in every_plan_of_parts(scenario, 6))
    for tolerance in (0.0, 5e-3):
        found = solve(scenario, global_batch_size=6, tolerance=tolerance)
        step_s = found.predicted.step_time_s
        assert step_s <= (1 + tolerance + 1e-6) * min_s
    again = solve(
        scenario,
        global_batch_size=6,
        tolerance=tolerance,
        subset_hint=active_positions(found),
        cutoff_s=step_s * (1 + CLOSE),
    )
    assert active_positions(again) == active_positions(found)
    with pytest.raises(PlanError):
        solve(scenario, global_batch_size=6, tolerance=tolerance, cutoff_s=0.99 * min_s)


def test_of_alike_nodes_one_is_left_out_and_parts_have_the_kind_that_is_asked() -> None:
    cluster = Cluster.load(DESCRIBED / "a10g_v100_t4_64.yaml")
    every = range(cluster.world_size)

    def search(demands: Constraints, with_kind: str | None = None) -> SubsetSearch:
        return SubsetSearch(
            scenario=derived(cluster),
            global_batch_size=64,
            constraints=demands,
            cutoff_s=inf,
            tolerance=0.0,
            solved=lambda *_: pytest.fail("not asked"),
            with_kind=with_kind,
        )

    nodes = {frozenset(here) for here in cluster.positions_by_node}
    limited = Constraints(limits={0: DeviceLimits(rank_batch_size=1)})
    for demands, number in ((Constraints(), 3), (limited, 12)):
        sets = search(demands)._sets(np.ones(len(every), dtype=bool))
        assert len(nodes & {frozenset(np.flatnonzero(each)) for each in sets}) == number
    v100s = np.array(["V100" in str(device.kind) for device in cluster.devices])
    for kind, is_asked in (("Tesla V100-SXM2-16GB", True), ("Tesla T4", False), (None, True)):
        assert search(Constraints(), kind)._meets_constraints(v100s) == is_asked


def test_devices_are_left_idle_also_where_hosts_may_hold_a_part() -> None:
    """Without hosts the best of all plans leaves devices idle here, and is 6 times faster."""
    instance = drawn(1028, sizes=(2, 4))
    profile = derive_profile(instance.cluster, instance.workload, link_fraction=0.37)
    scenario = Scenario(instance.cluster, instance.workload, profile)
    on_host = Constraints(may_keep_inputs_on_host=True, may_keep_optimizer_on_host=True)
    found, without = (
        solve(
            scenario,
            global_batch_size=instance.batch,
            constraints=demands,
            tolerance=5e-3,
            is_bounded=False,
        )
        for demands in (on_host, Constraints())
    )
    assert len(active_positions(without)) < instance.cluster.world_size
    assert found.predicted.step_time_s <= without.predicted.step_time_s


def test_of_a_lone_device_a_plan_is_found_that_fits_beside_idle_ones() -> None:
    cluster, profile, batch = random_case(1211)  # alone, a device needs no room for gathers
    found = solve(
        Scenario(cluster, PLANNER_WORKLOAD, profile),
        global_batch_size=batch,
        constraints=Constraints(max_rounds=1),
    )
    assert found.fits
    assert len(active_positions(found)) > 1
