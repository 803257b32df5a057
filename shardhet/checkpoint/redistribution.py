"""redistribute: a model and its optimizer under another plan, while the ranks run.

For each flat tensor of each unit, and before it for each state of each of its parameters:

    every rank     gathers the whole tensor (states of other shapes from the rank that has the
                   whole parameter)
                   copies the rows that it stores from now on, and frees the rest

So a rank holds at most one whole tensor of one unit, and its old and new rows of that tensor,
beyond what it holds before or after.
"""

from collections.abc import Mapping, Sequence, Set
from math import prod
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardhet.checkpoint.format.entries import HeldState
from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.checkpoint.format.metadata import DTYPES
from shardhet.checkpoint.saving import wait_for_pending
from shardhet.checkpoint.state.optimizer_state import (
    Optimizers,
    flattened,
    groups_of,
    listed,
    nested,
    states_of,
)
from shardhet.checkpoint.state.parts import parts_of
from shardhet.checkpoint.state.ranks import Ranks
from shardhet.comm.channel import may_take_long, progress
from shardhet.comm.collectives import whole_of
from shardhet.fsdp import HetFSDP
from shardhet.fsdp.params.optimizer_check import forget_states
from shardhet.fsdp.redistribution import FlatMove, follow, moves, room_under, why_not
from shardhet.fsdp.sharding.comm import HostRoom
from shardhet.fsdp.stages.channels import comm_of_units
from shardhet.records.plan import Plan

CALL = "redistribute"
_States = Mapping[str, Mapping[str, HeldState]]  # by fqn and name
_Trained = Sequence[tuple[optim.Optimizer, _States]]


@may_take_long(CALL)
def redistribute(model: HetFSDP, optimizer: Optimizers, plan: Plan) -> None:
    """Let ``model`` follow ``plan`` from the next step on.  Collective.

    Afterwards parameters and optimizer states are, bit by bit, those of a job that has saved a
    checkpoint and loaded it under ``plan``; parameters are the same objects, so the optimizer,
    schedulers and hooks stay as they are.  Call it between steps, without gradients.

    Beyond what it holds before or after, a rank needs memory for one parameter tensor or one
    state of one unit, whole, and for its rows of it under both plans.

    Args:
        model: a HetFSDP; ``model.plan`` is the new plan afterwards.
        optimizer: of its parameters, with states of their shapes and single numbers; all of
            them in a list, if there are several, or None if there is none.
        plan: for the same ranks in the same positions; equal on all ranks.

    Raises ``CheckpointError`` on every rank, naming what cannot move: gradients, a step in
    progress, another number of ranks, other devices, another model, states of other shapes.
    Nothing has been changed then.
    """
    if not isinstance(model, HetFSDP):
        raise TypeError(
            f"{CALL}: {type(model).__name__} is not a HetFSDP. Wrap the model first."
        )
    ranks = Ranks(model)
    ranks.meet(CALL)
    wait_for_pending(model)

    room: HostRoom | None = None
    optimizers = listed(optimizer)

    def examine() -> tuple[str, list[_States], set[str]]:
        nonlocal room
        reason = why_not(model, plan)
        if reason is not None:
            raise CheckpointError(reason)
        parts = parts_of(model)
        for each in optimizers:
            groups_of([each], parts)  # raises for parameters of another model
        held: list[_States] = [states_of([each], parts)[0] for each in optimizers]
        counts = (_num_moments(states) for found in held for states in found.values())
        num_moments = max(counts, default=0)
        room = room_under(model, plan, num_moments)
        if room is not None and (shortfall := room.shortfall(num_moments)) is not None:
            raise CheckpointError(shortfall)
        return plan.digest, held, {part.fqn for part in parts if part.rows.numel}

    found = ranks.agree(examine, call=CALL)
    digests = [digest for digest, *_ in found]
    if len(set(digests)) > 1:
        raise CheckpointError(f"plan: ranks pass different ones: {digests} in plan order.")
    numbers = [len(each) for _, each, _ in found]
    if len(set(numbers)) > 1:
        raise CheckpointError(f"optimizer: ranks pass {numbers} of them, in plan order.")
    trained = [
        (each, _merged([(states[i], fqns) for _, states, fqns in found]))
        for i, each in enumerate(optimizers)
    ]
    _check_pieces(model, plan, trained)
    with torch.no_grad(), model.fail_together(CALL):
        of_units = comm_of_units(plan, model._comm, model._control)
        for move in moves(model, plan, of_units):
            progress.mark(f"{CALL}: unit {move.unit_fqn!r}")
            _move(move, model, trained)
        follow(model, plan, of_units, room)
    forget_states()
    ranks.exchange(None, call=CALL)


