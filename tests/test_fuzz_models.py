"""Random graphs of units under random plans: exact, or refused by name; never wrong.

The campaign in experiments/fuzz runs thousands of what runs here in small.
"""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardhet import Plan
from tests.fuzzing.campaign import Court
from tests.fuzzing.drawing import draw_case
from tests.fuzzing.judge import Verdict
from tests.fuzzing.model import FuzzModel, call_model, loss_of, make_batch
from tests.fuzzing.reference import Reference
from tests.fuzzing.shapes import REFUSABLE, FuzzCase, ModelShape, StepShape, UnitShape
from tests.fuzzing.units import Block
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


def _later_length_is_the_batch() -> FuzzCase:
    case = _plain_case()
    step = case.steps[0]
    model = replace(case.model, mask="computed")
    return replace(case, model=model, steps=(step, replace(step, length=3)))


def _of_unit(unit: UnitShape, *, splits: bool = True, **others: Any) -> FuzzCase:
    """The plain case with one of its units replaced, and recomputation everywhere."""
    case = _plain_case()
    plan = Plan.by_hand(
        microbatch_sizes=[2, 1] if splits else [3, 2],
        rank_batch_sizes=[3, 2],
        state_shares=[0.5, 0.5],
        recompute=[True, True],
    )
    units = (unit, case.model.units[1])
    return replace(case, plan=plan, model=replace(case.model, units=units), **others)


def _of_root(**traits: Any) -> FuzzCase:
    """The plain case with other root code."""
    case = _plain_case()
    return replace(case, model=replace(case.model, **traits))


def _transposed_before_dropout() -> FuzzCase:
    """The unit's output is laid out in another order than its dimensions."""
    case = _of_unit(UnitShape(batch_at=1))
    return replace(case, model=replace(case.model, root_dropout=0.3))


def _short_first_step() -> FuzzCase:
    """At first all samples have equally many targets."""
    case = _of_root(head="mean")
    steps = (replace(case.steps[0], length=1), replace(case.steps[0], length=5))
    return replace(case, steps=steps)


def _tied_to_root() -> FuzzCase:
    case = _plain_case()
    model = replace(case.model, head="outside", tied="root head")
    return replace(case, model=model, options={"units": (Block, "embedding")})


TRAPS = {
    "means of microbatches": _of_unit(UnitShape(aux="mean")),
    "an attribute under recomputation": _of_unit(UnitShape(odd="sets scalar")),
    "a mean over valid tokens": _of_unit(UnitShape(aux="mean of valid")),
    "a sum that is nearly always zero": _of_unit(UnitShape(aux="rare sum")),
    "a length that becomes the batch": _later_length_is_the_batch(),
    "a head of the root tied to a unit": _tied_to_root(),
    "a transposed output before dropout": _transposed_before_dropout(),
    "an attribute of an argument": _of_unit(UnitShape(odd="sets of input")),
    "a frozen parameter read outside": _of_root(
        root="reads parameter of unit", frozen=("blocks",)
    ),
    "a mean beside a sum": _of_root(root="adds a mean"),
    "an attribute that counts": _of_unit(UnitShape(odd="counts")),
    "an attribute of an argument, whole": _of_unit(
        UnitShape(odd="sets of input"), splits=False
    ),
    "a hook on an argument, whole": _of_unit(UnitShape(odd="hook of input"), splits=False),
    "an attribute that counts, whole": _of_unit(UnitShape(odd="counts"), splits=False),
    "a mean over tokens that become valid": _short_first_step(),
    "a sum that is zero, in evaluation": _of_unit(UnitShape(aux="rare sum"), evaluates=True),
}


@pytest.mark.parametrize("trap", one_in(4, TRAPS))
def test_what_has_been_wrong_elsewhere_is_exact_or_refused(court: Court, trap: str) -> None:
    judgement, _ = court.judge(TRAPS[trap])
    assert judgement.verdict in (Verdict.EXACT, Verdict.REFUSED), judgement


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


def test_legal_models_add_up_over_microbatches() -> None:
    """What has to be exact has one meaning only: the reference is the whole batch's step."""
    num_checked = 0
    for seed in range(120):
        case = _without_randomness(draw_case(seed))
        if case.may_be_refused:
            continue
        num_checked += 1
        models = []
        for _ in range(2):
            torch.manual_seed(seed)
            models.append(FuzzModel(case.model).double())
        step = case.steps[0]
        batch = make_batch(case.model, step)
        mean = Reference(models[0], case).train_step(batch, step, 0)
        models[1].num_forwards = 0
        output = call_model(case.model, models[1], batch)
        loss_sum, num_tokens = loss_of(case.model, output, batch)
        (loss_sum / num_tokens).backward()
        assert mean == pytest.approx(float(loss_sum.detach() / num_tokens), rel=1e-12)
        for (fqn, one), other in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            assert (one.grad is None) == (other.grad is None), f"{fqn}\n{case}"
            if one.grad is not None and other.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)
    assert num_checked > 30


def _without_randomness(case: FuzzCase) -> FuzzCase:
    """Without what depends on microbatches by its nature."""
    units = tuple(
        replace(
            unit,
            core="mlp" if unit.core == "batchnorm" else unit.core,
            dropout=0.0,
            is_random=False,
        )
        for unit in case.model.units
    )
    root = "" if case.model.root == "functional dropout" else case.model.root
    return replace(case, model=replace(case.model, units=units, root_dropout=0.0, root=root))
