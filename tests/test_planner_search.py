"""The search finds what exhaustive search finds, and its bound is true where it stops early."""

from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from shardhet.planner.problem.problem import Group, Limits, Problem, fill_level
from shardhet.planner.search.exact import best_choice, is_small
from shardhet.planner.search.few import are_few, that_add_up
from shardhet.planner.search.oracle import Oracle
from shardhet.planner.search.search import (
    DEFAULT_EFFORT,
    Effort,
    Found,
    NothingFitsError,
    _Search,
    search,
)
from tests.planning_problems import SEARCHED, BruteForce, random_problem, recomputed_objective
from tests.recorded_plans import SEEDS, record_of, recorded
from tests.selection import one_in

NUM_BLOCKS, PROBLEMS_PER_BLOCK = 3, 100


def random_small(rng: np.random.Generator, i: int, *, differ: bool = False) -> Problem:
    num_groups = int(rng.integers(2, 5))
    return random_problem(
        rng,
        num_groups=num_groups,
        num_devices=int(rng.integers(num_groups, 6 if differ else 7)),
        global_batch_size=int(rng.integers(4, 14 if differ else 25)),
        memory_binds=i % 2 == 0,
        num_phases=1 if i % 3 == 0 else 2,
        counts_optimizer=i % 5 > 0,
        optimizers_differ=differ,
    )


def check_of_all(problem: Problem, found: Found) -> None:
    """The best of all choices, if they are few, is as good, and so are the next ones."""
    of_all = search(problem)
    assert of_all.value.objective_s == pytest.approx(found.value.objective_s, rel=1e-9)
    assert of_all.relative_gap <= 1e-9
    least_s = of_all.value.objective_s
    for choices in of_all.runners_up:
        value = problem.evaluate(choices)
        assert value is not None
        assert value.objective_s >= least_s
        least_s = value.objective_s


@pytest.mark.parametrize("differ", one_in(2, [False, True]))
@pytest.mark.parametrize("block", one_in(NUM_BLOCKS, range(NUM_BLOCKS)))
def test_the_search_equals_brute_force(block: int, differ: bool) -> None:
    """``differ``: optimizers of one device do, as on the device and on its host."""
    rng = np.random.default_rng(block)
    num_solved = num_few = 0
    number = PROBLEMS_PER_BLOCK // (3 if differ else 1)  # these have many combinations
    for i in range(number):
        problem = random_small(rng, i, differ=differ)
        try:
            found = search(problem, SEARCHED)
        except NothingFitsError:
            assert not BruteForce(problem, np.inf).was_reached
            with pytest.raises(NothingFitsError):
                search(problem)
            continue
        num_solved += 1
        num_few += are_few(problem, DEFAULT_EFFORT.most_choices)
        check_of_all(problem, found)
        objective = found.value.objective_s
        choices = [(each.group, each.candidate, each.count) for each in found.choices]
        assert recomputed_objective(problem, choices) == pytest.approx(objective, rel=1e-9)
        brute = BruteForce(problem, objective * (1 + 1e-7))
        assert brute.was_reached
        assert brute.best == pytest.approx(objective, rel=1e-9)
        assert found.relative_gap <= 1e-9
    assert num_solved > 0.9 * number
    assert num_few > 0  # others have more than can be looked at


@pytest.mark.parametrize("stride", one_in(2, [12, 1]))
def test_objectives_are_those_that_were_recorded(stride: int) -> None:
    """Of 240; ``python -m tests.recorded_plans`` writes all anew."""
    by_seed = {each.seed: each for each in recorded()}
    assert list(by_seed) == list(SEEDS)
    for seed in SEEDS[::stride]:
        found, before = record_of(seed), by_seed[seed]
        assert found.lower_bound_s == pytest.approx(before.lower_bound_s, rel=1e-9)
        # Equal objectives, but shares of other assignments round to other rows.
        assert found.step_time_s == pytest.approx(before.step_time_s, rel=1e-6)


@pytest.mark.campaign  # the other comparison stays
def test_the_search_equals_brute_force_where_devices_recompute_different_parts() -> None:
    num_partial = 0
    for seed in range(60):
        rng = np.random.default_rng([seed, 4])
        problem = random_problem(
            rng,
            num_groups=2,
            num_devices=3,
            global_batch_size=int(rng.integers(12, 25)),
            memory_binds=seed % 4 > 0,
            num_parts=3,
        )
        try:
            found = search(problem, SEARCHED)
        except NothingFitsError:
            assert not BruteForce(problem, np.inf).was_reached
            continue
        check_of_all(problem, found)
        objective = found.value.objective_s
        assert found.relative_gap <= 1e-9
        brute = BruteForce(problem, objective * (1 + 1e-7))
        assert brute.best == pytest.approx(objective, rel=1e-9)
        _, first_s, _, last_s = found.value.phases_s
        num_partial += first_s > last_s * (1 + 1e-9)
    assert num_partial > 5


