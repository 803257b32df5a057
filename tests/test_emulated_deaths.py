"""A rank fails while the devices of the others wait in a collective of NCCL: nothing raises.

Nothing tells the hosts of those devices: they queue work, and then wait for a device that waits
for ever.  The watch over ranks ends them, within seconds and by the name of the rank.
"""

import random

import pytest

from shardhet import Plan
from shardhet.comm.liveness import watch
from shardhet.comm.liveness.ending import EXIT_STATUS
from tests.emulated.accelerator import Accelerator
from tests.misdeeds import Misdeed
from tests.selection import one_in
from tests.test_stillness import Case, take_steps
from tests.worlds import patience, run_ranks_expecting_failure

NUM_CASES = 30
WITHIN_S = 10.0
BEFORE_S = 10.0  # start-up and the steps before the deed, on a busy machine
PLACES = ("forward", "backward", "optimizer", "loader")


def draw(seed: int) -> tuple[Case, Plan, bool]:
    """What one rank does, the plan, and whether devices go on, with garbage, once communicators
    are aborted.
    """
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
    deed: Misdeed = rng.choice(["kill", "exit", "raise"])
    place = rng.choice(PLACES if batches[rank] else PLACES[2:])
    return Case(deed=deed, place=place, rank=rank), plan, rng.random() < 0.5


def train(rank: int, case: Case, plan: Plan, aborts: bool) -> None:
    accelerator = Accelerator()
    accelerator.nccl.blocks_on_loss = True
    accelerator.nccl.aborts = aborts
    watch._is_decided.clear()  # so that HetFSDP starts the watch itself
    with accelerator.installed():
        take_steps(rank, case, plan, accelerator.device)


@pytest.mark.parametrize("seed", one_in(32, range(NUM_CASES)))
def test_all_end_within_seconds_with_the_name_of_the_rank(seed: int) -> None:
    case, plan, aborts = draw(seed)
    outcomes = run_ranks_expecting_failure(
        train,
        plan.world_size,
        case,
        plan,
        aborts,
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
