"""The search finds what exhaustive search finds, and its bound is true where it stops early."""

from dataclasses import replace

import numpy as np
import pytest

from shardhet.planner.problem.problem import Group, Limits, Problem
from shardhet.planner.search.exact import is_small
from shardhet.planner.search.few import are_few
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
    min_s = of_all.value.objective_s
    for choices in of_all.runners_up:
        value = problem.evaluate(choices)
        assert value is not None
        assert value.objective_s >= min_s
        min_s = value.objective_s


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
