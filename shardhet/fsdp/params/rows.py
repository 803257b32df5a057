"""Gradients of rows: a reduction of one to a number is over the whole parameter.

``torch.nn.utils.clip_grad_norm_``, ``torch.amp.GradScaler`` and a loop that looks for NaN
reduce ``.grad`` to one number, on each rank separately.  So ``.grad`` of a HetFSDP's parameters
is a ``RowGradient``, which behaves like any other tensor except in these calls:

    linalg.vector_norm, norm, _foreach_norm   a ``RowNorm``: this rank's part of a norm
    stack of RowNorms, and the norm of that   one number, agreed on by all ranks (clip_grad)
    any other use of a RowNorm                the norm of the whole parameter, likewise
    _amp_foreach_non_finite_check_and_unscale_  sets found_inf if any rank found one
    sum, mean, max, min, any, all             over the whole parameter, at once; along any
                                              dimension but the first, of each row as usual
    var, std, median, argmax, sort, ...       refused, except along other dimensions
    matmul, dot, svd, ...                     refused
    anything else that keeps the shape;       a RowGradient
    flatten

A result of another shape (``grad[:, 0]``, ``grad.T``) is a plain tensor computed from this
rank's rows.  ``grad.as_subclass(torch.Tensor)`` is a plain tensor of the same rows.  The
optimizers' kernels (fused, foreach) accept a RowGradient; parameters stay plain Parameters.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardhet.comm import devices
from shardhet.comm.channel import SECONDS_FOR_ALL_TO_COME, Channel
from shardhet.comm.failure import Lifeline
from shardhet.fsdp.microbatch.modes import FunctionTensor
from shardhet.fsdp.params.host_step import host_threads
from shardhet.fsdp.sharding.comm import CommContext

Kwargs = dict[str, Any]
_plainly = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """The ranks that store the rows of a model's parameters."""

    comm: CommContext
    control: Channel
    lifeline: Lifeline

    @property
    def is_alone(self) -> bool:
        """Whether a single rank stores all rows."""
        return self.control.group is None

    def mark(self, grad: Tensor, fqn: str) -> "RowGradient":
        """``grad`` as a RowGradient of the parameter ``fqn``, in the same memory."""
        if isinstance(grad, RowGradient):
            return grad
        rows = grad.as_subclass(RowGradient)
        rows._rows, rows._fqn = self, fqn
        return rows

    def norm(
        self, local_norms: Sequence[Tensor], order: float, *, num_grads: int, call: str
    ) -> Tensor:
        """The norm of all ranks' ``local_norms`` together, 0-d, float64.  Collective.

        ``num_grads`` counts the gradients, including those of which this rank has no rows.
        """
        device = self.comm.device
        nothing = 0.0 if order >= 0 else math.inf
        local = torch.full((1,), nothing, dtype=torch.float64, device=device)
        if local_norms:
            # A norm of order 0 counts elements, so counts are summed.
            together = torch.stack([norm.to(device) for norm in local_norms]).double()
            local[0] = together.sum() if order == 0 else _vector_norm(together, order)
        with self.lifeline.guard(call):
            given = self.control.enter(
                call, [order, num_grads], within_s=SECONDS_FOR_ALL_TO_COME
            )
            if any(row != given[0] for row in given):
                raise ValueError(
                    f"{call}: ranks ask for [order, number of gradients] {given} in plan "
                    "order. Take norms of the same gradients on every rank, including those "
                    "of which a rank has no rows."
                )
            rows = self.comm.reduce_channel.gather_rows(local)[:, 0]
        return rows.sum() if order == 0 else _vector_norm(rows, order)

    def wait_for_device(self, grads: Sequence[Tensor]) -> None:
        """Let the host wait for numbers that it was sent, if it is to compute with them.

        GradScaler copies its scale to where gradients are, and goes on without waiting.
        """
        comm = self.comm
        if not devices.is_on_host(comm.device) and any(map(devices.is_on_host, grads)):
            comm.record_event(comm.current_stream()).synchronize()

    def agree_on_inf(self, found_inf: Tensor) -> None:
        """Set ``found_inf`` on all ranks if it is set on any.  Collective."""
        with self.lifeline.guard("GradScaler"):
            self.control.enter("GradScaler", within_s=SECONDS_FOR_ALL_TO_COME)
            mine = found_inf.reshape(1).double().to(self.comm.device)
            rows = self.comm.reduce_channel.gather_rows(mine)
        found_inf.copy_(rows.amax().reshape(found_inf.shape))

    def reduce(self, local: float, numel: int, kind: str, fqn: str) -> float:
        """The "sum", "mean", "max" or "min" over the elements of all ranks.  Collective.

        ``local`` is the result for this rank's ``numel`` elements; ignored if it has none.
        """
        call = f"p.grad.{kind}"
        with self.lifeline.guard(call):
            mine = [local, numel, zlib.crc32(fqn.encode())]
            given = self.control.enter(call, mine, within_s=SECONDS_FOR_ALL_TO_COME)
            if any(row[2] != mine[2] for row in given):
                raise ValueError(
                    f"{call}: this rank called it for {fqn}, another rank for another "
                    "parameter. Reduce the same gradients in the same order on every rank."
                )
        parts = [(value, int(count)) for value, count, _ in given if count]
        if not parts:
            return 0.0 if kind == "sum" else math.nan
        if kind == "mean":
            return sum(value * n for value, n in parts) / sum(n for _, n in parts)
        if kind == "sum":
            return sum(value for value, _ in parts)
        largest = torch.tensor([value for value, _ in parts], dtype=torch.float64)
        return float(largest.amax() if kind == "max" else largest.amin())  # NaN stays NaN

    def refuse(self, what: str) -> None:
        """Raise ``RuntimeError`` here and on the other ranks at their next collective."""
        with self.lifeline.guard("a call on gradients"):
            raise RuntimeError(
                f"{what} of a gradient of which this rank has only some rows. Use the norm of "
                "whole gradients (p.grad.norm(), torch.nn.utils.clip_grad_norm_), or gather "
                "the rows first."
            )


