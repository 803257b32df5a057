"""torch.compile of a model's units, on the ranks whose machine supports it.

Each unit is compiled by itself, below the runtime: collectives, microbatches and recomputation
stay outside.  Compiled and eager ranks may train one model together, because they compute the
same sums up to rounding; only dropout draws differ between the two.

    compile_units(module, device)      # before HetFSDP
    model = HetFSDP(module, plan)
"""

import logging
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_leaves

from shardhet.fsdp.sharding.unit import find_units

Backend = str | Callable[..., Any]  # of torch.compile

logger = logging.getLogger(__name__)

# Variants of one unit: with and without gradients, in training and evaluation, for one sample
# and for more, for whole and for growing texts.  With torch's own limit of 8, it would fall
# back to eager in the middle of a run.
MAX_VARIANTS = 64


def compile_units(
    module: nn.Module, device: torch.device, *, backend: Backend = "inductor"
) -> str | None:
    """Compile the forward of every unit that HetFSDP will find in ``module``.

    Returns None, or the reason why it is not possible here; the module is then unchanged.
    Compilation itself happens at the first call; a unit for which it fails runs eagerly.
    """
    reason = why_not(device, backend)
    if reason is None:
        for unit in find_units(module, None):
            for fqn, each in zip(unit.fqns, unit.modules, strict=True):
                each.forward = CompiledForward(fqn, each.forward, backend)
    return reason


def why_not(device: torch.device, backend: Backend = "inductor") -> str | None:
    """Try to compile a sum; returns the compiler's error, or None if it works."""
    try:
        torch.compile(_increment, backend=backend)(torch.zeros(1, device=device))
    except TorchDynamoException as error:
        return _first_line(error)
    return None


def _increment(x: Tensor) -> Tensor:
    return x + 1


class CompiledForward:
    """A module's forward, compiled once for all numbers of samples."""

    def __init__(self, fqn: str, forward: Callable[..., Any], backend: Backend) -> None:
        update_wrapper(self, forward)  # callers inspect its signature
        self._fqn = fqn
        self._forward = forward
        self._is_eager = False
        self._has_run = False
        self._compiled = torch.compile(forward, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_eager:
            return self._forward(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim():
                torch._dynamo.maybe_mark_dynamic(leaf, 0)  # microbatches may be ragged
        try:
            # Random numbers as in eager mode, so that recomputation draws the same as forward.
            with (
                inductor_config.patch(fallback_random=True),
                dynamo_config.patch(recompile_limit=MAX_VARIANTS),
            ):
                output = self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            if self._has_run:  # a compiled forward must not be recomputed eagerly
                error.add_note(f"{self._fqn} cannot be compiled. Set compile=false.")
                raise
            logger.warning("%s runs eagerly: %s", self._fqn, _first_line(error))
            self._is_eager = True
            return self._forward(*args, **kwargs)
        self._has_run = True
        return output


def _first_line(error: Exception) -> str:
    """The line that says what went wrong, not where ("backend='inductor' raised:")."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    num_lines = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:num_lines])
