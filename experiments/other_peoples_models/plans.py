"""The plans that every family is trained under: one to three ranks, none of them even."""

from experiments.other_peoples_models.records import Named
from shardhet import Plan

ALONE = Named(
    name="1 rank",
    plan=Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[5], state_shares=[1.0]),
    eval_sizes=(3,),
)


def _two_ranks(name: str, **options: bool) -> Named:
    plan = Plan.by_hand(
        microbatch_sizes=[2, 1], rank_batch_sizes=[5, 2], state_shares=[0.7, 0.3], **options
    )
    return Named(name=name, plan=plan, eval_sizes=(1, 4))


KEPT = _two_ranks("2 ranks", reshard_after_forward=False)
RECOMPUTED = _two_ranks("2 ranks, recomputed", recompute=True)
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