class RowGradient(FunctionTensor):
    """This rank's rows of a gradient.  The docstring of the file says how it behaves."""

    _rows: RowGroup
    _fqn: str  # of the parameter

    @classmethod
    def _call(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run ``func`` as on a plain tensor, unless it reduces or is refused."""
        handle = _HANDLERS.get(func, _keep_rows)
        return handle(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with _plainly():
            return self.as_subclass(Tensor).clone()


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
            order, dims = _order_and_dims(func, args, kwargs)
            if order == args[0]._order and order != 0 and not dims:
                return args[0]._total()
        args, kwargs = tree_map_only(RowNorm, RowNorm._resolved, (args, kwargs))
        return func(*args, **kwargs)

    def _total(self) -> Tensor:
        """The norm of all entries over all ranks, in one collective.  Collective."""
        with _plainly():
            groups = list(dict.fromkeys(group for group, _ in self._locals))
            totals = []
            for group in groups:
                norms = [norm for each, norm in self._locals if each is group]
                if group is None:
                    totals.append(_vector_norm(torch.stack(norms).double(), self._order))
                else:
                    call = "torch.nn.utils.get_total_norm"
                    totals.append(
                        group.norm(norms, self._order, num_grads=len(norms), call=call)
                    )
            total = _vector_norm(torch.stack(totals), self._order)
            return total.to(device=self.device, dtype=self.dtype)

    def _resolved(self) -> Tensor:
        """The norm over all ranks, entry by entry.  Collective."""
        with _plainly():
            norms = [
                group.norm([norm], self._order, num_grads=1, call="p.grad.norm")
                if group
                else norm.double()
                for group, norm in self._locals
            ]
            whole = torch.stack([norm.to(self.device) for norm in norms]).to(self.dtype)
            self._locals = [(None, norm) for norm in whole]
            return whole if self.dim() else whole[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._resolved().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._resolved()


_METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "shape", "is_sparse", "requires_grad", "is_cuda", "layout")
)


def _stacked(norms: Sequence[Tensor]) -> Tensor:
    """A stack of 0-d norms: a RowNorm if all have one order, else resolved over all ranks."""
    rows = [norm for norm in norms if isinstance(norm, RowNorm)]
    is_of_one_kind = len({norm._order for norm in rows}) == 1
    if not is_of_one_kind or any(norm.dim() for norm in norms):
        return torch.stack([n._resolved() if isinstance(n, RowNorm) else n for n in norms])
    parts = [
        norm._locals[0] if isinstance(norm, RowNorm) else (None, norm.detach())
        for norm in norms
    ]
    return RowNorm.of(parts, rows[0]._order, is_vector=True)


def _vector_norm(norms: Tensor, order: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(norms, order)
    return norm


def _local_norm(grad: Tensor, order: float) -> Tensor:
    if grad.numel():
        return _vector_norm(grad, order)
    return torch.full((), 0.0 if order >= 0 else math.inf, dtype=grad.dtype, device=grad.device)


def _take_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    grad = args[0] if args else kwargs.get("x", kwargs.get("input", kwargs.get("A")))
    others = (args[1:], {k: v for k, v in kwargs.items() if k not in ("x", "input", "A")})
    order, dims = _order_and_dims(func, (grad, *others[0]), others[1])
    if not isinstance(grad, RowGradient):  # another argument is rows, such as `out`
        with _plainly():
            return func(*args, **kwargs)
    if dims and all(dim % max(1, grad.dim()) for dim in dims):  # within each row
        with _plainly():
            return func(*args, **kwargs)
    if dims or order is None or others[1].get("out") is not None:
        grad._rows.refuse(f"{getattr(func, '__name__', func)} along dim 0 or as a matrix norm")
    with _plainly():
        assert order is not None
        local = _local_norm(grad, order)
        if (dtype := others[1].get("dtype")) is not None:
            local = _local_norm(grad.to(dtype), order)
        return RowNorm.of([(grad._rows, local)], order, is_vector=False)


def _order_and_dims(
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


def _take_norms(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """``torch._foreach_norm``."""
    grads, *rest = args
    with _plainly():
        order = float(rest[0] if rest else kwargs.get("ord", 2.0))
        filled = [grad for grad in grads if grad.numel()]
        others = {name: value for name, value in kwargs.items() if name != "ord"}
        rows = next((grad._rows for grad in grads if isinstance(grad, RowGradient)), None)
        with host_threads(rows.comm) if rows else nullcontext():
            norms = iter(torch._foreach_norm(filled, order, **others) if filled else ())
        parts = [
            (getattr(g, "_rows", None), next(norms) if g.numel() else _local_norm(g, order))
            for g in grads
        ]
    return [RowNorm.of([part], order, is_vector=False) for part in parts]


def _reduce(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Reductions such as ``sum``: over all ranks, unless they are within each row."""
    grad = args[0] if args else kwargs.get("input")
    name = func.__name__
    is_whole, rest = _what_is_reduced(name, grad, args[1:], kwargs)
    if not isinstance(grad, RowGradient) or not is_whole:
        return _keep_rows(func, args, kwargs)
    if name not in _COMBINED_AS or rest:
        grad._rows.refuse(f"{name}{' along dim 0' if rest else ''}")
    with _plainly():
        dtype = {"dtype": kwargs["dtype"]} if kwargs.get("dtype") is not None else {}
        some = grad if grad.numel() else grad.new_zeros(1)
        local = func(some, **dtype)
        kind = _COMBINED_AS[name]
        whole = grad._rows.reduce(float(local), grad.numel(), kind, grad._fqn)
        return torch.full_like(local, whole)


def _what_is_reduced(
    name: str, grad: Any, args: tuple[Any, ...], kwargs: Kwargs
) -> tuple[bool, bool]:
    """Whether the call reduces over rows, and whether it asks for more than one number."""
    others = {k for k in kwargs if k not in ("input", "dtype", "dim") and kwargs[k] is not None}
    if name == "quantile":  # its second argument is no dimension
        return True, True
    if (args and isinstance(args[0], Tensor)) or isinstance(kwargs.get("other"), Tensor):
        return False, False  # elementwise maximum or minimum of two tensors
    dims = kwargs.get("dim", args[0] if args else None)
    dims = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if dims is None or not isinstance(dims, tuple | list):
        return True, bool(others or args[1:])
    num_dims = max(1, grad.dim())
    if dims and all(dim % num_dims for dim in dims):
        return False, False
    is_all = len({dim % num_dims for dim in dims} or range(num_dims)) == num_dims
    return True, bool(others or args[1:]) or not is_all or name in ("max", "min")


def _refuse(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Refuse products and decompositions of matrices."""
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, RowGradient):
            each._rows.refuse(func.__name__)
    with _plainly():
        return func(*args, **kwargs)


def _unscale(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> None:
    """``torch._amp_foreach_non_finite_check_and_unscale_``, called by GradScaler."""
    grads, found_inf, *_ = args
    with _plainly():
        groups = dict.fromkeys(g._rows for g in grads if isinstance(g, RowGradient))
        for group in groups:
            group.wait_for_device(grads)
        with host_threads(next(iter(groups)).comm) if groups else nullcontext():
            func(*args, **kwargs)
        for group in groups:
            group.agree_on_inf(found_inf)


def _keep_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run ``func``; a result that has the shape of the rows, or flattens them, is rows too.

    A comparison with a plain tensor returns a plain one: it compares this rank's rows only.
    """
    with _plainly():
        result = func(*args, **kwargs)
        if type(result) is not Tensor or (args and result is args[0]):
            return result
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        rows = [each for each in tensors if isinstance(each, RowGradient)]
        others = [each for each in tensors if type(each) is Tensor and each.dim()]
        if not rows or func is Tensor.as_subclass or (others and func in _COMPARISONS):
            return result
        if result.shape == rows[0].shape or (func in _IN_A_LINE and result.dim() == 1):
            return rows[0]._rows.mark(result, rows[0]._fqn)
        return result


_COMBINED_AS = {
    "sum": "sum",
    "count_nonzero": "sum",
    "mean": "mean",
    "max": "max",
    "amax": "max",
    "any": "max",
    "min": "min",
    "amin": "min",
    "all": "min",
}
_REFUSED = (
    *("argmax", "argmin", "argsort", "aminmax", "cumprod", "cumsum", "kthvalue", "logsumexp"),
    *("log_softmax", "median", "mode", "nanmean", "nanmedian", "nansum", "prod", "quantile"),
    *("softmax", "sort", "std", "std_mean", "topk", "unique", "var", "var_mean"),
)
_PRODUCTS = ("__matmul__", "__rmatmul__", "dot", "einsum", "inner", "matmul", "mm", "mv", "svd",
             "vdot")  # fmt: skip


def _calls(names: Iterable[str]) -> list[Callable[..., Any]]:
    """The functions and methods of these names."""
    return [getattr(where, name) for where in (torch, Tensor) for name in names
            if hasattr(where, name)]  # fmt: skip


_IN_A_LINE = frozenset(_calls(("flatten", "ravel", "reshape", "view")))
_COMPARISONS = frozenset(
    _calls(("__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__", "eq", "ge", "gt",
            "isclose", "le", "lt", "ne"))
)  # fmt: skip
_HANDLERS: dict[Any, Callable[[Callable[..., Any], tuple[Any, ...], Kwargs], Any]] = {
    **dict.fromkeys(
        (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm), _take_norm
    ),
    torch._foreach_norm: _take_norms,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys(_calls((*_COMBINED_AS, *_REFUSED)), _reduce),
    **dict.fromkeys((*_calls(_PRODUCTS), torch.linalg.svd, torch.linalg.qr), _refuse),
}
