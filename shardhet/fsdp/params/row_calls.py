"""What rows alone suffice for, among functions of torch and operations, by their names."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardhet.fsdp.microbatch.modes import EagerMode

REFUSED = (
    *("argmax", "argmin", "argsort", "aminmax", "cumprod", "cumsum", "kthvalue", "logsumexp"),
    *("log_softmax", "median", "mode", "nanmean", "nanmedian", "nansum", "prod", "quantile"),
    *("cummax", "cummin", "logcumsumexp", "nanquantile", "softmin"),
    *("softmax", "sort", "std", "std_mean", "topk", "unique", "var", "var_mean"),
)
# Operations that work element by element, or make a tensor, and have no tag of torch's for it.
BY_ELEMENT = frozenset((
    "_conj", "_local_scalar_dense", "_neg_view", "_pin_memory", "_to_copy", "alias",
    "bernoulli", "bernoulli_", "binary_cross_entropy", "cauchy_", "complex", "copy", "copy_",
    "detach", "detach_", "empty", "empty_like", "empty_strided", "equal", "expand",
    "exponential_", "fill", "fill_", "full", "full_like", "geometric_", "huber_loss",
    "is_pinned", "is_same_size", "lift_fresh", "log_normal_", "log_sigmoid_forward",
    "masked_fill_", "mse_loss", "native_dropout", "new_empty", "new_empty_strided", "new_full",
    "new_ones", "new_zeros", "normal_", "ones", "ones_like", "polar", "rand_like",
    "randint_like", "randn_like", "random_", "scalar_tensor", "set_", "smooth_l1_loss",
    "uniform_", "view", "view_as_real", "zero_", "zeros", "zeros_like",
))  # fmt: skip
_known = set[Any]()  # functions, each with a number of arguments and names of others


class _Operations(EagerMode):
    """Notes whether the operations that run while it is entered work element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.has_run = False
        self.mixes = False  # one of them does not

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        is_known = torch.Tag.pointwise in func.tags or name in BY_ELEMENT
        self.has_run = True
        self.mixes |= not (is_known or name.startswith(("_foreach_", "_fused_")))
        return func(*args, **kwargs)


def run_by_element(
    func: Callable[..., Any], args: Any, kwargs: Any, *, refuse: Callable[..., None]
) -> Any:
    """Run ``func``; call ``refuse``, unless all that runs is known to work by element.

    That is found once for each function, number of arguments, and names of others.
    """
    form = func, len(args), *kwargs
    if form in _known:
        return func(*args, **kwargs)
    with _Operations() as seen:
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError):
            if seen.mixes or not seen.has_run:
                refuse(func, args, kwargs)
            raise
    if seen.mixes:
        refuse(func, args, kwargs)
    else:
        _known.add(form)
    return result


def calls(names: Iterable[str]) -> list[Callable[..., Any]]:
    """The functions and methods of these names."""
    places = torch, Tensor, functional, torch.linalg, torch.special, torch.fft
    return [getattr(where, name) for where in places for name in names if hasattr(where, name)]