def _num_moments(states: Mapping[str, HeldState]) -> int:
    """How many of a parameter's states have rows."""
    return sum(state.has_rows for state in states.values())


def _merged(everyones: Sequence[tuple[_States, Set[str]]]) -> dict[str, dict[str, HeldState]]:
    """The states of each parameter; one without rows of it may have none, or old numbers.

    ``everyones`` has of each rank its states, and the parameters of which it has rows.
    """
    merged: dict[str, dict[str, HeldState]] = {}
    for states, with_rows in everyones:
        for fqn in filter(with_rows.__contains__, states):
            merged[fqn] = {**states[fqn], **merged.get(fqn, {})}
    for states, _ in everyones:
        for fqn, by_name in states.items():
            merged.setdefault(fqn, dict(by_name))
    return merged


def _check_pieces(model: HetFSDP, plan: Plan, trained: _Trained) -> None:
    """Raise if ``plan`` cuts a parameter that has states of other shapes."""
    for move in moves(model, plan, model._comm):
        for slot, cut in zip(move.flat.slots, move.layout.cuts(), strict=True):
            states = [state for _, of in trained for state in of.get(slot.fqn, {}).items()]
            pieces = [name for name, state in states if state.is_piece]
            if pieces and sum(rows.numel > 0 for rows in cut) > 1:
                raise CheckpointError(
                    f"optimizer: state {pieces[0]!r} is of the whole of {slot.fqn}, which "
                    "the plan cuts into rows. Store it whole (whole_matrices=True)."
                )


def _move(move: FlatMove, model: HetFSDP, trained: _Trained) -> None:
    flat = move.flat
    for optimizer, states in trained:
        _move_states(move, model, optimizer, states)
    whole_rows = move.whole(flat.rows_on_device(), model)
    flat.comm = move.comm
    if flat.persistence is not None:
        flat.persistence.comm = move.comm
    flat.redistribute(move.layout, whole_rows, on_host=move.on_host)


def _move_states(
    move: FlatMove, model: HetFSDP, optimizer: optim.Optimizer, states: _States
) -> None:
    """Give the optimizer what this rank has of states from now on.  Collective."""
    place = torch.device("cpu") if move.on_host else model.device
    for i, (slot, param) in enumerate(
        zip(move.flat.slots, move.flat.sharded_params, strict=True)
    ):
        by_name = states.get(slot.fqn, {})
        if not by_name:
            continue
        has_pieces = any(state.is_piece for state in by_name.values())
        mine = optimizer.state.pop(param, {}) if move.flat.rows[i].numel else {}  # old numbers
        mine = flattened(mine, "") if has_pieces else mine
        optimizer.state.pop(param, None)
        own = {name: value for name, value in mine.items() if name not in by_name}
        here = move.layout.rows(i, model.position)
        for name, state in by_name.items():
            value = mine.pop(name, None)
            if state.scalar is None:  # the rows before make room for the next state's
                value = _moved(move, model, i, value, state).to(place)
            elif value is None:
                value = state.scalar
                if state.dtype is not None:
                    value = torch.tensor(value, dtype=DTYPES[state.dtype])
            if isinstance(value, Tensor) and _follows_param(optimizer, param):
                value = value.to(place)
            if here.numel or not state.is_piece:
                own[name] = value
        optimizer.state[param] = nested(own) if has_pieces else own


def _moved(move: FlatMove, model: HetFSDP, i: int, value: Any, state: HeldState) -> Tensor:
    """A state of parameter ``i``: the rows that this rank has from now on, or a whole piece.

    ``value`` is what it has before; zero where that is nothing.  Collective.
    """
    inner, piece = move.flat.slots[i].shape[1:], state.shape
    numels = [
        rows.numel * inner.numel() if piece is None else (rows.numel > 0) * prod(piece)
        for rows in move.flat.cuts[i]
    ]
    empty = torch.zeros(numels[model.position], dtype=DTYPES[str(state.dtype)])
    mine = (value if isinstance(value, Tensor) else empty).to(model.device, empty.dtype)
    whole = whole_of(mine.reshape(-1), numels, model._comm.all_gather_channel)
    if piece is not None:
        return whole.view(piece)
    here = move.layout.rows(i, model.position)
    return whole.view(-1, *inner)[here.start : here.stop].clone()


def _follows_param(optimizer: optim.Optimizer, param: nn.Parameter) -> bool:
    """Whether the optimizer keeps numbers on the device of the parameter."""
    [group] = [g for g in optimizer.param_groups if any(param is each for each in g["params"])]
    return bool(group.get("capturable") or group.get("fused"))
