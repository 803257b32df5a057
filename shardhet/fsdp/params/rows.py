"""Gradients of rows: a reduction of one to a number is over the whole parameter.

``torch.nn.utils.clip_grad_norm_``, ``torch.amp.GradScaler`` and a loop that looks for NaN
reduce ``.grad`` to one number, on each rank separately.  So ``.grad`` of a HetFSDP's parameters
is a ``RowGradient``, which behaves like any other tensor except in these calls:

    linalg.vector_norm, norm, _foreach_norm   a ``RowNorm``: this rank's part of a norm
    stack of RowNorms, and the norm of that   one number, agreed on by all ranks (clip_grad)
    any other use of a RowNorm                the norm of the whole parameter, likewise
    _amp_foreach_non_finite_check_and_unscale_  sets found_inf if any rank found one
    sum, mean, max, min, any, all             over the whole parameter, at once; along any
                                              dimension but the first, of each row as usual,
                                              and the rows' numbers are rows again
    cat, stack, T, transpose, view, ...       a RowGradient, which is reduced as a whole only
                                              if its first dimension is not the rows
    var, std, median, argmax, sort, ...       refused, except along other dimensions
    matmul, dot, svd, roll, triu, ...         refused
    chunk, split, normalize                   RowGradients; refused along the first dimension
    anything else that keeps the shape        a RowGradient
    anything else that returns one number     refused, unless it is taken out by an index

A result of another shape (``grad[:, 0]``) is a plain tensor computed from this rank's rows.
``grad.as_subclass(torch.Tensor)`` is a plain tensor of the same rows.  The optimizers' kernels
(fused, foreach) accept a RowGradient; parameters stay plain Parameters.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from shardhet.fsdp.microbatch.modes import FunctionTensor
from shardhet.fsdp.params.host_step import host_threads
from shardhet.fsdp.params.row_group import RowGroup, vector_norm

Kwargs = dict[str, Any]
_plainly = torch._C.DisableTorchFunctionSubclass


class RowGradient(FunctionTensor):
    """This rank's rows of a gradient.  The docstring of the file says how it behaves."""

    _rows: RowGroup
    _fqn: str  # of the parameter, or of several
    _has_rows: bool  # whether its first dimension is the rows

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


def marked(grad: Tensor, group: RowGroup, fqn: str, *, has_rows: bool = True) -> RowGradient:
    """``grad`` as a RowGradient of the parameter ``fqn``, in the same memory."""
    if isinstance(grad, RowGradient):
        return grad
    rows = grad.as_subclass(RowGradient)
    rows._rows, rows._fqn, rows._has_rows = group, fqn, has_rows
    return rows


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
                    totals.append(vector_norm(torch.stack(norms).double(), self._order))
                else:
                    call = "torch.nn.utils.get_total_norm"
                    totals.append(
                        group.norm(norms, self._order, num_grads=len(norms), call=call)
                    )
            total = vector_norm(torch.stack(totals), self._order)
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


def _local_norm(grad: Tensor, order: float) -> Tensor:
    if grad.numel():
        return vector_norm(grad, order)
    return torch.full((), 0.0 if order >= 0 else math.inf, dtype=grad.dtype, device=grad.device)


def _take_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    grad = args[0] if args else kwargs.get("x", kwargs.get("input", kwargs.get("A")))
    others = (args[1:], {k: v for k, v in kwargs.items() if k not in ("x", "input", "A")})
    order, dims = _order_and_dims(func, (grad, *others[0]), others[1])
    if not isinstance(grad, RowGradient):  # another argument is rows, such as `out`
        with _plainly():
            return func(*args, **kwargs)
    if grad._has_rows and dims and all(dim % max(1, grad.dim()) for dim in dims):
        return _of_each_row(func, args, kwargs)
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
        of_each = isinstance(grad, RowGradient) and name in _COMBINED_AS
        return (_of_each_row if of_each else _keep_rows)(func, args, kwargs)
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
    if dims and all(dim % num_dims for dim in dims) and getattr(grad, "_has_rows", True):
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


