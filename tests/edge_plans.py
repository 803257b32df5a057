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