def test_choices_of_many_devices_are_not_listed() -> None:
    fixed = Group(2000, np.array([1]), np.array([[1.0]]), np.array([9.0]), 1.0)
    free = Group(3, np.array([2, 1]), np.array([[2.0, 1.0]]), np.array([3.0, 4.0]), 1.0)
    problem = Problem((fixed, free.sorted()[0]), 2004, 5.0)
    assert not are_few(problem, DEFAULT_EFFORT.most_choices)
    assert search(problem).relative_gap <= 1e-9
    assert are_few(replace(problem, groups=problem.groups[1:]), DEFAULT_EFFORT.most_choices)
    batch = np.arange(1, 41)  # three devices have 11,480 choices of these
    several = Group(3, batch, np.array([1.0 * batch]), 1.0 * batch[::-1], 1.0)
    assert not are_few(Problem((several,), 60, 5.0), DEFAULT_EFFORT.most_choices)


def test_candidates_that_no_others_complete_to_the_batch_are_left_out() -> None:
    rng, num_left_out = np.random.default_rng(9), 0
    for _ in range(8):
        problem = random_problem(
            rng, num_groups=3, num_devices=4, global_batch_size=8, memory_binds=False
        )
        groups = [replace(e, batch=e.batch * int(rng.integers(1, 5))) for e in problem.groups]
        kept = that_add_up(replace(problem, groups=tuple(groups)))
        sums = [
            [*combinations_with_replacement(sorted(set(each.batch.tolist())), each.count)]
            for each in groups
        ]
        meeting = [
            each for each in product(*sums) if sum(map(sum, each)) == problem.global_batch_size
        ]
        for g, group in enumerate(groups):
            used = {b for each in meeting for b in each[g]}
            assert {*group.batch[kept[g]].tolist()} == used
            num_left_out += len(kept[g]) < len(group.batch)
    assert num_left_out > 2


def test_sets_of_many_equal_devices_are_searched_by_their_sums() -> None:
    """No multiple of 129 and 128 but that of 128 is the batch."""

    def of(members: int) -> Group:
        batch = np.repeat(np.arange(50), 4)
        room = 1e3 - batch - np.tile(np.arange(4), 50)
        costs = np.array([batch + 0.1, batch * (1.2 + np.tile(np.arange(4), 50))])
        return Group(1, members * batch, costs, room, 1.0, members).sorted()[0]

    found = search(Problem((of(129), of(128), of(128)), 4096, 5.0))
    batches = [
        of(n).batch[each.candidate]
        for n, each in zip((129, 128, 128), found.choices, strict=True)
    ]
    assert batches == [0, 2048, 2048]
    with pytest.raises(NothingFitsError):
        search(Problem((of(129), of(128), of(128)), 4097 + 128 * 129, 5.0))


def test_the_dynamic_programme_is_asked_up_to_its_limit() -> None:
    group = Group(10, np.array([99]), np.array([[1.0]]), np.array([1.0]), 1.0)
    assert [is_small(Problem((group,), batch, 5.0)) for batch in (99, 100)] == [True, False]


def test_no_choice_has_a_phase_below_the_least_that_speeds_allow() -> None:
    rng = np.random.default_rng(7)
    closest = 0.0
    for i in range(60):
        problem = random_small(rng, i)
        for d, least_s in enumerate(problem.least_phases_s()):
            # The fastest in one phase alone, whatever the others take.
            limits = [np.inf] * problem.num_phases
            for limit in np.unique(problem.costs[d]):
                limits[d] = float(limit)
                if best_choice(problem, Limits(tuple(limits))) is not None:
                    break
            assert limits[d] >= least_s * (1 - 1e-12)
            closest = max(closest, least_s / limits[d])
    assert closest > 0.9


def test_a_search_that_stops_early_states_a_true_bound() -> None:
    gaps = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        problem = random_problem(
            rng, num_groups=4, num_devices=14, global_batch_size=70, memory_binds=True
        )
        best = search(problem)
        assert best.relative_gap <= 1e-9
        early = search(problem, Effort(relative_gap=0.2))
        hurried = search(problem, Effort(max_scanned=1, max_exact_additions=0))
        for found in (early, hurried):
            assert found.lower_bound_s <= best.value.objective_s * (1 + 1e-9)
            assert found.value.objective_s >= best.value.objective_s * (1 - 1e-9)
        assert early.relative_gap <= 0.2 + 1e-9
        gaps += [early.relative_gap, hurried.relative_gap]
    assert max(gaps) > 0.001


