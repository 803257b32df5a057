"""Plans for clusters: within every budget, as predicted, never worse than simpler ones."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from shardhet.planner import Constraints, DeviceLimits, PlanError, find_plan, solve
from shardhet.planner.baselines import compute_only, even, memory_only
from shardhet.planner.forms import BatchRounds
from shardhet.planner.problem.problem import Group, Problem
from shardhet.planner.search.search import search
from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.profiles import DeviceProfile, Profile, Timing
from shardhet.records.schedule import StepForm
from shardhet.records.workload import Workload
from tests.made_up import collectives, device_profile
from tests.selection import one_in
from tests.test_profiles import NEEDS_SHARED_DATA, SHARED_DATA

WORKLOAD = Workload.transformer(
    num_layers=6, width=128, num_heads=4, seq_len=64, vocab_size=512, hidden_width=320
)
STATE_BYTES = 16 * WORKLOAD.numel


def random_case(seed: int) -> tuple[Cluster, Profile, int]:
    """Two to five devices of two or three kinds; memory binds in about half of the cases."""
    rng = np.random.default_rng(seed)
    names = ["A", "B", "C"][: int(rng.integers(2, 4))]
    devices, profiles = [], []
    size = int(rng.integers(len(names), 6))
    roomy = rng.uniform(0.8, 4)
    for name in names:
        speed = float(np.exp(rng.normal(0, 0.8)))
        times = device_profile(
            name,
            lambda m, speed=speed: (
                speed * (m + rng.uniform(0, 0.4)),
                speed * (2 * m + rng.uniform(0, 0.4)),
            ),
            sizes=(1, 2, 4, 8),
        )
        profiles.append(
            replace(
                times,
                optimizer_seconds_per_element=float(rng.uniform(1e-7, 1e-6)),
                overlap_slowdown=float(rng.uniform(0, 1.5)),
            )
        )
    capacities = {name: int(roomy * STATE_BYTES * rng.uniform(0.3, 1)) for name in names}
    for i in range(size):
        name = names[i % len(names)]
        devices.append(DeviceSpec(kind=name, memory_capacity_bytes=capacities[name]))
    links = collectives((10**5, 10**6), gather_s_per_byte=1e-6, reduce_s_per_byte=2e-6)
    cluster = Cluster(nodes=(Node(host="a", devices=tuple(devices)),))
    profile = Profile(devices=tuple(profiles), collectives=links)
    return cluster, profile, int(rng.integers(4, 40))


def random_scenario(seed: int) -> tuple[Scenario, int]:
    """The same with the model."""
    cluster, profile, batch = random_case(seed)
    return Scenario(cluster, WORKLOAD, profile), batch


@pytest.mark.parametrize(("max_rounds", "largest"), [(1, 14), (2, 18)])
def test_a_batch_that_does_not_fit_is_told_the_largest_that_does(
    max_rounds: int, largest: int
) -> None:
    """In the form that needs the least memory; two rounds keep gradients beside the second."""
    scenario, _ = random_scenario(3)
    budgets = dict.fromkeys(range(scenario.cluster.world_size), int(0.45 * STATE_BYTES))
    demands = Constraints(max_rounds=max_rounds).with_budgets(budgets)
    assert solve(scenario, global_batch_size=largest, constraints=demands).fits
    for batch in (largest + 1, 3 * largest):
        said = f"batch of {batch} does not fit .* Lower global_batch_size to {largest},"
        with pytest.raises(PlanError, match=said):
            solve(scenario, global_batch_size=batch, constraints=demands)


def test_where_no_sample_fits_beside_the_state_what_it_leaves_is_told() -> None:
    scenario, batch = random_scenario(2)
    budget = int(1.1 * STATE_BYTES / scenario.cluster.world_size)
    demands = Constraints().with_budgets(
        dict.fromkeys(range(scenario.cluster.world_size), budget)
    )
    with pytest.raises(PlanError, match="no single sample beside it") as raised:
        solve(scenario, global_batch_size=batch, constraints=demands)
    figures = [float(each) for each in re.findall(r"([\d.]+) GiB", str(raised.value))]
    needed, of, left, with_copies, state = figures
    assert of == pytest.approx(budget / 2**30, rel=1e-2)
    assert state == pytest.approx(STATE_BYTES / 2**30, rel=5e-2)
    assert needed < of
    assert left < state < with_copies


@pytest.mark.parametrize("batch", [6, 7])
def test_even_batches_are_even_over_all_rounds_where_they_can_be(batch: int) -> None:
    scenario, _ = random_scenario(12)
    even_ones = Constraints(has_even_batches=True)
    assert scenario.cluster.world_size == 3
    best = solve(scenario, global_batch_size=batch, constraints=even_ones)
    for number in range(1, batch + 1):
        gathers = {"reshard_after_forward": False, "reshard_after_backward": False}
        form = StepForm(num_rounds=number, **gathers)
        demands = replace(even_ones, form=form)
        try:
            plan = solve(scenario, global_batch_size=batch, constraints=demands)
        except PlanError:
            continue
        totals = [sum(plan.plan.ranks[i].microbatch_sizes) for i in range(3)]
        assert batch % 3 or len(set(totals)) == 1
        if BatchRounds(number, batch).are_equal:
            assert best.lower_bound_s <= plan.predicted.step_time_s


def test_a_phase_may_take_no_time(recwarn: pytest.WarningsRecorder) -> None:
    scenario, batch = random_scenario(3)

    def without_backward(device: DeviceProfile) -> DeviceProfile:
        units = tuple(
            replace(u, points=tuple(replace(p, backward=Timing.single(0.0)) for p in u.points))
            if u.unit_kind == "embedding"
            else u
            for u in device.units
        )
        return replace(device, units=units)

    devices = tuple(map(without_backward, scenario.profile.devices))
    scenario = replace(scenario, profile=replace(scenario.profile, devices=devices))
    found = solve(scenario, global_batch_size=batch)
    assert found.lower_bound_s <= found.predicted.step_time_s
    assert not recwarn.list


@pytest.mark.parametrize("seed", one_in(6, range(12)))
def test_a_plan_keeps_its_promises_and_no_baseline_beats_it(seed: int) -> None:
    scenario, batch = random_scenario(seed)
    try:
        solution = solve(scenario, global_batch_size=batch)
    except PlanError:
        for baseline in (even, compute_only, memory_only):
            with pytest.raises(PlanError):
                baseline(scenario, global_batch_size=batch)
        return
    plan, predicted = solution.plan, solution.predicted
    assert plan.global_batch_size == batch
    assert CostModel(scenario).predict(plan) == predicted
    assert all(rank.fits for rank in predicted.ranks)
    assert sum(rank.stored_numel for rank in predicted.ranks) >= WORKLOAD.numel
    assert solution.lower_bound_s <= predicted.step_time_s * (1 + 1e-9)
    assert solution.relative_gap <= 1e-3
    for baseline in (even, compute_only, memory_only):
        try:
            simpler = baseline(scenario, global_batch_size=batch)
        except PlanError:
            continue
        assert simpler.predicted.step_time_s >= solution.lower_bound_s * (1 - 1e-9)


def test_demands_on_single_devices_are_met() -> None:
    scenario, batch = random_scenario(4)
    whole = solve(scenario, global_batch_size=batch)
    budget = whole.predicted.ranks[1].memory.total_bytes * 3 // 4
    limits = {
        0: DeviceLimits(rank_batch_size=2, recomputes=True),
        1: DeviceLimits(memory_budget_bytes=budget, max_microbatch_size=1),
    }
    solution = solve(scenario, global_batch_size=batch, constraints=Constraints(limits=limits))
    first, second = solution.plan.ranks[:2]
    assert first.rank_batch_size == 2
    assert first.recomputed_units == ("*",)
    assert solution.predicted.ranks[1].memory.total_bytes <= budget
    assert set(second.microbatch_sizes) <= {1}
    assert solution.predicted.step_time_s >= whole.lower_bound_s


def test_a_state_that_does_not_fit_is_refused_in_gib() -> None:
    device = DeviceSpec(kind="A", memory_capacity_bytes=STATE_BYTES // 2)
    cluster = Cluster(nodes=(Node(host="a", devices=(device,)),))
    scenario = replace(random_scenario(0)[0], cluster=cluster)
    with pytest.raises(PlanError, match=r"the state of 0\.0188 GiB does not fit"):
        find_plan(scenario, global_batch_size=1)


# Published figures


def published(model: str, dtype: str, devices: list[str]) -> list[list[list[float]]]:
    """Milliseconds of each device: [slope, intercept] forward and backward, then lists."""
    table = json.loads((SHARED_DATA / "cephalo" / "model_latencies.json").read_text())
    return [table[model][device]["512"][dtype] for device in devices]


@NEEDS_SHARED_DATA
def test_the_published_instance_is_solved_to_its_optimum() -> None:
    extra_ms, batch = 10.0, 64
    groups = []
    for entry in published("deepspeedgpt_2.7b", "float16", ["l4", "l4", "a6000", "p40"]):
        (f_slope, f_start), (b_slope, b_start) = entry[:2]
        rows = [(0, 0.0)]
        for samples in range(1, batch + 1):
            for size in range(1, samples + 1):
                number = -(-samples // size)  # the last microbatch may be smaller
                f = f_slope * samples + number * f_start
                b = b_slope * samples + number * b_start + (number - 1) * extra_ms
                rows.append((samples, f + (f + b)))
        batches, cost_ms = np.array(rows).T
        room = np.zeros(len(rows))
        groups.append(Group(1, batches.astype(int), cost_ms[None], room, 0.0).sorted()[0])
    found = search(Problem(tuple(groups), batch, 0.0))
    assert round(found.value.objective_s, 4) <= 342.2968
    assert found.relative_gap <= 1e-9
