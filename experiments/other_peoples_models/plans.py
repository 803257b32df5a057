"""The plans that every family is trained under: one to three ranks, none of them even."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from experiments.other_peoples_models.records import Named
from shardhet import Plan, Stage

ALONE = Named(
    name="1 rank",
    plan=Plan.by_hand(microbatch_sizes=[2], rank_batch_sizes=[5], state_shares=[1.0]),
    eval_sizes=(3,),
)


def _two_ranks(name: str, rank_batch_sizes: tuple[int, int] = (5, 2), **options: Any) -> Named:
    cut = {"microbatch_sizes": [2, 1], "rank_batch_sizes": rank_batch_sizes}
    plan = Plan.by_hand(**cut, state_shares=[0.7, 0.3], **options)
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
IN_ROUNDS = _two_ranks(  # the second round has samples on one rank only
    "2 ranks, 2 rounds",
    (3, 1),
    recompute=[True, False],
    num_rounds=2,
    global_batch_size=7,
    reshard_after_forward=False,
    reduce_each_round=False,
)
PLANS = {each.name: each for each in (ALONE, KEPT, RECOMPUTED, APART, IN_ROUNDS)}

IN_TILES = _two_ranks("2 ranks, in tiles", tiles=True, tokens_per_tile=4)
SHARED = Named(  # two have the same samples, each its tokens, and one others
    name="3 ranks, 2 share samples",
    plan=Plan.by_hand(
        microbatch_sizes=[2, 2, 1],
        rank_batch_sizes=[3, 3, 2],
        state_shares=[0.5, 0.2, 0.3],
        recompute=[False, True, False],
        context_groups=[[0, 1]],
        token_shares=[2, 1, 1],
    ),
    eval_sizes=(2, 2, 3),
)
BY_TOKENS = {each.name: each for each in (IN_TILES, SHARED)}


# Ranks of each stage, with samples of each in a round and shares of the stage's state.
STAGES: dict[str, tuple[tuple[tuple[int, float], ...], ...]] = {
    "1|1": (((4, 1.0),), ((4, 1.0),)),
    "2|1": (((2, 0.7), (2, 0.3)), ((4, 1.0),)),
    "1|2": (((4, 1.0),), ((4, 0.0), (0, 1.0))),  # one only computes, one only stores
    "1|1|1": (((4, 1.0),), ((4, 1.0),), ((4, 1.0),)),
}


def in_stages(name: str, units: Sequence[str], cuts: Sequence[int]) -> Named:
    """Those of ``STAGES`` with the name, cut before these of the units; three uneven rounds."""
    borders = [0, *cuts, len(units)]
    groups = STAGES[name]
    ranks = [rank for group in groups for rank in group]
    stages = [
        Stage(units=tuple(units[start:stop]), num_ranks=len(group))
        for (start, stop), group in zip(pairwise(borders), groups, strict=True)
    ]
    plan = Plan.by_hand(
        microbatch_sizes=[min(2, samples) for samples, _ in ranks],
        rank_batch_sizes=[samples for samples, _ in ranks],
        state_shares=[share for _, share in ranks],
        recompute=[i % 2 == 1 for i in range(len(ranks))],
        num_rounds=3,
        global_batch_size=11,
        stages=stages,
    )
    before = ", ".join(units[cut] for cut in cuts)
    return Named(name=f"{name} before {before}", plan=plan, eval_sizes=())


def microbatches_of(plan: Plan) -> list[int]:
    """The sizes of a step's microbatches, in the order of its samples."""
    return [
        size
        for number in range(plan.num_rounds)
        for i in plan.groups[0]  # all stages cut alike
        if plan.leads(i)
        for size in plan.ranks[i].split(len(plan.round_samples(i, number)))
    ]
