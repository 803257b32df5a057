"""State dicts: whole tensors on rank zero, or this rank's row boxes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardhet.collectives import all_gather_uneven
from shardhet.fsdp.comm import CommContext
from shardhet.fsdp.flat import FlatTensor
from shardhet.layout import Span


@dataclass(frozen=True, slots=True)
class RowBox:
    """The rows of one parameter that a rank stores."""

    tensor: Tensor  # [rows.numel, ...]; a scalar is one row
    rows: Span
    global_shape: tuple[int, ...]


@torch.no_grad()
def gather_state_dict(
    flats: Sequence[FlatTensor], module: nn.Module, comm: CommContext
) -> dict[str, Tensor]:
    """All parameters and persistent buffers on rank zero's host memory; {} elsewhere.

    Gathered flat tensor by flat tensor, in the dtype they are stored in.  Collective.
    """
    whole = gather_params(flats, comm)
    if comm.gather_channel.position != comm.gather_channel.rank_by_position.index(0):
        return {}
    buffers = {fqn: b.detach().to("cpu", copy=True) for fqn, b in persistent_buffers(module)}
    order = [*(fqn for fqn, _ in _named_parameters(module)), *buffers]
    return {fqn: (whole | buffers)[fqn] for fqn in order}


@torch.no_grad()
def gather_params(flats: Sequence[FlatTensor], comm: CommContext) -> dict[str, Tensor]:
    """The parameters of ``flats`` by fqn on rank zero's host memory; {} elsewhere.

    In the dtype they are stored in; tied names share a tensor.  Collective.
    """
    channel = comm.gather_channel
    receiver = channel.rank_by_position.index(0)
    whole: dict[str, Tensor] = {}
    for flat in flats:
        output = None
        if channel.position == receiver:
            output = torch.empty(flat.layout.numel, dtype=flat.orig_dtype, device=comm.device)
        gather = all_gather_uneven(
            output,
            flat.flat_shard,
            flat.layout.shard_numels,
            channel=channel,
            receivers=(receiver,),
        )
        gather.wait()
        gather.wait_sent()
        if output is None:
            continue
        for slot, span in zip(flat.slots, flat.layout.param_spans, strict=True):
            param = output[span.start : span.stop].view(slot.shape).to("cpu", copy=True)
            whole.update(dict.fromkeys(slot.fqns, param))
    return whole


@torch.no_grad()
def load_state_dict(
    flats: Sequence[FlatTensor], module: nn.Module, state_dict: Mapping[str, Tensor]
) -> None:
    """Take this rank's rows out of whole tensors.

    Raises ``ValueError`` listing what is missing, unexpected or of another shape, before
    anything is written.
    """
    buffers = dict(persistent_buffers(module))
    shapes = {fqn: tuple(s.shape) for flat in flats for s in flat.slots for fqn in s.fqns}
    shapes |= {fqn: tuple(buffer.shape) for fqn, buffer in buffers.items()}
    tied = {fqn for flat in flats for slot in flat.slots for fqn in slot.fqns[1:]}
    _check_keys(shapes, state_dict, optional=tied)
    for flat in flats:
        for i, slot in enumerate(flat.slots):
            flat.store_rows(i, state_dict[slot.fqn])
    for fqn, buffer in buffers.items():
        buffer.copy_(state_dict[fqn])


def sharded_state_dict(flats: Sequence[FlatTensor]) -> dict[str, RowBox]:
    """This rank's rows of every parameter, sharing memory with the model."""
    return {
        slot.fqn: RowBox(flat.sharded_params[i].detach(), flat.rows[i], tuple(slot.shape))
        for flat in flats
        for i, slot in enumerate(flat.slots)
    }


@torch.no_grad()
def load_sharded_state_dict(flats: Sequence[FlatTensor], boxes: Mapping[str, RowBox]) -> None:
    """The inverse of ``sharded_state_dict`` under the same plan."""
    current = sharded_state_dict(flats)
    _check_keys(
        {fqn: tuple(box.tensor.shape) for fqn, box in current.items()},
        {fqn: box.tensor for fqn, box in boxes.items()},
        optional=set(),
    )
    for fqn, box in current.items():
        if boxes[fqn].rows != box.rows:
            raise ValueError(
                f"{fqn}: holds rows {boxes[fqn].rows} but this rank stores {box.rows}. A "
                "sharded state dict loads under the plan it was made with; use a checkpoint "
                "otherwise."
            )
        box.tensor.copy_(boxes[fqn].tensor)


def _check_keys(
    shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor], *, optional: set[str]
) -> None:
    missing = sorted(shapes.keys() - found.keys() - optional)
    unexpected = sorted(found.keys() - shapes.keys())
    reshaped = [
        f"{fqn} {tuple(found[fqn].shape)} instead of {shape}"
        for fqn, shape in shapes.items()
        if fqn in found and tuple(found[fqn].shape) != shape
    ]
    if missing or unexpected or reshaped:
        raise ValueError(
            f"state dict does not fit the model: missing {missing}, unexpected {unexpected}, "
            f"of another shape {reshaped}. Load the state of this very model."
        )


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that belong into a state dict, by fqn, whole on every rank."""
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for name, buffer in inner._buffers.items()
        if buffer is not None and name not in inner._non_persistent_buffers_set
    ]


def _named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))
