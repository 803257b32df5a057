"""State dicts: whole tensors on rank zero, or this rank's rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardhet.comm import devices
from shardhet.comm.channel import SECONDS_FOR_ALL_TO_COME, Channel
from shardhet.comm.collectives import all_gather_uneven, reduce_scatter_uneven
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.flat import FlatTensor, ParamSlot
from shardhet.records.layout import Span


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The rows of one parameter that a rank stores."""

    tensor: Tensor  # [rows.numel, ...]; a scalar is one row
    rows: Span
    global_shape: tuple[int, ...]


@torch.no_grad()
def gather_params(
    flats: Sequence[FlatTensor], comm: CommContext, *, receivers: Sequence[int]
) -> dict[str, Tensor]:
    """The parameters of ``flats`` by fqn in host memory of the ``receivers``; {} elsewhere.

    They have the dtype that is stored; tied names share a tensor.  Collective.
    """
    channel = comm.all_gather_channel
    whole: dict[str, Tensor] = {}
    for flat in flats:
        output = None
        if channel.position in receivers:
            output = torch.empty(flat.layout.numel, dtype=flat.orig_dtype, device=comm.device)
        all_gather_uneven(
            output,
            flat.rows_on_device(),
            flat.layout.shard_numels,
            channel=channel,
            receivers=tuple(receivers),
        ).complete()
        if output is None:
            continue
        for slot, span in zip(flat.slots, flat.layout.param_spans, strict=True):
            param = output[span.start : span.stop].view(slot.shape).to("cpu", copy=True)
            whole.update(dict.fromkeys(slot.fqns, param))
    return whole


@torch.no_grad()
def load_state_dict(
    flats: Sequence[FlatTensor],
    module: nn.Module,
    state_dict: Mapping[str, Tensor] | None,
    *,
    comm: CommContext,
    control: Channel,
    strict: bool = True,
) -> tuple[list[str], list[str]]:
    """Load this rank's rows of whole tensors; return the missing and the unexpected names.

    ``state_dict`` is equal on all ranks, or None (or empty) on all but one, whose tensors are
    then scattered.  Raises ``ValueError`` listing what is missing, unexpected or of another
    shape, before anything is written.  Collective.
    """
    buffers = dict(persistent_buffers(module))
    shapes = {fqn: tuple(s.shape) for flat in flats for s in flat.slots for fqn in s.fqns}
    shapes |= {fqn: tuple(buffer.shape) for fqn, buffer in buffers.items()}
    mine = state_dict or {}
    given = control.enter(
        "load_state_dict", [len(mine), strict], within_s=SECONDS_FOR_ALL_TO_COME
    )
    givers = [position for position, (count, _) in enumerate(given) if count]
    if len({bool(is_strict) for _, is_strict in given}) > 1:
        raise ValueError(
            "load_state_dict: ranks differ in strict. Pass the same on every rank."
        )
    giver = givers[0] if givers else 0
    if 1 < len(givers) < len(given):
        raise ValueError(
            f"load_state_dict: positions {givers} of the plan pass a state dict and the others "
            "none. Pass it on rank zero and None elsewhere, or on every rank."
        )
    names, missing, unexpected = [], list[str](), list[str]()
    if givers == list(range(len(given))) or control.position == giver:
        # One name of a tied parameter is enough; files hold whichever their writer met first.
        slots = [slot for flat in flats for slot in flat.slots]
        optional_fqns = {
            fqn
            for slot in slots
            for fqn in slot.fqns[0 if mine.keys() & set(slot.fqns) else 1 :]
        }
        missing, unexpected = _check_keys(shapes, mine, optional=optional_fqns, strict=strict)
        names = [fqn for fqn in shapes if fqn in mine]
    if len(givers) == len(given):
        control.exchange([0.0])  # no rank writes unless all can
        _take_rows(flats, buffers, mine)
        return missing, unexpected
    names, missing, unexpected = control.exchange_objects([names, missing, unexpected])[giver]
    devices.give_back_cached(comm.device)
    for flat in flats:
        _scatter_full(flat, mine, frozenset(names), comm, giver)
    mine_of_buffers = [mine[fqn].cpu() for fqn in buffers if fqn in mine]
    is_giver = control.position == giver
    giver_buffers = control.exchange_objects(mine_of_buffers if is_giver else None)[giver]
    for fqn, value in zip(
        [fqn for fqn in buffers if fqn in set(names)], giver_buffers, strict=True
    ):
        buffers[fqn].copy_(value)
    return missing, unexpected