def _of_each_row(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run ``func``, which reduces each row for itself, or compares two tensors' elements."""
    result = _keep_rows(func, args, kwargs)
    given = (*args[:1], *kwargs.values())
    grad = next(each for each in given if isinstance(each, RowGradient))
    is_number_each = type(result) is Tensor and result.shape[:1] == grad.shape[:1]
    return marked(result, grad._rows, grad._fqn) if is_number_each else result


def _join(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """``torch.cat`` and the like: what all ranks have together are the whole gradients."""
    with _plainly():
        result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        rows = [each for each in tensors if isinstance(each, RowGradient)]
        if len(rows) < len(tensors) or len({each._rows for each in rows}) > 1:
            rows[0]._rows.refuse(f"{func.__name__} with other tensors")
        fqns = ", ".join(each._fqn for each in rows)
        return marked(result, rows[0]._rows, fqns, has_rows=False)


def _reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Another shape for all elements of a gradient."""
    grad = args[0] if args else kwargs["input"]
    with _plainly():
        result = func(*args, **kwargs)
        if not isinstance(grad, RowGradient):  # of another tensor, to the shape of the rows
            return result
        has_rows = grad._has_rows and func in _IN_ORDER and result.shape[:1] == grad.shape[:1]
        return marked(result, grad._rows, grad._fqn, has_rows=has_rows)


def _work_along(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run ``func``, which works along one dimension, unless that is the rows."""
    grad, (place, default) = args[0] if args else kwargs["input"], _DIM_BY_CALL[func]
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    if not isinstance(grad, RowGradient):
        return _keep_rows(func, args, kwargs)
    if not grad._has_rows or not dim % max(1, grad.dim()):
        grad._rows.refuse(f"{func.__name__} along dim 0")
    with _plainly():
        mark = partial(marked, group=grad._rows, fqn=grad._fqn)
        return tree_map_only(Tensor, mark, func(*args, **kwargs))


def _keep_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run ``func``; a result that has the shape of the rows is rows too.

    A comparison with a plain tensor returns a plain one: it compares this rank's rows only.
    Raises ``RuntimeError`` if it makes one number of them: that of this rank's rows only.
    """
    with _plainly():
        result = func(*args, **kwargs)
        if type(result) is not Tensor or (args and result is args[0]):
            return result
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        rows = [each for each in tensors if isinstance(each, RowGradient)]
        others = [each for each in tensors if type(each) is Tensor and each.dim()]
        like = next((each for each in rows if each.shape == result.shape), None)
        if rows and like is None and not result.dim() and func not in _NOT_REDUCTIONS:
            rows[0]._rows.refuse(func.__name__)
        is_compared = others and func in _COMPARISONS
        if like is None or func is Tensor.as_subclass or is_compared:
            return result
        has_rows = all(each._has_rows for each in rows)
        return marked(result, like._rows, like._fqn, has_rows=has_rows)


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
    *("cummax", "cummin", "logcumsumexp", "nanquantile", "softmin"),
    *("softmax", "sort", "std", "std_mean", "topk", "unique", "var", "var_mean"),
)
_PRODUCTS = ("__matmul__", "__rmatmul__", "dot", "einsum", "inner", "matmul", "mm", "mv", "svd",
             "vdot", "tensordot", "vecdot")  # fmt: skip
_ACROSS_ROWS = ("_foreach_max", "corrcoef", "cov", "diag", "diagonal", "diff", "flip", "flipud",
                "histc", "layer_norm", "roll", "rot90", "trace", "tril", "triu")  # fmt: skip


def _calls(names: Iterable[str]) -> list[Callable[..., Any]]:
    """The functions and methods of these names."""
    return [getattr(where, name) for where in (torch, Tensor, functional, torch.linalg)
            for name in names if hasattr(where, name)]  # fmt: skip


_IN_ORDER = frozenset(_calls(("flatten", "ravel", "reshape", "squeeze", "unflatten", "view")))
_RESHAPES = (
    *_IN_ORDER,
    *_calls(("adjoint", "movedim", "moveaxis", "permute", "swapaxes", "swapdims", "t")),
    *_calls(("transpose", "unsqueeze", "view_as", "reshape_as")),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
)
_JOINS = ("cat", "concat", "concatenate", "dstack", "hstack", "stack", "vstack")
_COMPARISONS = frozenset(
    _calls(("__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__", "eq", "ge", "gt",
            "isclose", "le", "lt", "ne"))
)  # fmt: skip
# Where they take the dimension along which they work, and which it is otherwise.
_DIM_BY_CALL = {
    **dict.fromkeys(_calls(("chunk", "split", "tensor_split")), (2, 0)),
    functional.normalize: (2, 1),
}
# Numbers that are not computed from all elements of a gradient.
_NOT_REDUCTIONS = frozenset(
    _calls(("__getitem__", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros",
            "select", "to", "type_as"))
)  # fmt: skip
_HANDLERS: dict[Any, Callable[[Callable[..., Any], tuple[Any, ...], Kwargs], Any]] = {
    **dict.fromkeys(
        (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm), _take_norm
    ),
    torch._foreach_norm: _take_norms,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys(_calls((*_COMBINED_AS, *_REFUSED)), _reduce),
    **dict.fromkeys(_calls(_JOINS), _join),
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys((*_calls((*_PRODUCTS, *_ACROSS_ROWS)), torch.linalg.qr), _refuse),
    **dict.fromkeys(_DIM_BY_CALL, _work_along),
}
