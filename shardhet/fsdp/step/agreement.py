"""Agreement of all ranks on the round that comes next."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from shardhet.comm.channel import Channel
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.known_calls import UNKNOWN
from shardhet.fsdp.sharding.residence import Residence, forget_changed
from shardhet.fsdp.step.rounds import Round, Rounds
from shardhet.records.plan import Plan


def beside_others(call: ModelCall, control: Channel) -> tuple[ModelCall, bool]:
    """The call, knowing whether others have rows of ragged arguments; whether any rank has."""
    if not call.is_ragged:
        return call, False
    has_any = any(row[0] for row in control.enter("model(...)", [call.has_rows]))
    return replace(call, is_behind=has_any and not call.has_rows), has_any


def agree_on_round(
    plan: Plan,
    control: Channel,
    call: ModelCall,
    *,
    index: int,
    rounds: Rounds,
    of_frozen: Sequence[Residence] = (),
    checksum: float = 0.0,
) -> Round:
    """The round of this ``call`` on all ranks, and of the findings to use.  Collective.

    ``index`` is that of this rank's findings; the round's is UNKNOWN unless all computing ranks
    have the same.  What was written of frozen parameters does not stay unsharded any longer.
    ``checksum`` is of samples that others compute, too.  Raises ``ValueError`` on all ranks if
    they call the model in different ways, or with more samples than the plan gives them.
    """
    with_gradients = torch.is_grad_enabled()
    moment, num_rounds = rounds.moment, rounds.number
    finished = moment.step * num_rounds + moment.round
    has_changed = any(each.has_changed() for each in of_frozen)
    mine = 4 * index + 2 * has_changed + with_gradients
    rows = control.enter("model(...)", [call.num_samples, mine, finished, checksum])
    gradients = [bool(int(row[1]) % 2) for row in rows]
    for name, values in (
        ("gradients enabled", gradients),
        ("the number of finished steps", [row[2] // num_rounds for row in rows]),
        ("the number of its finished rounds", [row[2] % num_rounds for row in rows]),
    ):
        if len(set(values)) > 1:
            raise ValueError(
                f"model(...): ranks differ in {name}: {values} in plan order. Call it in "
                "the same way on every rank; to evaluate on some of them alone, enter "
                "model.unit_by_unit() on all, and call model.module there."
            )
    if any(int(row[1]) % 4 > 1 for row in rows):
        forget_changed(of_frozen, control)
    sizes = [int(row[0]) for row in rows]
    if with_gradients:
        _check_fits_plan(plan, sizes)
    for group in plan.context_groups or ():
        if len({(rows[i][0], rows[i][3]) for i in group}) > 1:
            raise ValueError(_UNLIKE_MEMBERS.format(list(group)))
    found = Round.of(plan, control.position, call, sizes, moment)
    known = {int(row[1]) // 4 for row in rows if row[0]}
    found.index = known.pop() if len(known) == 1 else UNKNOWN
    return found


def _check_fits_plan(plan: Plan, sizes: Sequence[int]) -> None:
    planned = [rank.rank_batch_size for rank in plan.ranks]
    factors = {
        size / own if own else math.inf
        for size, own in zip(sizes, planned, strict=True)
        if size
    }
    is_joined = len(factors) == 1 and max(factors).is_integer()
    for i, (size, own) in enumerate(zip(sizes, planned, strict=True)):
        if size > own:
            raise ValueError(
                f"model(...): position {i} of the plan got {size} samples but the plan "
                f"gives it {own}, and memory was planned for that. "
                + (_JOINED.format(size // own) if is_joined else _DEAL)
            )


_UNLIKE_MEMBERS = (
    "model(...): positions {} of the plan are a context group, but got unlike samples. Pass "
    "all of them the same whole samples, those of plan.sample_indices: tokens are cut for you."
)
_DEAL = "Let shardhet.loader(dataset, model) deal the global batch."
_JOINED = (
    "If a sample has {} rows (torch.cat([chosen, rejected])), pass them as arguments of their "
    "own to a module that joins them in its forward, and wrap that one; else let "
    "shardhet.loader(dataset, model) deal the global batch."
)
