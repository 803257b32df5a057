"""A rank that raises or dies in the middle of training is named by all others in seconds."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest

from shardhet import Plan
from tests.misdeeds import commit
from tests.programs import TORCHRUN, run
from tests.selection import one_in
from tests.test_bad_input import HOSTS, PLAN, TURNED, WITHIN_S, others_hear, wrap
from tests.worlds import Outcome, run_ranks_expecting_failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Misdeed:
    """What one rank does, once, in the middle of training."""

    deed: Literal["raise", "exit", "kill"]
    place: Literal["forward", "backward", "between", "wait"]
    rank: int = 1
    step: int = 2
    layer: int = 1


def train_until(rank: int, misdeed: Misdeed, plan: Plan) -> None:
    model, net, x = wrap(rank, plan)

    def spring(*_: Any) -> None:
        if rank == misdeed.rank and model.step == misdeed.step:
            commit(misdeed.deed)

    if misdeed.place == "forward":
        net.layer(misdeed.layer).in_forward = spring
    if misdeed.place == "backward":
        net.layer(misdeed.layer).in_backward = spring
    if misdeed.place == "wait":
        model.add_observer(lambda event: spring() if event.unit == "layers.1" else None)
    for _ in range(4):
        if misdeed.place == "between":
            spring()
        model.backward(*model(x))


@pytest.mark.sampled
@pytest.mark.parametrize("plan", [PLAN, TURNED], ids=["plain", "turned"])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_error_in_one_ranks_model_is_told_everywhere_with_rank_and_unit(
    place: Any, step: int, plan: Plan
) -> None:
    misdeed = Misdeed(deed="raise", place=place, step=step)
    outcomes = run_ranks_expecting_failure(train_until, 3, misdeed, plan)
    others_hear(outcomes, 1, "KeyError: 'sample 17 is missing'", f"{place} of unit 'layers.1'")


def check_death(outcomes: Sequence[Outcome], misdeed: Misdeed) -> None:
    host = HOSTS[misdeed.rank]
    for outcome in outcomes:
        assert outcome.is_within(WITHIN_S)
        if outcome.rank == misdeed.rank:
            assert outcome.exit_code == (3 if misdeed.deed == "exit" else -signal.SIGKILL)
            continue
        assert outcome.exception_name == "RuntimeError", outcome.traceback
        assert outcome.message.startswith(
            f"rank {misdeed.rank} (any device on {host}) ended without a message while this "
            f"rank was in "
        )
        assert "Look at its exit code and log" in outcome.message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("deed", ["exit", "kill"])
@pytest.mark.parametrize("place", ["forward", "backward", "between"])
def test_a_rank_that_dies_is_named_by_all_others(place: Any, deed: Any) -> None:
    misdeed = Misdeed(deed=deed, place=place)
    check_death(run_ranks_expecting_failure(train_until, 3, misdeed, PLAN), misdeed)


@pytest.mark.parametrize("place", one_in(2, ["between", "wait"]))
def test_a_rank_that_only_stores_is_missed_when_it_dies(place: Any) -> None:
    misdeed = Misdeed(deed="kill", place=place, rank=2)
    check_death(run_ranks_expecting_failure(train_until, 3, misdeed, PLAN), misdeed)


def die_while_wrapping(rank: int, place: str) -> None:
    def spring(*_: Any, **__: Any) -> None:
        commit("kill")

    with mock.patch(place, spring) if rank == 1 else nullcontext():
        wrap(rank)


@pytest.mark.parametrize(
    "place",
    [
        "fsdp.module.checked",
        "comm.groups.count_alike",
        "comm.groups.meet",
        "comm.members.match_devices",
        "fsdp.module.build_units",
    ],
)
def test_a_rank_that_dies_while_it_wraps_the_model_is_named_by_all_others(place: str) -> None:
    outcomes = run_ranks_expecting_failure(die_while_wrapping, 3, f"shardhet.{place}")
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.exception_name == "RuntimeError", outcome.traceback
        assert outcome.message.startswith("rank 1"), outcome.message
        assert "the model" in outcome.message or "meeting the other ranks" in outcome.message
        assert outcome.is_within(WITHIN_S)


def raise_in_the_loader(rank: int) -> None:
    model, _, x = wrap(rank)
    for step in range(3):
        if rank == 1 and step == 2:
            try:
                commit("raise")
            except KeyError as error:  # as the interpreter does with it
                sys.excepthook(type(error), error, error.__traceback__)
                os._exit(1)
        model.backward(*model(x))


def test_what_the_program_around_the_model_raises_is_told_everywhere() -> None:
    outcomes = run_ranks_expecting_failure(raise_in_the_loader, 3)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.message.startswith(
            f"rank 1 (any device on {HOSTS[1]}) failed in the program around HetFSDP: "
            "KeyError: 'sample 17 is missing'"
        )
        assert outcome.is_within(WITHIN_S)


def leave_early(rank: int) -> None:
    model, _, x = wrap(rank)
    for step in range(3):
        if rank == 1 and step == 2:
            os._exit(0)  # its loader had one batch less
        model.backward(*model(x))


def test_a_rank_that_ends_its_loop_early_is_named_by_all_others() -> None:
    outcomes = run_ranks_expecting_failure(leave_early, 3)
    assert outcomes[1].exit_code == 0
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.message.startswith("rank 1 (any device on beta) ended without a message")
        assert outcome.is_within(WITHIN_S)


def test_a_rank_with_fewer_batches_is_named_as_that(tmp_path: Path) -> None:
    """Its program has ended with status 0; the others wait for its next step."""
    program = ("-m", "tests.toys.short_loader")
    done = run([*TORCHRUN, "--nproc-per-node=2", *program], tmp_path)
    assert re.search(
        r"RuntimeError: rank 1 \(.*\) ended without an exception after 2 steps, while this "
        r"rank is in model\(\.\.\.\) of step 3\. Every rank makes the same calls: "
        r"is its loader shorter, or do only some ranks make this call\?",
        done.stderr,
    )
