"""Stages with inputs of units, and optimizers, in the memory of hosts: exact and in order."""

from typing import Any
from unittest import mock

import pytest
import torch

from shardhet import HetFSDP, Plan, Stage
from shardhet.fsdp.microbatch.host_inputs import InputsOnHost
from shardhet.fsdp.step import runtime
from shardhet.models.decoder import Decoder
from tests.drawn_cases import Case
from tests.drawn_steps import check, draw_stages
from tests.selection import one_in
from tests.test_inputs_on_host import INPUT_BYTES, MODEL, tokens
from tests.test_places import on_host, with_inputs_on_host
from tests.worlds import run_ranks, run_ranks_expecting_failure

NUM_CASES = 120


def drawn(seed: int) -> Case:
    """A drawn pipeline with inputs on hosts, optimizers there, or both."""
    case = draw_stages(9000 + seed)
    if seed % 3 != 1:
        case = with_inputs_on_host(case)
    return case if seed % 3 == 0 else on_host(case)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_accelerators", [True, False])
@pytest.mark.parametrize("seed", one_in(NUM_CASES, range(NUM_CASES)))
def test_a_drawn_step_of_a_pipeline_is_the_step_of_one_process(
    seed: int, on_accelerators: bool
) -> None:
    check(drawn(seed), on_accelerators=on_accelerators)


PLAN = Plan.by_hand(
    microbatch_sizes=[2, 2],
    num_rounds=4,
    recompute=True,
    inputs_on_host=True,
    stages=[
        Stage(units=("embedding", "blocks.[01]"), num_ranks=1, in_flight=3),
        Stage(units=("blocks.[23]", "head"), num_ranks=1),
    ],
)
INPUTS = {0: 2, 1: 3}  # by stage, those of a round that leave: tokens stay


def _held(rank: int) -> tuple[int, list[int], int, int]:
    """Bytes on the host, rounds whose last inputs come back early, and numbers of copies."""
    torch.manual_seed(0)
    model = HetFSDP(Decoder(MODEL).double(), PLAN)
    batch = tokens(PLAN.global_batch_size)
    model.forward_backward(batch, batch)
    store = model._runtime._inputs
    assert store is not None
    lanes = store.copies_out, store.copies_in
    before = [lane.num_copies for lane in lanes]
    early: list[int] = []
    launch_in = InputsOnHost._launch_in

    def noting(self: InputsOnHost, visits: list[Any]) -> None:
        for number, of_round in enumerate(self._rounds):
            if of_round is not self._now and any(each in of_round.kept for each in visits):
                early.append(number)
        launch_in(self, visits)

    with mock.patch.object(InputsOnHost, "_launch_in", noting):
        model.forward_backward(batch, batch)
    copies = [lane.num_copies - n for lane, n in zip(lanes, before, strict=True)]
    return model.host_input_bytes, early, copies[0], copies[1]


def test_each_round_in_flight_has_a_place_on_the_host() -> None:
    found = run_ranks(_held, 2)
    for stage, (nbytes, early, num_out, num_in) in enumerate(found):
        in_flight = (3, 1)[stage]
        needed = in_flight * INPUTS[stage] * 2 * INPUT_BYTES  # of two samples
        assert needed <= nbytes <= needed + in_flight * INPUTS[stage] * 512
        assert num_out == 4 * INPUTS[stage]
        # The last input of a round is still there if its backward follows at once.
        assert num_in == num_out - (4 if in_flight == 1 else 0)
        assert early == ([0, 1, 2, 0] if in_flight == 3 else [])


def _with_little_memory(rank: int) -> None:
    with mock.patch.object(runtime, "available_bytes", return_value=9 * INPUT_BYTES):
        _held(rank)


def test_the_memory_of_a_host_is_for_all_rounds_in_flight() -> None:
    outcomes = run_ranks_expecting_failure(_with_little_memory, 2)
    for each in outcomes:
        assert "plan: inputs_on_host: the inputs of positions [0, 1] need " in each.message
