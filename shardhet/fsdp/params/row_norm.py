"""Norms of rows, which ranks agree on when they are used, and all of a vector at once."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardhet.fsdp.microbatch.modes import FunctionTensor
from shardhet.fsdp.params.row_group import RowGroup, vector_norm

Kwargs = dict[str, Any]
_plainly = torch._C.DisableTorchFunctionSubclass


class RowNorm(FunctionTensor):
    """A norm, or a vector of norms, of which this rank has computed only its part.

    Its data are NaN; any use of it in Python gets the norms over all ranks.
    """

    _locals: list[tuple[RowGroup | None, Tensor]]  # by entry; None: of a whole tensor
    _order: float

    @classmethod
    def of(
        cls, parts: list[tuple[RowGroup | None, Tensor]], order: float, *, is_vector: bool
    ) -> "RowNorm":
        """A RowNorm of the local norm of each entry."""
        first = parts[0][1]
        mark = torch.full((), math.nan, dtype=first.dtype, device=first.device)
        norm = (mark.expand(len(parts)) if is_vector else mark).as_subclass(cls)
        norm._locals, norm._order = parts, order
        return norm

    @classmethod
    def _call(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Stack without communication; compute all else, such as norms, over all ranks."""
        if func is torch.stack and not kwargs and len(args) == 1:
            return _stacked(args[0])
        if func is Tensor.to and not kwargs and isinstance(args[1], torch.device):
            return args[0]
        if func in _METADATA:
            with _plainly():
                return func(*args, **kwargs)
        if func is torch.linalg.vector_norm and isinstance(args[0], RowNorm):
            order, dims = order_and_dims(func, args, kwargs)
            if order == args[0]._order and order != 0 and not dims:
                return args[0]._total()
        args, kwargs = tree_map_only(RowNorm, RowNorm.resolved, (args, kwargs))
        return func(*args, **kwargs)

    def _total(self) -> Tensor:
        """The norm of all entries over all ranks, in one collective.  Collective."""
        with _plainly():
            groups = list(dict.fromkeys(group for group, _ in self._locals))
            totals = []
            for group in groups:
                norms = [norm for each, norm in self._locals if each is group]
                if group is None:
                    totals.append(vector_norm(torch.stack(norms).double(), self._order))
                else:
                    call = "torch.nn.utils.get_total_norm"
                    totals.append(
                        group.norm(norms, self._order, num_grads=len(norms), call=call)
                    )
            total = vector_norm(torch.stack(totals), self._order)
            return total.to(device=self.device, dtype=self.dtype)

    def resolved(self) -> Tensor:
        """The norm over all ranks, entry by entry.  Collective."""
        with _plainly():
            norms = [
                group.norm([norm], self._order, num_grads=1, call="p.norm")
                if group
                else norm.double()
                for group, norm in self._locals
            ]
            whole = torch.stack([norm.to(self.device) for norm in norms]).to(self.dtype)
            self._locals = [(None, norm) for norm in whole]
            return whole if self.dim() else whole[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.resolved().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.resolved()


_METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "shape", "is_sparse", "requires_grad", "is_cuda", "layout")
)


def _stacked(norms: Sequence[Tensor]) -> Tensor:
    """A stack of 0-d norms: a RowNorm if all have one order, else resolved over all ranks."""
    rows = [norm for norm in norms if isinstance(norm, RowNorm)]
    is_of_one_kind = len({norm._order for norm in rows}) == 1
    if not is_of_one_kind or any(norm.dim() for norm in norms):
        return torch.stack([n.resolved() if isinstance(n, RowNorm) else n for n in norms])
    parts = [
        norm._locals[0] if isinstance(norm, RowNorm) else (None, norm.detach())
        for norm in norms
    ]
    return RowNorm.of(parts, rows[0]._order, is_vector=True)


def order_and_dims(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs
) -> tuple[float | None, tuple[int, ...]]:
    """Order and dims of a call of one of torch's norms; an order of None is a matrix norm."""
    names = ("p", "dim") if func in (torch.norm, Tensor.norm) else ("ord", "dim")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    order, dims = given.get(names[0]), given.get("dim")
    if func is torch.linalg.norm and order is not None and args[0].dim() > 1 and dims is None:
        return None, ()
    if order is None or (order == "fro"):
        order = 2.0
    if isinstance(order, str):
        order = float(order) if order in ("inf", "-inf") else None
    dims = () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    return None if order is None else float(order), dims
