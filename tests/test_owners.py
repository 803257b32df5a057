"""Which device stores which matrices: as fast as any assignment, and within memory."""

from functools import partial
from itertools import product
from math import inf, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardhet.planner import Constraints, DeviceLimits, PlanError, solve
from shardhet.planner.owners import OwnersProblem, assigned
from shardhet.planner.stages.find import find_pipeline
from shardhet.pricing.matrices import Matrices, matrices_s, operations, trained_matrices
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.layout import ALIGNMENT_NUMEL, FlatLayout, Owned, cut_by_shares
from shardhet.records.plan import EVERY_BLOCK, Plan, is_matched
from shardhet.simulator.stages import price_of
from tests.selection import one_in
from tests.test_layout import LAYOUTS
from tests.test_planner import WORKLOAD, random_case
from tests.test_stage_planning import CARDS, cluster_of, derived

WITHIN = 1.02  # of the bound, in the median


def drawn(rng: np.random.Generator, num_devices: int, numbers: list[int]) -> OwnersProblem:
    """Matrices of a block, and devices with enough room in all."""
    shapes = [(96, 32), (32, 32), (172, 32)][: len(numbers)]
    numels = np.array([float(prod(shape)) for shape in shapes])
    cut = 3000.0
    room = rng.uniform(0.3, 2.0, num_devices)
    room *= rng.uniform(1.3, 3) * (numels @ numbers + cut) / room.sum()
    work = np.array([operations(shape) for shape in shapes])
    slowness, per_numel = rng.uniform(1, 10, num_devices), rng.uniform(0, 5, num_devices)
    seconds = work[:, None] * slowness + numels[:, None] * per_numel
    return OwnersProblem(numels, np.array(numbers, float), seconds, room, per_numel, cut)


def spread_s(problem: OwnersProblem, numbers: np.ndarray) -> float:
    """The slowest device, with what is cut by rows spread best; inf if nothing fits."""
    busy = (problem.seconds * numbers).sum(axis=0)
    left = problem.room - problem.numels @ numbers
    if left.min() < 0 or left.sum() < problem.cut_numel:
        return inf
    low, high = float(busy.max()), float(busy.max() + problem.cut_numel * 10)
    for _ in range(60):
        middle = (low + high) / 2
        can = np.clip((middle - busy) / np.maximum(problem.seconds_per_numel, 1e-9), 0, left)
        low, high = (low, middle) if can.sum() >= problem.cut_numel else (middle, high)
    return high


@given(LAYOUTS, st.data())
def test_an_owner_has_all_of_its_parameters_and_borders_are_aligned(
    layout: FlatLayout, data: st.DataObject
) -> None:
    number = len(layout.param_shapes)
    owners = data.draw(st.lists(st.integers(0, 4), min_size=number, max_size=number))
    owned = layout.owned(owners, 5)
    borders = [0, *(span.stop for span in owned.shard_spans)]
    assert [span.start for span in owned.shard_spans] == borders[:-1]
    assert borders[-1] == owned.numel
    for owner, shape, cut in zip(owners, layout.param_shapes, owned.cuts(), strict=True):
        num_rows = (shape[0] if shape else 1) if prod(shape) else 0
        assert [rows.numel for rows in cut] == [num_rows * (i == owner) for i in range(5)]
    assert all(span.start % ALIGNMENT_NUMEL == 0 for span in owned.param_spans)
    filled = [span for span in owned.shard_spans if span.numel]
    assert all(span.start % ALIGNMENT_NUMEL == 0 for span in filled)
    assert all(0 < gap.numel < ALIGNMENT_NUMEL for gap in owned.gap_spans)


@pytest.mark.parametrize("seed", range(12))
def test_no_assignment_of_few_matrices_is_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = drawn(rng, 3, [3, 2])
    ways = [
        [each for each in product(range(n + 1), repeat=3) if sum(each) == n] for n in (3, 2)
    ]
    best_s = min(spread_s(problem, np.array(each)) for each in product(*ways))
    found = assigned(problem)
    if found is None:
        assert best_s == inf
        return
    assert found.bound_s <= best_s * (1 + 1e-6)
    assert best_s * (1 - 1e-6) <= found.optimizer_s <= best_s * 1.006


def test_memory_is_kept_and_the_bound_is_near() -> None:
    over = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        problem = drawn(rng, int(rng.integers(2, 9)), [12, 12, 12])
        found = assigned(problem)
        assert found is not None
        stored = problem.numels @ found.numbers + found.cut
        assert (stored <= problem.room * (1 + 1e-6)).all()
        assert (found.numbers.sum(axis=1) == problem.numbers).all()
        busy = (problem.seconds * found.numbers).sum(0) + found.cut * problem.seconds_per_numel
        assert busy.max() <= found.optimizer_s * (1 + 1e-6)
        over.append(found.optimizer_s / found.bound_s)
    assert 1 <= np.median(over) < WITHIN


def owners_of(scenario: Scenario, plan: Plan) -> list[Matrices]:
    """How many matrices of each shape devices have, as the runtime deals them."""
    units = scenario.workload.units
    whole = [is_matched(unit.fqn, plan.whole_matrices or ()) for unit in units]
    layouts, owned = scenario.workload.layouts(), [rank.owned or () for rank in plan.ranks]
    cut = cut_by_shares(layouts, plan.state_shares, whole, owned)
    found = [Matrices() for _ in plan.ranks]
    for layout in (each for each, is_whole in zip(cut, whole, strict=True) if is_whole):
        for shape, rows in zip(layout.param_shapes, layout.cuts(), strict=True):
            [owner] = [i for i, each in enumerate(rows) if each.numel]
            found[owner][shape] += len(shape) == 2
    return [+each for each in found]


