"""Optimizers and inputs in the memory of hosts, tiles, and frozen weights that stay unsharded:
drawn steps are exact, all waits matter.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from shardhet import Plan
from shardhet.comm.copy_streams import Copy, CopyStream
from shardhet.fsdp.microbatch.host_inputs import HostInput
from shardhet.fsdp.sharding.persistence import GradientOnHost, RowsOnHost
from tests.drawn_cases import Case, draw_case, draw_rounds
from tests.emulated.clocks import Event
from tests.parity import check_parity
from tests.selection import blocks, for_campaign, one_in, quads
from tests.test_emulated import check_beside_one_process
from tests.worlds import on_ranks, run_ranks_expecting_failure

NUM_CASES_PER_BLOCK = 2


def moved(plan: Plan, on_host: Sequence[bool]) -> Plan:
    """The plan with optimizers in these places."""
    ranks = zip(plan.ranks, on_host, strict=True)
    return replace(
        plan, ranks=tuple(replace(rank, optimizer_on_host=each) for rank, each in ranks)
    )


def on_host(case: Case) -> Case:
    """The case with the optimizers of some devices on the host, of at least one that stores."""
    draw = random.Random(f"places {case.seed}")
    storing = [i for i, rank in enumerate(case.plan.ranks) if rank.state_share]
    chosen = {i for i in range(len(case.plan.ranks)) if draw.random() < 0.5}
    chosen.add(draw.choice(storing))
    plan = moved(case.plan, [i in chosen for i in range(len(case.plan.ranks))])
    return replace(case, plan=plan)


def with_inputs_on_host(case: Case) -> Case:
    """The case with more recomputed, and inputs of some recomputed units on the host."""
    draw = random.Random(f"inputs {case.seed}")
    ranks = []
    for rank in case.plan.ranks:
        recomputed = rank.recomputed_units or draw.choice([(), ("*",), ("blocks.*",)])
        chosen = draw.choice([("*",), ("*",), recomputed, recomputed[:1], ()])
        chosen = chosen if recomputed else ()
        ranks.append(replace(rank, recomputed_units=recomputed, inputs_on_host=chosen))
    return replace(case, plan=replace(case.plan, ranks=tuple(ranks)))


def in_tiles(case: Case) -> Case:
    """The case without dropout, of which each tile draws its own, with tiles on some ranks."""
    draw = random.Random(f"tiles {case.seed}")
    ranks = [
        replace(
            rank,
            tiled_units=draw.choice([("*",), ("*",), ("blocks.*",), ("*.up", "*.norm"), ()]),
            tokens_per_tile=draw.choice([1, 2, 3]),
        )
        for rank in case.plan.ranks
    ]
    return replace(case.without_dropout(), plan=replace(case.plan, ranks=tuple(ranks)))


def with_residents(case: Case) -> Case:
    """The case with most parameters frozen, which stay; some ranks have much on the host."""
    draw = random.Random(f"resident {case.seed}")
    blocks = range(len(case.shape.units))
    parts = [f"blocks.{i}.{name}" for i in blocks for name in ("up", "down", "core")]
    frozen = ["embedding", "position", "head.norm", *(p for p in parts if draw.random() < 0.8)]
    case = replace(
        case,
        shape=replace(case.shape, frozen=tuple(frozen)),
        plan=replace(case.plan, resident_units=("*",)),
    )
    return on_host(with_inputs_on_host(case)) if case.seed % 3 == 0 else case


# By what is on the host, in tiles or resident: how a case gets there, and the first seed.
PLACES = {
    "optimizer": (on_host, 7000),
    "inputs": (with_inputs_on_host, 8000),
    "tiles": (in_tiles, 9000),
    "residents": (with_residents, 6000),
}
every_place = pytest.mark.parametrize("place", PLACES)


def check_block(
    rank: int, place: str, block: int, check: Callable[[int, Case], Any], draw: Any, **of: int
) -> None:
    put, first = PLACES[place]
    for i in range(NUM_CASES_PER_BLOCK):
        case = put(draw(first + block * NUM_CASES_PER_BLOCK + i, **of))
        try:
            check(rank, case)
        except Exception as error:
            raise AssertionError(str(case)) from error


def check_on_hosts(rank: int, case: Case) -> None:
    check_parity(rank, case.problem, case.plan, case.course)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize(
    "world_size, block",
    [*blocks((1, 0), (2, 0), (3, 1)), *starmap(for_campaign, quads((4, 2)))],
)
@every_place
@on_ranks()
def test_a_step_is_that_of_one_process(
    rank: int, place: str, world_size: int, block: int, in_rounds: bool
) -> None:
    draw = draw_rounds if in_rounds else draw_case
    check_block(rank, place, block, check_on_hosts, draw, world_size=world_size)


@pytest.mark.parametrize("world_size, block", one_in(8, quads((1, 3), (3, 5), (2, 4))))
@every_place
@on_ranks()
def test_copies_and_steps_are_in_order_on_accelerators(
    rank: int, place: str, world_size: int, block: int
) -> None:
    check_block(rank, place, block, check_beside_one_process, draw_case, world_size=world_size)


# Waits


def _drop_copy_at_once(_lane: Any, _copy: Any, _stream: Any, drop: Callable[[], None]) -> None:
    drop()


def _on_device_at_once(each: HostInput, _comm: Any) -> Tensor:
    assert each._tensor is not None
    return each._tensor.requires_grad_()


def _drop_input_at_once(each: HostInput, _comm: Any) -> None:
    each._tensor = each._copy = None


def _launch_at_once() -> Any:
    launch = CopyStream.launch

    def launch_at_once(lane: CopyStream, make: Any, *, after: Any, **others: Any) -> Copy:
        at_once = Event(after._host) if isinstance(after, Event) else after
        return launch(lane, make, after=at_once, **others)  # type: ignore[no-any-return]

    return launch_at_once


# By what is on the host and what waits: the method, and what to put in its place.
WAITS: dict[tuple[str, str], tuple[type, str, Callable[[], Any]]] = {
    ("optimizer", "gather"): (RowsOnHost, "wait_on", mock.MagicMock),
    ("optimizer", "host"): (GradientOnHost, "_wait", mock.MagicMock),
    ("optimizer", "reduce stream"): (CopyStream, "hold", lambda: _drop_copy_at_once),
    ("optimizer", "copies"): (CopyStream, "launch", _launch_at_once),
    ("inputs", "compute for the copy in"): (HostInput, "on_device", lambda: _on_device_at_once),
    ("inputs", "compute for the copy out"): (HostInput, "drop", lambda: _drop_input_at_once),
    ("inputs", "copies for compute"): (CopyStream, "launch", _launch_at_once),
}
ON_DEVICE_ALONE = ("reduce stream", "copies", "copies for compute")


def _without(rank: int, place: str, wait: str, is_emulated: bool) -> None:
    case = draw_case(PLACES[place][1] + 3, world_size=2)
    here = {
        "optimizer": {"optimizer_on_host": True},
        "inputs": {"recomputed_units": ("*",), "inputs_on_host": ("*",)},
    }[place]
    ranks = tuple(replace(each, **here) for each in case.plan.ranks)
    case = replace(case, plan=replace(case.plan, ranks=ranks))
    owner, name, make = WAITS[place, wait]
    with mock.patch.object(owner, name, make()):
        (check_beside_one_process if is_emulated else check_on_hosts)(rank, case)


@pytest.mark.parametrize(
    "place, wait, is_emulated",
    [
        case
        for of in PLACES
        for case in one_in(
            2,
            [
                (place, wait, is_emulated)
                for is_emulated in (False, True)
                for place, wait in WAITS
                if place == of and (is_emulated or wait not in ON_DEVICE_ALONE)
            ],
        )
    ],
)
def test_a_wait_that_is_left_out_is_noticed(place: str, wait: str, is_emulated: bool) -> None:
    outcomes = run_ranks_expecting_failure(
        _without, 2, place, wait, is_emulated, within_s=40.0, leaves_on_failure=True
    )
    names = {each.exception_name for each in outcomes} - {None}
    assert names & {"RaceError", "AssertionError", "FloatingPointError"}, names
