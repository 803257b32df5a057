"""The harness must never let a broken rank pass, and must say which one broke."""

import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch.distributed as dist

from shardhet.comm.failure import birth
from tests.selection import only, sample
from tests.worlds import (
    patience,
    run_ranks,
    run_ranks_expecting_failure,
    wait_until,
)

FAILED = pytest.fail.Exception


def test_a_sample_of_a_product_holds_every_value() -> None:
    cases = [{"a": a, "b": b, "c": a} for a in range(3) for b in "xy"]
    assert sample(cases) == [0, 3, 4]
    assert sample([{}]) == []
    assert only([2], [1, 2])[1] == 2


def pid(rank: int) -> int:
    return os.getpid()


def raise_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("numels disagree")
    dist.barrier()


def test_the_first_rank_to_fail_is_the_one_reported_and_the_world_is_replaced() -> None:
    before = run_ranks(pid, 2)
    started_at_s = time.monotonic()
    with pytest.raises(FAILED, match=r"(?s)^rank 1 of 2 failed first.*numels disagree"):
        run_ranks(raise_on_rank_one, 2, grace_s=0.5)
    assert (
        time.monotonic() - started_at_s < 10.0 * patience()
    )  # the grace, not the whole timeout
    after = run_ranks(pid, 2)
    assert not set(before) & set(after)
    for killed in before:
        with pytest.raises(ProcessLookupError):
            os.kill(killed, 0)


def raise_in_reverse_order(rank: int) -> None:
    time.sleep(0.2 * (2 - rank))
    raise ValueError(f"this is rank {rank}")


def die_on_rank_zero(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.barrier()


def kill_itself(rank: int) -> None:
    os.kill(os.getpid(), 9)


def leave_quietly(rank: int) -> None:
    raise SystemExit(0)


def exit_with_zero(rank: int) -> None:
    if rank == 1:
        os._exit(0)


def warn_of_the_future(rank: int) -> None:
    warnings.warn("will be removed", FutureWarning, stacklevel=1)


def return_something_that_cannot_travel(rank: int) -> Any:
    return lambda: rank


@pytest.mark.parametrize(
    ("fn", "world_size", "says"),
    [
        (raise_in_reverse_order, 3, r"(?s)^rank 2 of 3 failed first.*this is rank 2"),
        (die_on_rank_zero, 2, r"^ranks died without a traceback; exit codes \{0: 3\}"),
        (kill_itself, 2, r"exit codes \{0: -9, 1: -9\}"),
        (leave_quietly, 2, "SystemExit"),
        (exit_with_zero, 2, r"exit codes \{1: 0\}"),
        (warn_of_the_future, 1, "will be removed"),
        (return_something_that_cannot_travel, 1, "rank 0 of 1 failed first"),
    ],
)
def test_what_a_rank_did_is_said(fn: Any, world_size: int, says: str) -> None:
    with pytest.raises(FAILED, match=says):
        run_ranks(fn, world_size)


def test_a_rank_that_dies_between_cases_is_not_silently_replaced() -> None:
    (idle,) = run_ranks(pid, 1)
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: birth(idle) is None, seconds=5 * patience())
    # Said before the next case, or in it: the fork server learns of the death a moment later.
    with pytest.raises(FAILED, match=r"exit codes \{0: -9\}"):
        run_ranks(pid, 1)
    assert len(run_ranks(pid, 1)) == 1


def raise_everywhere_but_on_rank_two(rank: int) -> str:
    if rank == 2:
        return "fine"
    raise KeyError(f"rank {rank}")


def test_expected_failures_are_told_rank_by_rank() -> None:
    outcomes = run_ranks_expecting_failure(raise_everywhere_but_on_rank_two, 3)
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2]
    assert [outcome.exception_name for outcome in outcomes] == ["KeyError", "KeyError", None]
    assert [outcome.message for outcome in outcomes] == ["'rank 0'", "'rank 1'", ""]
    assert outcomes[2].value == "fine"
    assert outcomes[2].has_returned
    assert all(outcome.is_within(5.0) for outcome in outcomes)


@pytest.mark.campaign  # of the tests' own harness
def test_a_rank_that_waits_for_a_failed_one_for_ever_is_a_silent_hang() -> None:
    with pytest.raises(FAILED, match=r"(?s)numels disagree.*ranks \[0\] were still running"):
        run_ranks_expecting_failure(raise_on_rank_one, 2, within_s=1.0)


def test_an_expected_failure_that_does_not_come_fails_the_test() -> None:
    with pytest.raises(FAILED, match="all 2 ranks returned"):
        run_ranks_expecting_failure(pid, 2)
