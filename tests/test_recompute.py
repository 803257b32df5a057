"""What devices may recompute: nested parts of the model, named exactly."""

from fnmatch import fnmatchcase

import pytest

from shardhet.planner.candidates.recompute import recompute_choices
from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
from shardhet.records.plan import EVERY_UNIT, RankPlan
from shardhet.records.workload import Workload
from tests.test_planner import random_case


def model_of(num_layers: int) -> CostModel:
    cluster, profile, _ = random_case(0)
    workload = Workload.transformer(
        num_layers=num_layers, width=32, num_heads=2, seq_len=16, vocab_size=64, hidden_width=64
    )
    return CostModel(Scenario(cluster, workload, profile))


def recomputed(model: CostModel, patterns: tuple[str, ...]) -> list[str]:
    rank = RankPlan(microbatch_sizes=(), state_share=0.0, recomputed_units=patterns)
    return [unit.fqn for unit in model.visited_units if rank.recomputes(unit.fqn)]


@pytest.mark.parametrize("num_layers", [1, 2, 3, 10, 26, 100, 111])
def test_every_choice_adds_the_units_that_run_next(num_layers: int) -> None:
    model = model_of(num_layers)
    choices = recompute_choices(model, 4)
    assert choices[0] == ()
    assert choices[-1] == EVERY_UNIT
    before: set[str] = set()
    for patterns in choices[1:]:
        units = set(recomputed(model, patterns))
        assert units > before
        numbers = sorted(int(each.split(".")[1]) for each in units if "." in each)
        assert numbers == list(range(len(numbers)))
        before = units
    counts = {sum("." in each for each in recomputed(model, c)) for c in choices}
    assert counts == {-(-num_layers * step // 4) for step in range(5)}


def test_a_part_is_named_by_few_patterns() -> None:
    assert ("blocks.[0-9]", "blocks.1[0-2]") in [
        tuple(each for each in patterns if "blocks" in each)
        for patterns in recompute_choices(model_of(26), 2)
    ]


def test_names_that_patterns_cannot_tell_apart_are_spelled_out() -> None:
    from dataclasses import replace

    model = model_of(4)
    units = tuple(
        replace(unit, fqn=unit.fqn.replace("blocks.3", "blocks.x.3"))
        for unit in model.workload.units
    )
    scenario = replace(model.scenario, workload=replace(model.workload, units=units))
    model = CostModel(scenario)
    for patterns in recompute_choices(model, 4):
        matched = {u.fqn for u in units if any(fnmatchcase(u.fqn, each) for each in patterns)}
        assert len([fqn for fqn in matched if "blocks" in fqn]) in range(5)
        if "blocks.x.3" in matched:
            assert {"blocks.0", "blocks.1", "blocks.2"} <= matched