def test_the_bound_on_the_optimizer_is_near_the_least_that_fits() -> None:
    problem = random_problem(
        np.random.default_rng(3),
        num_groups=3,
        num_devices=6,
        global_batch_size=20,
        memory_binds=True,
        counts_optimizer=True,
    )
    asked = _Search(problem, DEFAULT_EFFORT)
    endless = Limits((np.inf,) * problem.num_phases)
    low, high = 0.0, 1e6
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        fits = asked.fits(replace(endless, optimizer_s=middle))
        low, high = (low, middle) if fits else (middle, high)
    for known in (0.0, 0.6):
        bound_s = asked.least_optimizer_s(
            replace(endless, optimizer_s=1.5 * high), known * high
        )
        assert 0.9 * high <= bound_s <= high
    assert asked.least_optimizer_s(replace(endless, optimizer_s=1.5 * high), high) == high


def test_the_same_problem_gives_the_same_choices() -> None:
    problem = random_small(np.random.default_rng(3), 0)
    assert search(problem, SEARCHED) == search(problem, SEARCHED)
    assert search(problem) == search(problem)


def test_the_relaxation_never_denies_what_the_dynamic_programme_finds() -> None:
    rng = np.random.default_rng(11)
    outcomes = set()
    for i in range(200):
        problem = random_small(rng, i)
        phases_s = tuple(
            float(np.quantile(cost[np.isfinite(cost)], rng.uniform(0.05, 1)))
            for cost in problem.costs
        )
        limits = Limits(phases_s)
        choices = best_choice(problem, limits)
        room = -np.inf
        if choices is not None:
            room = sum(problem.room[c.group, c.candidate] * c.count for c in choices)
        fits = bool(room >= problem.state_numel)
        oracle = Oracle(problem)
        constructed = oracle.construct(limits)
        outcomes.add((fits, oracle.is_feasible(limits), constructed is not None))
    assert (True, False, False) not in outcomes
    assert (True, False, True) not in outcomes
    assert all(fits for fits, _, was_constructed in outcomes if was_constructed)
    assert (True, True, True) in outcomes
    assert (False, False, False) in outcomes


def test_a_level_fills_exactly_what_is_demanded() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        size = int(rng.integers(1, 6))
        room = rng.uniform(0, 10, size) * (rng.random(size) < 0.8)
        rate = np.where(rng.random(size) < 0.2, np.inf, rng.uniform(0.1, 3, size))
        number = rng.integers(1, 4, size).astype(float)
        demand = rng.uniform(0, 1.1) * float(number @ room)
        level = fill_level(room, rate, number, demand)
        if float(number @ room) < demand:
            assert level == np.inf
            continue
        with np.errstate(invalid="ignore"):
            reached = np.where(np.isinf(rate), room, np.minimum(room, level * rate))
        if level > 0:
            assert float(number @ reached) == pytest.approx(demand)
        else:
            assert float(number @ reached) >= demand


def test_devices_that_can_do_nothing_else_are_left_out() -> None:
    slow = Group(2, np.array([0, 1]), np.array([[0.0, 9.0]]), np.array([0.0, 0.0]), 0.0)
    fast = Group(1, np.array([0, 3, 4]), np.array([[0.0, 3.0, 4.0]]), np.full(3, 5.0), 0.0)
    problem = Problem((slow.sorted()[0], fast.sorted()[0]), 4, 5.0)
    for effort in (SEARCHED, DEFAULT_EFFORT):
        found = search(problem, effort)
        assert found.value.objective_s == 4.0
        assert [(each.group, each.count) for each in found.choices] == [(0, 2), (1, 1)]


def test_a_limit_of_no_time_for_the_optimizer_leaves_room_where_it_takes_none() -> None:
    room = np.array([3.0, 3.0])
    free, paid = (
        Group(1, np.array([0, 1]), np.array([[0.0, 9.0]]), room, seconds)
        for seconds in (0.0, 2.0)
    )
    problem = Problem((free.sorted()[0], paid.sorted()[0]), 2, 1.0)
    for optimizer_s, expected in ((0.0, [3.0, 0.0]), (2.0, [3.0, 1.0]), (np.inf, [3.0, 3.0])):
        found = problem.room_within(Limits(phases_s=(9.0,), optimizer_s=optimizer_s))
        assert found[:, 0].tolist() == expected