def _take_rows(
    flats: Sequence[FlatTensor], buffers: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> None:
    for flat in flats:
        for i, slot in enumerate(flat.slots):
            if (found := _first_found(slot, whole)) is not None:
                flat.store_rows(i, found)
    for fqn, buffer in buffers.items():
        if fqn in whole:
            buffer.copy_(whole[fqn])


def _first_found(slot: ParamSlot, whole: Mapping[str, Tensor]) -> Tensor | None:
    """The parameter's tensor under the first of its names that is in ``whole``."""
    return next((whole[fqn] for fqn in slot.fqns if fqn in whole), None)


def _scatter_full(
    flat: FlatTensor,
    whole: Mapping[str, Tensor],  # on the giver
    names: frozenset[str],  # of the giver's tensors; equal on all ranks
    comm: CommContext,
    giver: int,
) -> None:
    """Send every rank its rows of the giver's tensors.  Collective."""
    channel = comm.reduce_scatter_channel
    full = None
    if channel.position == giver:
        full = torch.zeros(flat.layout.numel, dtype=flat.orig_dtype, device=comm.device)
        for slot, span in zip(flat.slots, flat.layout.param_spans, strict=True):
            if (found := _first_found(slot, whole)) is not None:
                full[span.start : span.stop].view(slot.shape).copy_(found)
    own_numel = flat.flat_shard.numel()
    own = torch.empty(own_numel, dtype=flat.orig_dtype, device=comm.device)
    reduce_scatter_uneven(
        own,
        full,
        flat.layout.shard_numels,
        channel=channel,
        contributors=(giver,),
        scratch=comm.buffers,
    ).complete()
    for i, slot in enumerate(flat.slots):
        if names.intersection(slot.fqns):
            rows = flat.sharded_params[i]
            place = rows.storage_offset() - flat.flat_shard.storage_offset()
            rows.copy_(own.as_strided(rows.shape, rows.stride(), place))


def sharded_state_dict(flats: Sequence[FlatTensor]) -> dict[str, LocalShard]:
    """This rank's rows of every parameter, sharing memory with the model."""
    return {
        slot.fqn: LocalShard(
            flat.local_shards(flat.flat_shard)[i], flat.rows[i], tuple(slot.shape)
        )
        for flat in flats
        for i, slot in enumerate(flat.slots)
    }


def _check_keys(
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, Tensor],
    *,
    optional: set[str],
    strict: bool,
) -> tuple[list[str], list[str]]:
    """Missing and unexpected names; raises for them if ``strict``, and for other shapes."""
    missing = sorted(shapes.keys() - found.keys() - optional)
    unexpected = sorted(found.keys() - shapes.keys())
    reshaped = [
        f"{fqn} {tuple(found[fqn].shape)} instead of {shape}"
        for fqn, shape in shapes.items()
        if fqn in found and tuple(found[fqn].shape) != shape
    ]
    if (strict and (missing or unexpected)) or reshaped:
        raise ValueError(
            f"state dict does not fit the model: missing {missing}, unexpected {unexpected}, "
            f"of another shape {reshaped}. Load the state of the same model."
        )
    return missing, unexpected


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of a state dict with their fqns; every rank has them whole."""
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for name, buffer in inner._buffers.items()
        if buffer is not None and name not in inner._non_persistent_buffers_set
    ]
