"""A rank that raises, dies or is stopped, in any stage and phase, ends all by its name."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from shardhet import HetFSDP
from shardhet.comm.liveness import watch
from shardhet.comm.liveness.ending import EXIT_STATUS
from shardhet.comm.liveness.watch import watch_ranks
from shardhet.fsdp.stages.exchange import StageExchange
from shardhet.fsdp.step.runtime import Runtime
from tests.emulated.accelerator import Accelerator
from tests.misdeeds import CAUSE, commit
from tests.parity import OnHost
from tests.selection import one_in
from tests.test_pipelines import UNITS, Leaky, batch_of, staged
from tests.test_stillness import stop_here
from tests.worlds import patience, run_ranks_expecting_failure

PLAN = staged([1, 1, 2, 2], [2, 1, 1], num_rounds=4)
STEP = 2
BEFORE_S = 15.0  # start-up and the steps before the deed, on a busy machine
WITHIN_S = {"raise": 10.0, "kill": 10.0, "stop": 20.0}
PLACES = ("forward", "backward", "taking", "giving", "reducing", "between")
CULPRIT_BY_STAGE = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one rank does, and when."""

    deed: Any
    place: str
    stage: int
    on_accelerators: bool

    @property
    def culprit(self) -> int:
        """Its rank."""
        return CULPRIT_BY_STAGE[self.stage]


CASES = [
    Case(deed=deed, place=place, stage=stage, on_accelerators=on_accelerators)
    for on_accelerators in (False, True)
    for stage in range(3)
    for place in PLACES
    for deed in ("raise", "kill", "stop")
]


def before(name: str, owner: type, act: Callable[[str], None], place: str) -> Any:
    """A method of ``owner`` that acts before it does what it does."""
    method = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        act(place)
        return method(*args, **kwargs)

    return mock.patch.object(owner, name, run)


def _train(rank: int, case: Case) -> None:
    place: Accelerator | OnHost = OnHost()
    if case.on_accelerators:
        place = Accelerator()
        place.nccl.blocks_on_loss = True
    watch._is_decided.clear()  # so that HetFSDP starts the watch itself
    if case.deed == "stop":
        watch_ranks(hang_timeout_s=2.0)
    torch.manual_seed(0)

    def act(where: str) -> None:
        if rank == case.culprit and where == case.place and model.step == STEP:
            if case.deed == "stop":
                stop_here(for_s=2 * WITHIN_S["stop"])
            else:
                commit(case.deed)

    with (
        place.installed(),
        before("take", StageExchange, act, "taking"),
        before("send", StageExchange, act, "giving"),
        before("reduce_rest", Runtime, act, "reducing"),
    ):
        model = HetFSDP(Leaky(), PLAN, units=UNITS, device=place.device)
        for block in model.module.blocks:  # type: ignore[union-attr]
            block.spring = act
        given = batch_of(PLAN.global_batch_size)
        mine = PLAN.sample_indices(model.position)
        inputs, targets = (each[mine].to(place.device) for each in given)
        for _ in range(STEP + 3):
            time.sleep(0.2)  # so that the last sign of life comes from this step
            act("between")
            model.forward_backward(inputs, targets)


@pytest.mark.parametrize("case", one_in(25, CASES))
def test_a_rank_that_fails_ends_all_stages_within_seconds_by_name(case: Case) -> None:
    within_s = WITHIN_S[case.deed]
    outcomes = run_ranks_expecting_failure(
        _train,
        PLAN.world_size,
        case,
        within_s=BEFORE_S + within_s,
        leaves_on_failure=case.on_accelerators or case.place == "between",
    )
    others = [each for each in outcomes if each.rank != case.culprit]
    if case.deed != "stop":
        done_at_s = outcomes[case.culprit].ended_at_s
        assert all(each.ended_at_s - done_at_s < within_s * patience() for each in others)
    named = [each for each in others if each.exit_code != EXIT_STATUS]
    assert named or case.on_accelerators
    for each in named:
        assert each.message.startswith(f"rank {case.culprit} "), (case, each)
        assert f" of stage {case.stage} " in each.message, (case, each)
        assert case.deed != "raise" or CAUSE in each.message, (case, each)
