"""Functions of torch, by their names, that rows alone do not suffice for."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

REFUSED = (
    *("argmax", "argmin", "argsort", "aminmax", "cumprod", "cumsum", "kthvalue", "logsumexp"),
    *("log_softmax", "median", "mode", "nanmean", "nanmedian", "nansum", "prod", "quantile"),
    *("cummax", "cummin", "logcumsumexp", "nanquantile", "softmin"),
    *("softmax", "sort", "std", "std_mean", "topk", "unique", "var", "var_mean"),
)
PRODUCTS = ("addmm", "bilinear", "bmm", "cdist", "conv1d", "conv2d", "embedding", "linear",
             "__matmul__", "__rmatmul__", "dot", "einsum", "inner", "matmul", "mm", "mv",
             "outer", "svd", "vdot", "tensordot", "vecdot")  # fmt: skip
ACROSS_ROWS = ("gather", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill",
                "index_fill_", "index_put_", "masked_scatter_", "put_", "renorm", "scatter",
                "scatter_", "scatter_add_", "take", "take_along_dim", "tril_", "triu_",
                "_foreach_max", "corrcoef", "cov", "diag", "diagonal", "diff", "flip", "flipud",
                "histc", "layer_norm", "roll", "rot90", "trace", "tril", "triu",
                "batch_norm", "group_norm", "gumbel_softmax", "instance_norm", "gradient",
                "local_response_norm", "msort", "fft", "fft2", "fftn", "ifft", "ifft2",
                "ifftn")  # fmt: skip


def calls(names: Iterable[str]) -> list[Callable[..., Any]]:
    """The functions and methods of these names."""
    places = torch, Tensor, functional, torch.linalg, torch.special, torch.fft
    return [getattr(where, name) for where in places for name in names if hasattr(where, name)]
