"""The plans that every family is trained under: one to three ranks, none of them even."""

from experiments.other_peoples_models.records import Named
from shardhet import Plan

ALONE = Named(
    name="1 rank",
    plan=Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[5], state_shares=[1.0]),
    eval_sizes=(3,),
)
KEPT = Named(
    name="2 ranks",
    plan=Plan.by_hand(
        microbatch_sizes=[2, 1],
        rank_batch_sizes=[5, 2],
        state_shares=[0.7, 0.3],
        reshard_after_forward=False,
    ),
    eval_sizes=(1, 4),
)
RECOMPUTED = Named(
    name="2 ranks, recomputed",
    plan=Plan.by_hand(
        microbatch_sizes=[2, 1],
        rank_batch_sizes=[5, 2],
        state_shares=[0.7, 0.3],
        recompute=[True, True],
    ),
    eval_sizes=(1, 4),
)
APART = Named(  # one only computes, one only stores
    name="3 ranks",
    plan=Plan.by_hand(
        microbatch_sizes=[3, 2, 0],
        rank_batch_sizes=[4, 3, 0],
        state_shares=[0.4, 0.0, 0.6],
        recompute=[False, True, False],
    ),
    eval_sizes=(2, 0, 3),
)
PLANS = {each.name: each for each in (ALONE, KEPT, RECOMPUTED, APART)}
