"""A rank fails while the devices of the others wait in a collective of NCCL: nothing raises.

Nothing tells the hosts of those devices: they queue work, and then wait for a device that waits
for ever.  The watch over ranks ends them, within seconds and by the name of the rank.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from shardhet import HetFSDP, Plan
from shardhet.comm.liveness import watch
from shardhet.comm.liveness.ending import EXIT_STATUS
from tests.emulated.accelerator import Accelerator
from tests.misdeeds import commit
from tests.selection import one_in
from tests.test_bad_input import Net
from tests.worlds import patience, run_ranks_expecting_failure

NUM_CASES = 30
WITHIN_S = 10.0
BEFORE_S = 10.0  # start-up and the steps before the deed, on a busy machine
STEP = 3
PLACES = ("forward", "backward", "optimizer", "loader")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What one rank does, and when."""

    deed: Literal["kill", "exit", "raise"]
    place: str
    rank: int
    plan: Plan
    aborts: bool  # whether devices go on, with garbage, once communicators are aborted


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    world_size = rng.choice([2, 3, 4])
    batches = [rng.choice([0, 1, 2, 4]) for _ in range(world_size - 1)] + [2]
    cuts = sorted(rng.choices(range(9), k=world_size - 1))
    eighths = [b - a for a, b in zip([0, *cuts], [*cuts, 8], strict=True)]
    plan = Plan.by_hand(
        microbatch_sizes=[min(each, 2) for each in batches],
        rank_batch_sizes=batches,
        state_shares=[each / 8 for each in eighths],
    )
    rank = rng.randrange(world_size)
    return Case(
        deed=("kill", "exit", "raise")[seed % 3],
        place=rng.choice(PLACES if batches[rank] else PLACES[2:]),
        rank=rank,
        plan=plan,
        aborts=rng.random() < 0.5,
    )


def train(rank: int, case: Case) -> None:
    accelerator = Accelerator()
    accelerator.nccl.blocks_on_loss = True
    accelerator.nccl.aborts = case.aborts
    watch._is_decided.clear()  # so that HetFSDP starts the watch itself
    torch.manual_seed(1)
    with accelerator.installed():
        net = Net()
        model = HetFSDP(net, case.plan, device=accelerator.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        doing = ""

        def spring(*_: Any) -> None:
            if rank == case.rank and model.step == STEP and doing == case.place:
                commit(case.deed)

        net.layer(1).in_forward = net.layer(1).in_backward = spring
        x = torch.randn(case.plan.ranks[rank].rank_batch_size, 4, dtype=torch.float64).to(
            accelerator.device
        )
        for step in range(STEP + 3):
            time.sleep(0.3)
            for doing, act in in_order(model, optimizer, x):
                if doing in PLACES[2:]:
                    spring()
                act()
                model._runtime.rounds.end_step(step)  # all of it belongs to one step
            model._runtime.rounds.end_step(step + 1)


def in_order(model: HetFSDP, optimizer: Any, x: Any) -> list[tuple[str, Callable[[], Any]]]:
    outputs: list[Any] = []
    return [
        ("loader", optimizer.zero_grad),
        ("forward", lambda: outputs.append(model(x))),
        ("backward", lambda: model.backward(*outputs.pop())),
        ("optimizer", optimizer.step),
    ]


@pytest.mark.parametrize("seed", one_in(32, range(NUM_CASES)))
def test_all_end_within_seconds_with_the_name_of_the_rank(seed: int) -> None:
    assert_all_end_with_its_name(train, draw(seed))


def assert_all_end_with_its_name(act: Callable[[int, Case], None], case: Case) -> None:
    outcomes = run_ranks_expecting_failure(
        act,
        case.plan.world_size,
        case,
        within_s=WITHIN_S + BEFORE_S,
        leaves_on_failure=True,
    )
    done_at_s = outcomes[case.rank].ended_at_s
    for outcome in outcomes:
        if outcome.rank == case.rank:
            continue
        assert outcome.ended_at_s - done_at_s < WITHIN_S * patience()
        assert outcome.exit_code == EXIT_STATUS or outcome.message.startswith(
            f"rank {case.rank} "
        ), (case, outcome)