@pytest.mark.parametrize("first", one_in(4, range(0, 40, 5)))
def test_plans_fit_with_owners_that_prediction_and_runtime_agree_on(first: int) -> None:
    num_fitting = 0
    for seed in range(first, first + 5):
        cluster, profile, batch = random_case(seed)
        scenario = Scenario(cluster, WORKLOAD, profile)
        demands = Constraints(max_rounds=1, whole_matrices=EVERY_BLOCK)
        try:
            solution = solve(scenario, global_batch_size=batch, constraints=demands)
        except PlanError:
            continue
        num_fitting += 1
        plan = solution.plan
        assert solution.fits
        bound_s, optimizer_s = solution.optimizer_bound_s, solution.predicted.optimizer_s
        assert 0 < bound_s <= optimizer_s * (1 + 1e-6)
        assert 0 < solution.lower_bound_s < solution.predicted.step_time_s
        assert Plan.from_json(plan.to_json()) == plan
        assert "matrices" in str(plan)
        owned = [Matrices({e.shape: e.number for e in rank.owned or ()}) for rank in plan.ranks]
        assert owned == owners_of(scenario, plan)
        for rank, mine, cost in zip(plan.ranks, owned, solution.predicted.ranks, strict=True):
            per_numel_s = profile.device(rank.device.kind).optimizer_seconds_per_element
            expected = matrices_s(profile, WORKLOAD, rank.device.kind, mine)
            assert cost.optimizer_s == pytest.approx(expected + per_numel_s * cost.stored_numel)
    assert num_fitting


def test_a_plan_without_owners_is_written_without_them() -> None:
    text = Plan.even(2, microbatch_size=1).to_json()
    assert "whole_matrices" not in text
    assert "owned" not in text


def test_owners_of_another_model_are_refused() -> None:
    layouts = WORKLOAD.layouts()
    owned = [[Owned(shape=(3, 5), number=2)], []]
    with pytest.raises(ValueError, match=r"own 2 parameters of shape \(3, 5\)"):
        cut_by_shares(layouts, [0.5, 0.5], [True] * len(layouts), owned)


def test_stages_have_owners_that_prediction_agrees_on() -> None:
    scenario = derived(cluster_of(CARDS[:1] * 2, CARDS[2:]))
    demands = Constraints(whole_matrices=EVERY_BLOCK, may_keep_inputs_on_host=True)
    found = find_pipeline(
        scenario,
        global_batch_size=8,
        smaller=partial(part_of, scenario),
        max_stages=2,
        constraints=demands,
        needs_all=True,
    )
    assert found is not None
    plan, price = found.plan, price_of(found.plan, scenario)
    assert plan.whole_matrices == EVERY_BLOCK
    assert price.step_time_s == pytest.approx(found.step_time_s)
    assert all(rank.fits for rank in price.ranks)
    owned = [sum(each.number for each in rank.owned or ()) for rank in plan.ranks]
    blocks = [unit for unit in scenario.workload.units if is_matched(unit.fqn, EVERY_BLOCK)]
    kinds = map(scenario.workload.kind_of, blocks)
    assert sum(owned) == sum(len(trained_matrices(kind)) for kind in kinds)
    for rank, number, cost in zip(plan.ranks, owned, price.ranks, strict=True):
        device = scenario.profile.device(rank.device.kind)
        of_rows_s = device.optimizer_seconds_per_element * cost.stored_numel
        assert bool(number) == (cost.optimizer_s > of_rows_s * (1 + 1e-9))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"may_keep_optimizer_on_host": True}, "optimizers on hosts"),
        ({"equal": [(0, 1)]}, "equal devices"),
        ({"limits": {0: DeviceLimits(state_share=0.3)}}, "exact shares of the state"),
    ],
)
def test_what_owners_are_not_chosen_with_is_refused(asked: dict[str, Any], said: str) -> None:
    cluster, profile, batch = random_case(3)
    demands = Constraints(whole_matrices=EVERY_BLOCK, **asked)
    with pytest.raises(ValueError, match=f"together with {said} is not planned for"):
        solve(
            Scenario(cluster, WORKLOAD, profile), global_batch_size=batch, constraints=demands
        )


def test_owners_keep_limits_and_batches_make_room_for_them() -> None:
    """Cut by rows the state of case 3 fills the devices beside the fastest batches."""
    cluster, profile, batch = random_case(3)
    scenario = Scenario(cluster, WORKLOAD, profile)
    limits = {0: DeviceLimits(max_state_share=0.1, rank_batch_size=2)}
    demands = Constraints(whole_matrices=EVERY_BLOCK, limits=limits)
    solution = solve(scenario, global_batch_size=batch, constraints=demands)
    first = solution.plan.ranks[0]
    assert solution.fits
    assert first.rank_batch_size * solution.plan.num_rounds == 2
    assert solution.predicted.ranks[0].stored_numel <= 0.1 * WORKLOAD.numel
