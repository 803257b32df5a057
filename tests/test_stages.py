"""Stages of a pipeline: plans, the order in which they take rounds, and who refuses them."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardhet.pricing.cost import CostModel
from shardhet.records.ops import StageTransfer, intervals, messages_between, phases_of
from shardhet.records.plan import Plan, PlannedUnit
from shardhet.records.schedule import Phase, RoundPhase, one_forward_one_backward
from shardhet.records.stages import Stage, rounds_in_flight, stage_by_unit
from tests.test_overlap import _scenario_of

FIRST = Stage(units=("embedding", "blocks.[01]"), num_ranks=2)
LAST = Stage(units=("blocks.2", "head"), num_ranks=1)
UNITS = ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")


def in_stages(**changes: Any) -> Plan:
    given = {
        "microbatch_sizes": [3, 1, 2],
        "rank_batch_sizes": [3, 1, 4],
        "state_shares": [0.7, 0.3, 1.0],
        "num_rounds": 3,
        "stages": [FIRST, LAST],
    }
    return Plan.by_hand(**(given | changes))


def test_a_sample_counts_once_within_the_stage_of_a_rank() -> None:
    plan = in_stages(global_batch_size=9)
    assert (plan.round_size, plan.global_batch_size, plan.last_round_size) == (4, 9, 1)
    assert plan.groups == (range(2), range(2, 3))
    assert [plan.first_sample(i) for i in range(3)] == [0, 3, 0]
    assert plan.sample_indices(0) == [0, 1, 2, 4, 5, 6, 8]
    assert plan.sample_indices(1) == [3, 7]
    assert plan.sample_indices(2) == list(range(9))
    assert plan.sample_indices(2, num_samples=5) == list(range(5))
    assert plan.last_microbatch_sizes(2) == (1,)
    assert plan.state_shares == (0.7, 0.3, 1.0)


def test_shares_that_nobody_states_are_even_within_each_stage() -> None:
    assert in_stages(state_shares=None).state_shares == (0.5, 0.5, 1.0)


def test_a_plan_with_stages_survives_the_way_to_a_file(tmp_path: Path) -> None:
    plan = in_stages(stages=[FIRST, replace(LAST, in_flight=1)])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    without = Plan.even(2, microbatch_size=1)
    assert "stages" not in json.loads(without.to_json())


def stage(units: str, num_ranks: int, in_flight: int | None = None) -> Stage:
    return Stage(units=tuple(units.split()), num_ranks=num_ranks, in_flight=in_flight)


REFUSED: dict[str, tuple[Callable[[], Plan], str]] = {
    "no units": (lambda: in_stages(stages=[stage("", 2), LAST]), r"stages\[0\] has units \[\]"),
    "no ranks": (lambda: in_stages(stages=[FIRST, stage("a", 0), LAST]), "num_ranks 0"),
    "nothing in flight": (lambda: in_stages(stages=[FIRST, stage("a", 1, 0)]), "in_flight 0"),
    "too few ranks": (lambda: in_stages(stages=[FIRST]), r"\[2\] devices.* plan has 3"),
    "rounds of unlike size": (
        lambda: in_stages(rank_batch_sizes=[3, 2, 4]),
        r"compute \[5, 4\] samples in a round",
    ),
    "shares over all": (
        lambda: in_stages(state_shares=[0.5, 0.2, 0.3]),
        r"stages\[0\] sum to 0.7 but must sum to 1",
    ),
    "growing in flight": (
        lambda: in_stages(stages=[replace(FIRST, in_flight=1), replace(LAST, in_flight=2)]),
        r"\[1, 2\] rounds in flight",
    ),
    "a unit in no stage": (
        lambda: replace(in_stages(), units=planned(*UNITS, "norm")),
        "unit 'norm' is in no stage",
    ),
    "a unit in two stages": (
        lambda: replace(
            in_stages(stages=[FIRST, stage("blocks.* head", 1)]), units=planned(*UNITS)
        ),
        r"unit 'blocks.0' is in stages \[0, 1\]",
    ),
    "a stage without a unit": (
        lambda: replace(in_stages(), units=planned(*UNITS[:3])),
        r"stages\[1\] has units \['blocks.2', 'head'\], which are those of no unit",
    ),
    "stages for other devices": (
        lambda: Plan.by_hand(
            microbatch_sizes=[1, 3, 4], stages=[FIRST, replace(LAST, num_ranks=2)]
        ),
        "4 in all, but the plan has 3",
    ),
}


def planned(*fqns: str) -> tuple[PlannedUnit, ...]:
    return tuple(PlannedUnit(fqn=fqn, numel=8) for fqn in (*fqns, ""))


@pytest.mark.parametrize("fault", REFUSED)
def test_stages_that_cannot_run_are_refused_with_what_is_wrong(fault: str) -> None:
    make, message = REFUSED[fault]
    with pytest.raises(ValueError, match=f"plan: .*{message}"):
        make()


def test_growing_in_flight_beyond_the_rounds_does_not_matter() -> None:
    stages = [replace(FIRST, in_flight=2), replace(LAST, in_flight=5)]
    assert rounds_in_flight(in_stages(num_rounds=2, stages=stages).stages or (), 2) == (2, 2)


def test_units_are_dealt_to_stages_by_patterns() -> None:
    assert list(stage_by_unit([FIRST, LAST], UNITS).values()) == [0, 0, 0, 1, 1]


# Who refuses them


def test_prices_of_one_stage_refuse_several() -> None:
    scenario = _scenario_of(Plan.by_hand(microbatch_sizes=[1, 1, 1]), 0.1)
    with pytest.raises(ValueError, match="cost model: the plan has 2 stages"):
        CostModel(scenario).predict(in_stages())


# The order of rounds


def test_one_forward_one_backward() -> None:
    def written(num_rounds: int, in_flight: int) -> str:
        order = one_forward_one_backward(num_rounds, in_flight)
        return " ".join(f"{phase.value[0].upper()}{i}" for i, phase in order)

    assert written(4, 2) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert written(3, 1) == "F0 B0 F1 B1 F2 B2"
    assert written(2, 5) == "F0 F1 B0 B1"


def completes(orders: list[tuple[RoundPhase, ...]]) -> bool:
    """Whether stages that wait for each other's rounds come to their ends."""
    done = [0] * len(orders)
    finished: set[tuple[int, RoundPhase]] = set()
    is_moving = True
    while is_moving:
        is_moving = False
        for i, order in enumerate(orders):
            if done[i] == len(order):
                continue
            turn = order[done[i]]
            other = i - 1 if turn.phase is Phase.FORWARD else i + 1
            if other in (-1, len(orders)) or (other, turn) in finished:
                finished.add((i, turn))
                done[i] += 1
                is_moving = True
    return done == [len(order) for order in orders]


