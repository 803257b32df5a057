"""What a process holds of a model: rows of parameters, and buffers."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.fsdp import HetFSDP
from shardhet.fsdp.params.state import persistent_buffers
from shardhet.records.layout import Span


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """The rows of one parameter, or one whole buffer, that this process holds.

    ``tensor`` shares memory with the model: [rows.numel, ...], where a scalar is one row.
    """

    fqns: tuple[str, ...]  # several for a tied parameter; the first one counts
    tensor: Tensor
    rows: Span
    global_shape: tuple[int, ...]
    param: nn.Parameter | None = None  # as optimizers hold it; None for a buffer

    @property
    def is_here(self) -> bool:
        """Whether any row of it is here."""
        return self.rows.numel > 0

    @property
    def is_whole(self) -> bool:
        """Whether all of it is here."""
        return self.tensor.numel() == prod(self.global_shape)

    @property
    def fqn(self) -> str:
        """The name that counts."""
        return self.fqns[0]


def parts_of(model: nn.Module) -> list[ModelPart]:
    """Every parameter and persistent buffer, in the model's own order and under its names.

    Raises ``CheckpointError`` for a model whose tensors are not where they seem to be.
    """
    plain = model.module if isinstance(model, HetFSDP) else model
    _check_is_plain(plain)
    fqns: dict[nn.Parameter, list[str]] = {}
    for fqn, param in plain.named_parameters(remove_duplicate=False):
        fqns.setdefault(param, []).append(fqn)
    buffers = [
        ModelPart((fqn,), as_rows(buffer.detach()), _all_rows(buffer), tuple(buffer.shape))
        for fqn, buffer in persistent_buffers(plain)
    ]
    if isinstance(model, HetFSDP):
        return [*_parts_of_rows(model, fqns), *buffers]
    params = [
        ModelPart(tuple(names), as_rows(p.detach()), _all_rows(p), tuple(p.shape), p)
        for p, names in fqns.items()
    ]
    return [*params, *buffers]


def _check_is_plain(module: nn.Module) -> None:
    for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, DTensor):
            raise CheckpointError(
                f"{fqn} is a DTensor, as of FSDP2. Save and load such a model with "
                "torch.distributed.checkpoint, whose names are the same."
            )
        if tensor.is_meta:
            raise CheckpointError(
                f"{fqn} is on the meta device and has no values. Materialize the model first."
            )


def _parts_of_rows(model: HetFSDP, fqns: dict[nn.Parameter, list[str]]) -> Iterator[ModelPart]:
    local_shards = model.sharded_state_dict()
    for fqn, param in model.named_parameters():
        box = local_shards[fqn]
        if param not in fqns:
            raise CheckpointError(
                f"{fqn}: parameters are gathered at this moment. Save and load between steps, "
                "outside of model.unit_by_unit()."
            )
        names = tuple(dict.fromkeys((fqn, *fqns[param])))
        yield ModelPart(names, box.tensor, box.rows, box.global_shape, param)


def as_rows(tensor: Tensor) -> Tensor:
    """``tensor`` in the same memory, with a first dimension if it has none."""
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _all_rows(tensor: Tensor) -> Span:
    return Span(0, tensor.shape[0] if tensor.dim() else 1)
