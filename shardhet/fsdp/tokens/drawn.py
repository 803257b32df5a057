"""Parameters that are drawn for a try of a module."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def random_params(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Random parameters, and copies of buffers.  Layers that are alike have the same ones."""
    by_id: dict[int, Tensor] = {}
    by_kind: dict[Any, Tensor] = {}
    for name, held in module.named_parameters():
        kind = name.split(".")[-2:], held.shape, held.dtype, held.requires_grad
        if str(kind) not in by_kind:
            by_kind[str(kind)] = _random_like(held, device)
        by_id[id(held)] = by_kind[str(kind)]
    names = module.named_parameters(remove_duplicate=False)
    copies = {name: _random_like(each, device) for name, each in module.named_buffers()}
    return {name: by_id[id(each)] for name, each in names} | copies


def _random_like(held: Tensor, device: torch.device) -> Tensor:
    """A random parameter of its shape, in float32 or wider; a copy of a buffer."""
    if isinstance(held, FakeTensor) and not isinstance(held, nn.Parameter):
        return torch.zeros(held.shape, dtype=held.dtype, device=device)
    if not held.is_floating_point():
        return held.detach().clone()
    dtype = torch.promote_types(held.dtype, torch.float32)
    if not isinstance(held, nn.Parameter):
        return held.detach().to(dtype, copy=True)
    made = torch.randn(held.shape, dtype=dtype, device=device)
    made = made * held.shape[-1] ** -0.5 if held.dim() > 1 else 1 + 0.3 * made
    return made.requires_grad_(held.requires_grad)
