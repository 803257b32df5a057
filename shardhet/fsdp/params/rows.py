"""Parameters and gradients of rows: a reduction of one to a number is over all its rows.

``torch.nn.utils.clip_grad_norm_``, ``torch.amp.GradScaler`` and loops that look for NaN or
normalize weights reduce rows to one number, on each rank separately.  So a HetFSDP's parameters
(row_params.py) and their ``.grad`` are ``ShardTensor``s, which behave like any other tensor
except in these calls:

    linalg.vector_norm, norm, _foreach_norm   a ``ShardNorm``: this rank's part of a norm
    stack of ShardNorm, the norm of that      one number, agreed on by all ranks (clip_grad)
    any other use of a ShardNorm              the norm of the whole parameter, likewise
    _amp_foreach_non_finite_check_and_unscale_  sets found_inf if any rank found one
    sum, mean, max, min, any, all             over the whole parameter, at once; along any
                                              dimension but the first, of each row as usual,
                                              and the rows' numbers are rows again
    elementwise, with a whole tensor          takes the same rows of that
    elementwise, with rows that are cut       gathers those
    otherwise (of another parameter)
    rows[i], rows[i:j], rows[mask]            rows as they are numbered in the whole; a rank
                                              may have none of them
    item, float, int, bool                    of a parameter that is one number, on every rank
    cat, stack, T, transpose, view, ...       a ShardTensor, which is reduced as a whole only
                                              if its first dimension is not the rows
    var, std, median, argmax, sort, ...       refused, except along other dimensions
    what runs an operation that is not known  refused (row_calls.py)
    to work by element: matmul, roll, ...
    chunk, split, unbind, normalize           ShardTensor; refused along the first dimension
    anything else that keeps the shape        a ShardTensor
    anything else that returns a tensor       refused

``rows.as_subclass(torch.Tensor)`` is a plain tensor of the same rows.  A number that is made of
a parameter with gradients enabled has a graph: its gradient reaches rows, and is refused.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shardhet.fsdp.microbatch.modes import FunctionTensor, OperationMode
from shardhet.fsdp.params.host_step import host_threads
from shardhet.fsdp.params.row_calls import REFUSED, calls, run_by_element
from shardhet.fsdp.params.row_group import (
    Rows,
    ShardNorm,
    local_norm,
    order_and_dims,
    vector_norm,
)

Kwargs = dict[str, Any]
_plainly = torch._C.DisableTorchFunctionSubclass


class ShardTensor(FunctionTensor):
    """This rank's rows.  The docstring of the file says how they behave."""

    _of: Rows
    _has_rows: bool  # whether its first dimension is the rows

    @classmethod
    def _call(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Run ``func`` as on a plain tensor, unless it reduces or is refused; a probe decides
        on operations itself.
        """
        if any(isinstance(mode, OperationMode) for mode in _get_current_dispatch_mode_stack()):
            with _plainly():
                return func(*args, **kwargs)
        handle = _HANDLERS.get(func, _keep_rows)
        return handle(func, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with _plainly():
            return self.as_subclass(Tensor).clone()


def marked(tensor: Tensor, of: Rows, *, has_rows: bool = True) -> ShardTensor:
    """``tensor`` as a ShardTensor, in the same memory."""
    if isinstance(tensor, ShardTensor):
        return tensor
    rows = tensor.as_subclass(ShardTensor)
    rows._of, rows._has_rows = of, has_rows
    return rows


def _take_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    grad = args[0] if args else kwargs.get("x", kwargs.get("input", kwargs.get("A")))
    others = (args[1:], {k: v for k, v in kwargs.items() if k not in ("x", "input", "A")})
    order, dims = order_and_dims(func, (grad, *others[0]), others[1])
    if not isinstance(grad, ShardTensor):  # another argument is rows, such as `out`
        with _plainly():
            return func(*args, **kwargs)
    if grad._has_rows and dims and all(dim % max(1, grad.dim()) for dim in dims):
        return _of_each_row(func, args, kwargs)
    if dims or order is None or others[1].get("out") is not None:
        grad._of.refuse(f"{getattr(func, '__name__', func)} along dim 0 or as a matrix norm")
    with _plainly():
        assert order is not None
        local = local_norm(grad, order)
        if (dtype := others[1].get("dtype")) is not None:
            local = local_norm(grad.to(dtype), order)
        norm = ShardNorm.of([(grad._of.group, local.detach())], order, is_vector=False)
        return _with_value(local, norm.resolved()) if _is_tracked(grad) else norm


def _is_tracked(rows: Tensor) -> bool:
    return torch.is_grad_enabled() and rows.requires_grad


def _with_value(local: Tensor, whole: Tensor) -> Tensor:
    """``local`` with the value of all ranks; gradients of it reach rows and are refused."""
    local.data.copy_(whole)
    return local


def _take_norms(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """``torch._foreach_norm``."""
    grads, *rest = args
    with _plainly():
        order = float(rest[0] if rest else kwargs.get("ord", 2.0))
        if any(map(_is_tracked, grads)):
            return [_take_norm(vector_norm, (grad, order), {}) for grad in grads]
        filled = [grad for grad in grads if grad.numel()]
        others = {name: value for name, value in kwargs.items() if name != "ord"}
        rows = next((grad._of.group for grad in grads if isinstance(grad, ShardTensor)), None)
        with host_threads(rows.comm) if rows else nullcontext():
            norms = iter(torch._foreach_norm(filled, order, **others) if filled else ())
        parts = [
            (
                g._of.group if isinstance(g, ShardTensor) else None,
                next(norms) if g.numel() else local_norm(g, order),
            )
            for g in grads
        ]
    return [ShardNorm.of([part], order, is_vector=False) for part in parts]


def _reduce(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Reductions such as ``sum``: over all ranks, unless they are within each row."""
    grad = args[0] if args else kwargs.get("input")
    name = func.__name__
    is_whole, rest = _what_is_reduced(name, grad, args[1:], kwargs)
    if not isinstance(grad, ShardTensor) or is_whole is None:
        return _keep_rows(func, args, kwargs)
    if not is_whole:
        return _of_each_row(func, args, kwargs)
    if name not in _COMBINED_AS or rest:
        grad._of.refuse(f"{name}{' along dim 0' if rest else ''}")
    with _plainly():
        dtype = {"dtype": kwargs["dtype"]} if kwargs.get("dtype") is not None else {}
        some = grad if grad.numel() else grad.new_zeros(1)
        local = func(some, **dtype)
        kind = _COMBINED_AS[name]
        whole = grad._of.reduce(float(local.detach()), grad.numel(), kind)
        return _with_value(local, torch.full_like(local, whole))


def _what_is_reduced(
    name: str, grad: Any, args: tuple[Any, ...], kwargs: Kwargs
) -> tuple[bool | None, bool]:
    """Whether the call reduces over rows, and whether it asks for more than one number.

    None: it does not reduce.
    """
    others = {k for k in kwargs if k not in ("input", "dtype", "dim") and kwargs[k] is not None}
    if "quantile" in name:  # whose second argument is no dimension, and whose first may be one
        return True, True
    if name in ("kthvalue", "topk"):
        args = args[1:]
    if (args and isinstance(args[0], Tensor)) or isinstance(kwargs.get("other"), Tensor):
        return None, False  # elementwise maximum or minimum of two tensors
    numbers = tuple(each for each in (kwargs.get("dim"), *args) if type(each) is int)
    dims = numbers or kwargs.get("dim", args[0] if args else None)
    if dims is None or not isinstance(dims, tuple | list):
        return True, bool(others or args[1:])
    num_dims = max(1, grad.dim())
    if dims and all(dim % num_dims for dim in dims) and getattr(grad, "_has_rows", True):
        return False, False
    is_all = len({dim % num_dims for dim in dims} or range(num_dims)) == num_dims
    return True, bool(others or args[1:]) or not is_all or name in ("max", "min")


def _refuse(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> None:
    """Raise if ``func``, which needs more than rows, gets any."""
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, ShardTensor):
            each._of.refuse(func.__name__)


def _unscale(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> None:
    """``torch._amp_foreach_non_finite_check_and_unscale_``, called by GradScaler."""
    grads, found_inf, *_ = args
    with _plainly():
        groups = dict.fromkeys(g._of.group for g in grads if isinstance(g, ShardTensor))
        for group in groups:
            group.wait_for_device(grads)
        with host_threads(next(iter(groups)).comm) if groups else nullcontext():
            func(*args, **kwargs)
        for group in groups:
            group.agree_on_inf(found_inf)


def _of_each_row(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run ``func``, which works within each row; its results have a row for each."""
    rows = next(each for each in (*args, *kwargs.values()) if isinstance(each, ShardTensor))
    with _plainly():
        mark = partial(marked, of=rows._of)
        return tree_map_only(Tensor, mark, func(*args, **kwargs))


def _join(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """``torch.cat`` and the like: what all ranks have together are the whole gradients."""
    with _plainly():
        result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        rows = [each for each in tensors if isinstance(each, ShardTensor)]
        of = rows[0]._of
        if len(rows) < len(tensors) or any(each._of.group is not of.group for each in rows):
            of.refuse(f"{func.__name__} with other tensors")
        return marked(result, Rows.of_all([each._of for each in rows]), has_rows=False)


def _reshape(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Another shape for all elements."""
    grad = args[0] if args else kwargs["input"]
    with _plainly():
        result = func(*args, **kwargs)
        if not isinstance(grad, ShardTensor):  # of another tensor, to the shape of the rows
            return result
        is_in_order = func in _IN_ORDER and result.shape[:1] == grad.shape[:1]
        if func in _LIKE and isinstance(args[1], ShardTensor):  # a piece of a vector
            return marked(result, args[1]._of, has_rows=args[1]._has_rows)
        if func in _UNSQUEEZE:
            is_in_order = bool(kwargs.get("dim", args[-1]) % (grad.dim() + 1))
        has_rows = grad._has_rows and is_in_order
        return marked(result, grad._of, has_rows=has_rows)


def _work_along(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run ``func``, which works along one dimension, unless that is the rows."""
    grad, (place, default) = args[0] if args else kwargs["input"], _DIM_BY_CALL[func]
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    if not isinstance(grad, ShardTensor):
        return _keep_rows(func, args, kwargs)
    if not grad._has_rows or not dim % max(1, grad.dim()):
        grad._of.refuse(f"{func.__name__} along dim 0")
    return _of_each_row(func, args, kwargs)


def _keep_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run ``func``; a result that has the shape of the rows is rows too.

    A comparison with a plain tensor returns a plain one: it compares this rank's rows only.
    Raises ``RuntimeError`` if it makes something else of them, which would be of these alone.
    """
    with _plainly():
        if (kwargs or len(args) > 1) and func.__name__ != "__set__":
            args, kwargs = _aligned(func, args, kwargs)
        result = run_by_element(func, args, kwargs, refuse=_refuse)
        if isinstance(result, list | tuple) and func.__name__.startswith("_foreach_"):
            return [_marked_in(args, i, each) for i, each in enumerate(result)]
        if isinstance(result, list | tuple):
            mark = partial(_marked_as, func, args, kwargs)
            return tree_map_only(Tensor, mark, result)
        if type(result) is not Tensor or (args and result is args[0]):
            return result
        return _marked_as(func, args, kwargs, result)


def _marked_as(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs, result: Tensor
) -> Tensor:
    """A result of ``func`` as rows, if it is."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    rows = [each for each in tensors if isinstance(each, ShardTensor)]
    others = [each for each in tensors if type(each) is Tensor and each.dim()]
    like = next((each for each in rows if each.shape == result.shape), None)
    if rows and like is None and func not in _OF_OTHER_SHAPE:
        rows[0]._of.refuse(func.__name__)
    is_compared = others and func in _COMPARISONS
    if like is None or func is Tensor.as_subclass or is_compared:
        return result
    return marked(result, like._of, has_rows=all(each._has_rows for each in rows))


def _marked_in(args: tuple[Any, ...], place: int, result: Tensor) -> Tensor:
    """A result of a ``_foreach_`` function: rows, if a tensor of that place is."""
    lists = (each for each in args if isinstance(each, list | tuple))
    rows = [each[place] for each in lists if isinstance(each[place], ShardTensor)]
    if not rows:
        return result
    return marked(result, rows[0]._of, has_rows=all(each._has_rows for each in rows))


def _aligned(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs
) -> tuple[tuple[Any, ...], Kwargs]:
    """The arguments, each tensor with the same rows.  Collective if some have others."""
    leaves, spec = tree_flatten((args, kwargs))
    if args and isinstance(args[0], list | tuple):
        if not func.__name__.startswith("_foreach_"):
            return args, kwargs
        num = len(args[0])  # each tensor of a list with those of its place
        lists = [list(each) for each in args if isinstance(each, list | tuple)]
        places = [_of_same_rows([each[i] for each in lists]) for i in range(num)]
        done = iter([list(each) for each in zip(*places, strict=True)])
        return tuple(next(done) if isinstance(a, list | tuple) else a for a in args), kwargs
    same = _of_same_rows(leaves)
    if same and same[0] is not leaves[0] and _IN_PLACE.search(func.__name__):
        next(each for each in same if isinstance(each, ShardTensor))._of.refuse(
            f"{func.__name__} into a whole tensor"
        )
    return tree_unflatten(same, spec)


def _of_same_rows(values: list[Any]) -> list[Any]:
    """The operands of an elementwise function, of which each tensor has the same rows."""
    values = [each.resolved() if isinstance(each, ShardNorm) else each for each in values]
    of_rows = [each for each in values if isinstance(each, ShardTensor)]
    rows = [each for each in of_rows if each._has_rows]
    if not rows:
        return values
    if len(rows) < len(of_rows):
        rows[0]._of.refuse("a call with elements in another order")
    like = max(rows, key=Tensor.dim)

    def rows_of(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if value.dim() == like.dim():
            return rows_in(value, like)
        return value._of.whole(value) if isinstance(value, ShardTensor) else value

    return [rows_of(each) for each in values]


def rows_in(value: Tensor, like: ShardTensor) -> Tensor:
    """The rows of ``value`` that this rank has of ``like``."""
    here = like._of.here
    if isinstance(value, ShardTensor) and value._has_rows:
        if value._of.cut == like._of.cut:
            return value
        value = value._of.whole(value)
    elif value.shape[0] == like.shape[0]:
        return value
    return value[here.start : here.stop] if value.shape[0] == like._of.num else value


def _index(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """``rows[i:j]``, numbered as in the whole, of which any may be elsewhere; ``rows[mask]``.

    ``rows[i]`` is ``rows[i:i + 1]``.
    """
    rows, index, *values = args
    with _plainly():
        if not isinstance(rows, ShardTensor):
            return func(*args)
        of, has_rows = rows._of, rows._has_rows
        first, *others = index if isinstance(index, tuple) and index else (index,)
        if isinstance(first, int) and has_rows:
            if not -of.num <= first < of.num:
                raise IndexError(f"{of.fqn}: index {first} is out of bounds for {of.num} rows")
            first = slice(first % of.num, first % of.num + 1)
        if isinstance(first, slice) and has_rows and first.step in (None, 1):
            of, first = of.part(*first.indices(of.num)[:2])
        elif isinstance(first, Tensor) and first.dtype is torch.bool:
            first, has_rows = rows_in(first, rows), False
        elif first is Ellipsis and len(others) < rows.dim():
            pass
        elif has_rows or not isinstance(first, slice):  # one of a vector of several parameters
            of.refuse("an index along dim 0")
        place = marked(rows.as_subclass(Tensor)[first, *others], of, has_rows=has_rows)
        if not values:
            return place
        [value] = values
        _, value = _of_same_rows([place, value]) if has_rows else (None, value)
        return func(rows, (first, *others), value)


def _number(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """The one number that a parameter is (a temperature), which one rank stores."""
    with _plainly():
        [rows] = args
        if rows._of.num * rows.shape[1:].numel() == 1 and rows._has_rows:
            rows = torch.full_like(rows.sum(), rows._of.reduce(float(rows.sum()), 1, "sum"))
        return func(rows)


_IN_PLACE = re.compile(r"^__i|[^_]_$")
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
_IN_ORDER = frozenset(calls(("flatten", "ravel", "reshape", "squeeze", "unflatten", "view")))
_LIKE = (Tensor.view_as, Tensor.reshape_as)
_UNSQUEEZE = (torch.unsqueeze, Tensor.unsqueeze)
_RESHAPES = (
    *_IN_ORDER,
    *calls(("adjoint", "movedim", "moveaxis", "permute", "swapaxes", "swapdims", "t")),
    *calls(("transpose",)),
    *_LIKE,
    *_UNSQUEEZE,
    *(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH")),
)
_JOINS = ("cat", "concat", "concatenate", "dstack", "hstack", "stack", "vstack")
_COMPARISONS = frozenset(
    calls(("__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__", "eq", "ge", "gt",
            "isclose", "le", "lt", "ne"))
)  # fmt: skip
# Where they take the dimension along which they work, and which it is otherwise.
_DIM_BY_CALL = {
    **dict.fromkeys(calls(("chunk", "split", "tensor_split")), (2, 0)),
    **dict.fromkeys(calls(("unbind",)), (1, 0)),
    functional.normalize: (2, 1),
}
# Results of another shape that are not computed from the elements.
_OF_OTHER_SHAPE = frozenset(
    calls(("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to", "type_as"))
)
_HANDLERS: dict[Any, Callable[[Callable[..., Any], tuple[Any, ...], Kwargs], Any]] = {
    **dict.fromkeys(
        (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm), _take_norm
    ),
    torch._foreach_norm: _take_norms,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys(calls((*_COMBINED_AS, *REFUSED)), _reduce),
    **dict.fromkeys(calls(_JOINS), _join),
    **dict.fromkeys(_RESHAPES, _reshape),
    torch._foreach_max: _refuse,
    torch.autograd.grad: _refuse,
    **dict.fromkeys(_DIM_BY_CALL, _work_along),
    **dict.fromkeys((Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__), _number),
    **dict.fromkeys((Tensor.__getitem__, Tensor.__setitem__), _index),
}
