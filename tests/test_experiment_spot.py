"""The replay of comings and goings: what counts, what is lost, what is waited for."""

from dataclasses import replace

import pytest

from experiments.recovery.spot.replay import (
    Course,
    Event,
    Pace,
    Policy,
    Restart,
    events_of,
    ideal,
    merged,
    replay,
)

RESTART = Restart(noticed_s=8.0, started_s=12.0)
STATE_BYTES = 600
REPLICAS = Policy(
    name="replicas",
    has_replicas=True,
    checkpoint_every_s=1000.0,
    link_bytes_per_s=1e12,
    store_bytes_per_s=60.0,
)
USUAL = replace(REPLICAS, has_replicas=False)


def pace(names: str) -> Pace:
    """Each node adds as much; the state is shared evenly."""
    sizes = {name: STATE_BYTES // len(names) for name in names}
    return Pace(10.0 / len(names) if len(names) > 1 else float("inf"), sizes)


PACES = {frozenset(names): pace(names) for names in ("abcd", "abc", "ab", "a")}


def event(at_s: float, added: str = "", removed: str = "") -> Event:
    return Event(at_s, frozenset(added), frozenset(removed))


def course(policy: Policy, *events: Event, until_s: float = 500.0) -> Course:
    return replay(events, until_s, PACES, policy, RESTART, STATE_BYTES)


def test_a_trace_is_read_by_moments() -> None:
    lines = ["0,add,n1", "0,add,n2", "1500,remove,n1", ""]
    found = events_of(lines, "p3-")
    assert found == [
        Event(0.0, frozenset({"p3-n1", "p3-n2"}), frozenset()),
        Event(1.5, frozenset(), frozenset({"p3-n1"})),
    ]
    both = merged([found, [event(1.5, "x")], [event(99.0, "y")]], until_s=50.0)
    assert both[1] == Event(1.5, frozenset("x"), frozenset({"p3-n1"}))
    assert len(both) == 2


def test_without_events_only_the_first_start_is_missing() -> None:
    start = event(0.0, "abcd")
    found = course(USUAL, start)
    assert found.work == pytest.approx((500 - 12) / 2.5)
    assert (found.lost, found.down_s, found.from_store) == (0, 12, 0)
    assert ideal([start], 500.0, PACES) == pytest.approx(200)


def test_a_lost_node_costs_one_step_with_replicas_and_more_without() -> None:
    events = event(0.0, "abcd"), event(112.0, removed="d")
    ours, usual = course(REPLICAS, *events), course(USUAL, *events)
    assert ours.lost == pytest.approx(1)
    assert ours.from_store == 0
    assert ours.down_s == pytest.approx(12 + 8 + 12, abs=0.01)
    assert ours.work == pytest.approx(40 - 1 + (500 - 132) / (10 / 3), abs=0.01)
    assert usual.lost == pytest.approx(40)
    assert usual.from_store == 1
    assert usual.down_s == pytest.approx(12 + 8 + 12 + STATE_BYTES / 60)


def test_two_nodes_at_once_may_take_a_share_along() -> None:
    found = course(REPLICAS, event(0.0, "abcd"), event(112.0, removed="cd"))
    assert found.from_store == 1
    assert found.lost == pytest.approx(40)


def test_a_second_loss_before_the_first_step_is_of_the_same_replica() -> None:
    one_by_one = event(0.0, "abcd"), event(112.0, removed="d"), event(115.0, removed="c")
    assert course(REPLICAS, *one_by_one).from_store == 1
    later = event(0.0, "abcd"), event(112.0, removed="d"), event(200.0, removed="c")
    assert course(REPLICAS, *later).from_store == 0


def test_a_node_that_comes_loses_nothing_and_a_single_one_cannot_train() -> None:
    joined = course(USUAL, event(0.0, "abc"), event(100.0, "d"))
    assert joined.lost == 0
    assert joined.work == pytest.approx((100 - 12) / (10 / 3) + (400 - 12 - 10) / 2.5)
    left_alone = course(USUAL, event(0.0, "abc"), event(100.0, removed="bc"))
    assert (left_alone.work, left_alone.restarts) == (0, 1)


def test_checkpoints_are_written_in_time() -> None:
    often = replace(USUAL, checkpoint_every_s=30.0)
    found = course(often, event(0.0, "abcd"), event(112.0, removed="d"))
    assert found.lost == pytest.approx(10 / 2.5)  # the last one was after 90 s of training
