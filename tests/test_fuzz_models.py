"""Random graphs of units under random plans: exact, or refused by name; never wrong.

The campaign in experiments/fuzz runs thousands of what runs here in small.
"""

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardhet import Plan
from tests.fuzzing.campaign import Court
from tests.fuzzing.drawing import draw_case
from tests.fuzzing.judge import Verdict
from tests.fuzzing.shapes import REFUSABLE, FuzzCase, ModelShape, StepShape, UnitShape
from tests.selection import one_in

NUM_CASES, CASES_PER_BLOCK = 60, 5


@pytest.fixture(scope="module")
def court() -> Iterator[Court]:
    court = Court()
    yield court
    court.close()


@pytest.mark.parametrize("block", one_in(12, range(NUM_CASES // CASES_PER_BLOCK)))
def test_a_drawn_model_is_exact_or_refused(court: Court, block: int) -> None:
    for seed in range(block * CASES_PER_BLOCK, (block + 1) * CASES_PER_BLOCK):
        case = draw_case(seed)
        judgement, _ = court.judge(case)
        assert not judgement.is_fault, f"{judgement}\n{case}"
        assert judgement.verdict is not Verdict.INVALID, f"{judgement}\n{case}"


def _plain_case() -> FuzzCase:
    """Two ranks, several microbatches, no odd trait."""
    plan = Plan.by_hand(
        microbatch_sizes=[2, 1], rank_batch_sizes=[3, 2], state_shares=[0.5, 0.5]
    )
    units = (UnitShape(), UnitShape(core="attention"))
    return FuzzCase(
        seed=1,
        world_size=2,
        model=ModelShape(units=units, order=(0, 1, 0), mask="causal", tied="head"),
        plan=plan,
        steps=(StepShape(sizes=(3, 2), length=4),) * 2,
    )


def test_plain_models_are_exact(court: Court) -> None:
    case = _plain_case()
    frozen = replace(case, model=replace(case.model, frozen=("blocks.0",), tied="blocks"))
    for each in (case, frozen):
        judgement, _ = court.judge(each)
        assert judgement.verdict is Verdict.EXACT, judgement.reason


def test_a_difference_is_a_wrong_case(court: Court) -> None:
    """Another seed of dropout than the reference's stands for any wrong number."""
    case = _plain_case()
    units = (UnitShape(dropout=0.5), *case.model.units[1:])
    case = replace(case, model=replace(case.model, units=units), options={"seed": 3})
    judgement, _ = court.judge(case)
    assert judgement.verdict is Verdict.EXACT, judgement.reason
    broken = replace(case, options=_OtherSeedOnce(seed=3))
    judgement, _ = court.judge(broken)
    assert judgement.verdict is Verdict.WRONG, judgement
    assert "loss of step 0" in judgement.reason


class _OtherSeedOnce(dict):  # type: ignore[type-arg]
    """Options that tell the reference another seed than HetFSDP."""

    def get(self, key: str, default: object = None) -> object:
        return 4 if key == "seed" else super().get(key, default)


def test_the_same_seed_is_the_same_case() -> None:
    for seed in range(40):
        assert pickle.dumps(draw_case(seed)) == pickle.dumps(draw_case(seed))


def test_every_refusable_trait_is_drawn() -> None:
    found = set().union(*(draw_case(seed).traits() for seed in range(2000)))
    assert found >= REFUSABLE
