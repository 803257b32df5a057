"""A few plans, for tests of what is odd: one rank, uneven ranks, one that only stores."""

import pytest

from shardhet import Plan

ALONE = Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[5], state_shares=[1.0])
UNEVEN = Plan.by_hand(
    microbatch_sizes=[2, 1],
    rank_batch_sizes=[5, 2],
    state_shares=[0.7, 0.3],
    recompute=[True, False],
)
APART = Plan.by_hand(
    microbatch_sizes=[3, 2, 0], rank_batch_sizes=[4, 4, 0], state_shares=[0.4, 0.0, 0.6]
)
PLANS = [ALONE, UNEVEN, APART]
every_plan = pytest.mark.parametrize("plan", PLANS, ids=["alone", "uneven", "apart"])
both_ways = pytest.mark.parametrize("recomputes", [False, True])


def full_batches(plan: Plan) -> list[int]:
    """Samples of every rank."""
    return [rank.rank_batch_size for rank in plan.ranks]


def plan_for(recomputes: bool, *, world_size: int = 1, num_rounds: int = 1) -> Plan:
    """Five samples, of one rank in three microbatches, or of two while a third only stores."""
    if world_size == 1:
        sizes = {"microbatch_sizes": [2], "rank_batch_sizes": [5], "state_shares": [1.0]}
        return Plan.by_hand(**sizes, recompute=recomputes, num_rounds=num_rounds)
    return Plan.by_hand(
        microbatch_sizes=[2, 1, 0],
        rank_batch_sizes=[3, 2, 0],
        state_shares=[0.5, 0.2, 0.3],
        recompute=recomputes,
        num_rounds=num_rounds,
    )


IN_ROUNDS = plan_for(recomputes=False, num_rounds=2)