@given(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_pipeline_completes_iff_rounds_in_flight_do_not_grow(
    num_rounds: int, in_flight: list[int]
) -> None:
    orders = [one_forward_one_backward(num_rounds, each) for each in in_flight]
    capped = [min(each, num_rounds) for each in in_flight]
    assert completes(orders) == all(a >= b for a, b in pairwise(capped))
    for order, most in zip(orders, capped, strict=True):
        assert sorted(order, key=str) == sorted(
            [RoundPhase(i, phase) for i in range(num_rounds) for phase in Phase], key=str
        )
        open_rounds, largest = 0, 0
        for _, phase in order:
            open_rounds += 1 if phase is Phase.FORWARD else -1
            largest = max(largest, open_rounds)
        assert largest == most


def messages_of(
    stage: int, in_flight: Sequence[int], num_rounds: int, *, in_one_order: bool
) -> list[StageTransfer]:
    """The messages of a stage in the order of launching; checks what a phase needs."""
    launched: list[StageTransfer] = []
    has_room: set[StageTransfer] = set()
    phases = phases_of(stage, in_flight, num_rounds, in_one_order=in_one_order)
    for of, ready, before, after in phases:
        assert not has_room.intersection(ready)
        has_room.update(ready)
        launched += before
        needed = StageTransfer.to(stage, of)
        if 0 <= needed.stage < len(in_flight) - 1:
            assert needed in launched
            ahead = max(each.of.round for each in has_room if each.of.phase is of.phase)
            assert ahead <= of.round + 1
        assert all(
            each in has_room or each == StageTransfer.by(stage, each.of) for each in launched
        )
        launched += after
    assert len(launched) == len(set(launched))
    return launched


def complete_in_step(programs: list[list[StageTransfer]]) -> bool:
    """Whether stages that each do one thing at a time, sender and receiver together, end."""
    at = [0] * len(programs)
    while True:
        heads = Counter(p[i] for i, p in zip(at, programs, strict=True) if i < len(p))
        together = {each for each, number in heads.items() if number == 2}
        if not together:
            return not heads
        for stage, program in enumerate(programs):
            at[stage] += at[stage] < len(program) and program[at[stage]] in together


@pytest.mark.parametrize("num_stages", range(1, 5))
def test_messages_in_one_order_need_no_two_at_a_time(num_stages: int) -> None:
    for in_flight in product(range(1, 6), repeat=num_stages):
        if list(in_flight) != sorted(in_flight, reverse=True):
            continue
        for num_rounds in range(1, 8):
            programs, others = (
                [
                    messages_of(stage, in_flight, num_rounds, in_one_order=in_one_order)
                    for stage in range(num_stages)
                ]
                for in_one_order in (True, False)
            )
            assert complete_in_step(programs), (in_flight, num_rounds)
            assert list(map(set, programs)) == list(map(set, others))
            assert sum(map(len, programs)) == 4 * num_rounds * (num_stages - 1)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
)
def test_every_sample_is_handed_over_once(senders: list[int], receivers: list[int]) -> None:
    number = min(sum(senders), sum(receivers))
    messages = messages_between(senders, receivers)
    assert len(messages) <= len(senders) + len(receivers) - 1
    assert sorted(i for each in messages for i in range(*astuple(each.samples))) == list(
        range(number)
    )
    for sender, receiver, part in messages:
        assert intervals(senders)[sender].intersect(part) == part
        assert intervals(receivers)[receiver].intersect(part) == part


def astuple(span: Any) -> tuple[int, int]:
    return span.start, span.stop
