"""HiGHS and the search say the same."""

import numpy as np
import pytest

from experiments.planner import certificate
from experiments.planner.certificate import certify
from shardhet.planner.problem.problem import Problem
from shardhet.planner.search.search import NothingFitsError, search
from tests.planning_problems import SEARCHED, random_problem, recomputed_objective
from tests.recorded_plans import SEEDS, record_of, recorded
from tests.selection import one_in, only


def random_medium(i: int) -> Problem:
    """Of other seeds, sizes and parts than those that are compared with exhaustive search."""
    rng = np.random.default_rng([i, 31])
    num_groups = int(rng.integers(2, 6))
    return random_problem(
        rng,
        num_groups=num_groups,
        num_devices=int(rng.integers(num_groups, 9)),
        global_batch_size=int(rng.integers(6, 33)),
        memory_binds=i % 2 == 0,
        num_phases=1 if i % 3 == 0 else 2,
        num_parts=2 if i % 3 == 2 else 1,
        counts_optimizer=i % 5 > 0,
    )


@pytest.mark.parametrize("block", only([10], range(20)))
def test_highs_alone_finds_what_the_search_finds(block: int) -> None:
    for i in range(block * 2, block * 2 + 2):
        problem = random_medium(i)
        try:
            found = search(problem, SEARCHED)
        except NothingFitsError:
            assert certify(problem).objective_s is None
            continue
        certified = certify(problem)
        assert certified.is_solved
        assert certified.agrees_with(found.value.objective_s), certified
        triples = [(each.group, each.candidate, each.count) for each in certified.choices]
        assert recomputed_objective(problem, triples) == pytest.approx(certified.objective_s)


def test_what_is_too_large_for_highs_alone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "MAX_VARIABLES", 1)
    assert certify(random_medium(0)).bound_s is None


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
