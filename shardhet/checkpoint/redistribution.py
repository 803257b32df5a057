"""redistribute: a model and its optimizer under another plan, while the ranks run.

For each flat tensor of each unit, for its parameters and then for each state of the optimizer:

    every rank     gathers the whole tensor (numel elements of it; states of other shapes from
                   the rank that has the whole parameter)
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
    groups_of,
    listed,
    states_of,
)
from shardhet.checkpoint.state.parts import as_rows, parts_of
from shardhet.checkpoint.state.pieces import flattened, nested
from shardhet.checkpoint.state.ranks import Ranks
from shardhet.comm.progress import phase, progress
from shardhet.fsdp import HetFSDP
from shardhet.fsdp.params.optimizer_gate import forget_states
from shardhet.fsdp.redistribution import FlatMove, follow, moves, room_under, why_not
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.fsdp.sharding.host_room import HostRoom
from shardhet.fsdp.stages.channels import comm_of_units
from shardhet.records.plan import Plan

CALL = "redistribute"
_States = Mapping[str, Mapping[str, HeldState]]  # by fqn and name
_Trained = Sequence[tuple[optim.Optimizer, _States]]


@phase(CALL)
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
        if room is not None and (lack := room.lack(num_moments)) is not None:
            raise CheckpointError(lack)
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
    with torch.no_grad(), model.guard(CALL):
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
            pieces = [
                name
                for name, state in states
                if state.shape is not None or isinstance(state.scalar, str)
            ]
            if pieces and sum(rows.numel > 0 for rows in cut) > 1:
                raise CheckpointError(
                    f"optimizer: state {pieces[0]!r} is of the whole of {slot.fqn}, which "
                    "the plan cuts into rows. Store it whole (whole_matrices=True)."
                )


def _move(move: FlatMove, model: HetFSDP, trained: _Trained) -> None:
    flat = move.flat
    moved = [_moved_states(move, model, *each) for each in trained]
    whole_rows = move.whole(flat.placed.on_device(), model)
    flat.comm = flat.residence.comm = move.comm
    flat.redistribute(move.layout, whole_rows, on_host=move.on_host)
    for (optimizer, states), own in zip(trained, moved, strict=True):
        _give(flat, optimizer, states, own)


def _moved_states(
    move: FlatMove, model: HetFSDP, optimizer: optim.Optimizer, states: _States
) -> dict[str, dict[int, Tensor]]:
    """The rows of states that this rank has afterwards, by name and index of the parameter."""
    flat = move.flat
    own: dict[str, dict[int, Tensor]] = {}
    for name, dtype in _row_states(flat.slots, states):
        whole = move.whole(_shard_of(flat, optimizer, name, dtype), model)
        own.setdefault(name, {})
        _keep_rows(move, model, whole, (name, dtype), states, own[name])
        for i in own[name]:  # the rows before make room for the next state's
            optimizer.state[flat.sharded_params[i]].pop(name, None)
        del whole
    for i, (slot, param) in enumerate(zip(flat.slots, flat.sharded_params, strict=True)):
        by_name = states.get(slot.fqn, {})
        pieces = {name: state for name, state in by_name.items() if state.shape is not None}
        mine = flattened(optimizer.state.get(param, {}), "") if pieces else {}
        for name, state in pieces.items():
            empty = torch.empty(0, dtype=DTYPES[str(state.dtype)])
            shape = state.shape or ()
            piece = move.piece(i, mine.get(name, empty), prod(shape), model)
            if move.layout.rows(i, model.position).numel:
                place = torch.device("cpu") if move.on_host else model.device
                own.setdefault(name, {})[i] = piece.to(place).view(shape)
        if by_name and (pieces or not flat.rows[i].numel):  # numbers may be old ones
            optimizer.state.pop(param, None)
    return own


def _give(
    flat: FlatTensor,
    optimizer: optim.Optimizer,
    states: _States,
    own: Mapping[str, dict[int, Tensor]],
) -> None:
    """Let the optimizer have these rows of states, and the numbers of other ranks."""
    for i, (slot, param) in enumerate(zip(flat.slots, flat.sharded_params, strict=True)):
        for name, state in states.get(slot.fqn, {}).items():
            if state.shape is not None or isinstance(state.scalar, str):
                if param.numel():
                    piece = state.scalar if state.shape is None else own[name].pop(i)
                    optimizer.state[param][name] = piece
            elif state.scalar is None:
                optimizer.state[param][name] = own[name].pop(i).view(param.shape)
            elif name not in optimizer.state[param]:
                optimizer.state[param][name] = _scalar(state, optimizer, param)
            elif state.dtype is not None and _follows_param(optimizer, param):
                there = optimizer.state[param][name].to(param.device)
                optimizer.state[param][name] = there
        if any(isinstance(state.scalar, str) for state in states.get(slot.fqn, {}).values()):
            optimizer.state[param] = nested(optimizer.state[param])


def _row_states(slots: Sequence[Any], states: _States) -> list[tuple[str, str]]:
    """Names and dtypes of states that have rows, in an order that is the same on all ranks."""
    found = {
        (name, state.dtype): None
        for slot in slots
        for name, state in states.get(slot.fqn, {}).items()
        if state.has_rows and state.dtype is not None
    }
    return list(found)


def _shard_of(flat: Any, optimizer: optim.Optimizer, name: str, dtype: str) -> Tensor:
    """This rank's rows of a state, placed as in its shard; zero where there are none."""
    shard = torch.zeros_like(flat.placed.on_device(), dtype=DTYPES[dtype])
    for box, param in zip(flat.boxes(shard), flat.sharded_params, strict=True):
        value = optimizer.state.get(param, {}).get(name)
        if isinstance(value, Tensor) and value.dim() and str(value.dtype) == dtype:
            box.copy_(as_rows(value).view_as(box))
    return shard


def _keep_rows(
    move: FlatMove,
    model: HetFSDP,
    whole: Tensor,
    kind: tuple[str, str],
    states: _States,
    kept: dict[int, Tensor],
) -> None:
    """Copy the rows that this rank stores under the new layout."""
    name, dtype = kind
    for i, slot in enumerate(move.flat.slots):
        state = states.get(slot.fqn, {}).get(name)
        if state is None or not state.has_rows or state.dtype != dtype:
            continue
        part = move.layout.param_spans[i].intersect(move.layout.shard_spans[model.position])
        place = torch.device("cpu") if move.on_host else model.device
        kept[i] = (
            whole[part.start : part.stop]
            .to(place, copy=True)
            .view(move.layout.rows(i, model.position).numel, *slot.shape[1:])
        )


def _scalar(state: HeldState, optimizer: optim.Optimizer, param: nn.Parameter) -> Any:
    """A number that only other ranks have had."""
    if state.dtype is None:
        return state.scalar
    device = param.device if _follows_param(optimizer, param) else torch.device("cpu")
    return torch.tensor(state.scalar, dtype=DTYPES[state.dtype], device=device)


def _follows_param(optimizer: optim.Optimizer, param: nn.Parameter) -> bool:
    """Whether the optimizer keeps numbers on the device of the parameter."""
    [group] = [g for g in optimizer.param_groups if any(param is each for each in g["params"])]
    return bool(group.get("capturable") or group.get("fused"))
