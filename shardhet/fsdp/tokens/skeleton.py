"""Tries a model of a plan with context groups before its first step, layer by layer alike."""

import copy
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardhet.fsdp.microbatch.batching import flatten
from shardhet.fsdp.microbatch.signature import Arguments
from shardhet.fsdp.tokens.law import FIRST, NUM_TOKENS, by_tokens

WINDOWS = ("sliding_window", "attention_chunk_size")  # which few tokens do not show
_ENDS = NUM_TOKENS - FIRST + 7
# The order of tokens in pieces, of which the first has 7 at the start, and others at the end.
MIRRORED = [*range(7), *range(_ENDS, NUM_TOKENS), *range(7, _ENDS)]


class Skeleton:
    """A model as it was before it was wrapped, without its parameters."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        """Raises ``ValueError`` for what cannot be tried, and sees other tokens."""
        for fqn, each in module.named_modules():
            config = getattr(each, "config", None)
            windows = [name for name in WINDOWS if getattr(config, name, None)]
            if windows or isinstance(each, _BatchNorm):
                what = f"batch norm {fqn!r}" if not windows else f"config.{windows[0]}"
                raise ValueError(
                    f"context groups: the model has {what}, so what it computes of a token "
                    "depends on others otherwise than by attention to all of them. Give it a "
                    "plan without context groups."
                )
        memo: dict[int, Any] = {}
        for held in module.parameters():
            empty = torch.empty_like(held, device="meta")
            memo[id(held)] = nn.Parameter(empty, requires_grad=held.requires_grad)
        self._module, self._live = copy.deepcopy(module, memo), module
        self._loss_fn = loss_fn
        self._tried: set[Hashable] = set()

    def check(self, arguments: Arguments) -> None:
        """Raise ``ValueError`` if such a call gives something else in pieces of its tokens."""
        args, kwargs, loss_inputs = arguments
        leaves, spec = flatten(arguments)
        looks = tuple((x.dtype, x.dim()) if isinstance(x, Tensor) else None for x in leaves)
        key = str(spec), looks, self._live.training
        if key in self._tried:
            return
        pairs = zip(self._module.modules(), self._live.modules(), strict=True)
        for mine, theirs in pairs:
            mine._buffers = dict(theirs._buffers)
        self._module.train(self._live.training)
        function = type(self._module).forward

        def computed(*args: Any, of_loss: Any, **kwargs: Any) -> Any:
            output = function(self._module, *args, **kwargs)
            return output if self._loss_fn is None else self._loss_fn(output, *of_loss)

        tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim() > 1]
        by_tokens(
            type(self._module).__name__,
            self._module,
            computed,
            (args, {**kwargs, "of_loss": loss_inputs}),
            together=True,
            order=MIRRORED if tensors[0].shape[1] >= NUM_TOKENS else None,
        )
        self._tried.add(key)
