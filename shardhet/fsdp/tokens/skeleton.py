"""Tries a model of a plan with context groups before its first step, layer by layer alike."""

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardhet.fsdp.microbatch.batching import flatten
from shardhet.fsdp.microbatch.layered import tensors_in
from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.microbatch.signature import Arguments, BatchDims
from shardhet.fsdp.microbatch.surroundings import CacheSwitch
from shardhet.fsdp.probing.comparing import are_close
from shardhet.fsdp.tokens import law
from shardhet.fsdp.tokens.attention import attending_by, attention
from shardhet.fsdp.tokens.cutting import MASK, POSITIONS
from shardhet.fsdp.tokens.law import FIRST, NUM_TOKENS, MixesTokensError, NotByTokensError

WINDOWS = ("sliding_window", "attention_chunk_size")  # which few tokens do not show
COMPILED = ("CompiledForward", "OptimizedModule")  # which may have compiled attention already
REMEDY = (
    ". A device has only its own tokens of a sample: take positions as an argument "
    "position_ids of forward, which is filled in, and let tokens meet in "
    "F.scaled_dot_product_attention alone; or give a plan without context groups."
)
_ENDS = NUM_TOKENS - FIRST + 7
# The order of tokens in pieces, of which the first has 7 at the start, and others at the end.
MIRRORED = [*range(7), *range(_ENDS, NUM_TOKENS), *range(7, _ENDS)]


class Skeleton:
    """A model as it was before it was wrapped, without its parameters."""

    def __init__(self, module: nn.Module, loss: FusedLoss, batch_dim: BatchDims) -> None:
        """Raises ``ValueError`` for what a try does not show."""
        if batch_dim != 0:
            raise ValueError(
                f"context groups: batch_dim is {batch_dim!r} but samples must be in the first "
                "dimension, and tokens in the second. Leave it out."
            )
        for fqn, each in module.named_modules():
            if (what := _beyond_a_try(fqn, each)) is not None:
                raise ValueError(
                    f"context groups: the model has {what}, which devices that share samples "
                    "by tokens cannot have. Leave it out, or give it a plan without groups."
                )
        memo: dict[int, Any] = {}
        for held in module.parameters():
            empty = torch.empty_like(held, device="meta")
            memo[id(held)] = nn.Parameter(empty, requires_grad=held.requires_grad)
        self._module, self._live = copy.deepcopy(module, memo), module
        self._loss, self._caches = loss, CacheSwitch(self._module)
        self._tried: set[Hashable] = set()

    def check(self, arguments: Arguments, begins_padded: bool) -> None:
        """Raise ``ValueError`` if such a call gives something else in pieces of its tokens, or
        without the positions that it was filled with.
        """
        args, kwargs, loss_inputs = arguments
        at = kwargs.get(POSITIONS)
        is_filled = at is not None and bool((at == torch.arange(at.shape[-1]).to(at)).all())
        leaves, spec = flatten(arguments)
        looks = tuple((x.dtype, x.dim()) if isinstance(x, Tensor) else None for x in leaves)
        key = str(spec), looks, self._live.training, is_filled, begins_padded
        if key in self._tried:
            return
        pairs = zip(self._module.modules(), self._live.modules(), strict=True)
        for mine, theirs in pairs:
            mine._buffers = dict(theirs._buffers)
        self._module.train(self._live.training)

        def computed(*args: Any, of_loss: Any, **kwargs: Any) -> Any:
            nonlocal is_filled
            with self._caches.off():
                output = self._module(*args, **kwargs)
                if is_filled:  # of the whole, which is computed first
                    is_filled = False
                    with attending_by(attention):  # calls of attention are counted
                        self._check_positions(args, kwargs, begins_padded=begins_padded)
            if self._loss.loss_fn is None or self._loss.leaves_out(of_loss):
                return output
            return self._loss.loss_fn(output, *of_loss)

        tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim() > 1]
        try:
            law.by_tokens(
                type(self._module).__name__,
                self._module,
                computed,
                (args, {**kwargs, "of_loss": loss_inputs}),
                together=True,
                order=MIRRORED if tensors[0].shape[1] >= NUM_TOKENS else None,
            )
        except MixesTokensError as reason:
            raise ValueError(f"context groups: {reason}{REMEDY}") from None
        self._tried.add(key)

    def _check_positions(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, begins_padded: bool
    ) -> None:
        """Raise if the model itself does not count tokens 0, 1, 2, ..., padding among them."""
        mask = kwargs.get(MASK)
        if mask is not None and begins_padded:
            kwargs = {**kwargs, MASK: mask.index_fill(1, mask.new_tensor([0, 1]).long(), 0)}
        without = {name: value for name, value in kwargs.items() if name != POSITIONS}
        found = [
            [
                each[kwargs[MASK] > 0] if mask is not None and _is_like(each, mask) else each
                for each in tensors_in(self._module(*args, **given))
            ]
            for given in (kwargs, without)
        ]
        eps = torch.finfo(torch.float32).eps
        if not all(are_close(a, b, eps) for a, b in zip(*found, strict=True)):
            raise NotByTokensError(
                f"context groups: {type(self._module).__name__} counts positions of tokens in "
                f"another way than 0, 1, 2, ... Pass it {POSITIONS}, as it counts them."
            )


def _is_like(tensor: Tensor, mask: Tensor) -> bool:
    return tensor.shape[:2] == mask.shape


def _beyond_a_try(fqn: str, module: nn.Module) -> str | None:
    """What the module has of which a try on few tokens says nothing; or None."""
    config = getattr(module, "config", None)
    windows = [name for name in WINDOWS if getattr(config, name, None)]
    if windows:
        return f"config.{windows[0]}={getattr(config, windows[0])}"
    if isinstance(module, _BatchNorm):
        return f"batch norm {fqn!r}"
    forward = type(vars(module).get("forward", module)).__name__
    is_compiled = module._compiled_call_impl is not None or forward in COMPILED
    return f"a compiled module, {fqn!r}" if is_compiled else None
