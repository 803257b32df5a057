"""Tiles: what a unit computes token by token runs over pieces of the sequence.

A module that keeps the token law (law.py) is a visit within that of its unit, recomputed in
backward, whose samples are tokens and whose microbatches are tiles: the activations of one tile
are there at a time, and gradients of parameters are added up.  Within a unit that the plan
names it is each outermost module whose graph holds about as much as its arguments and results;
a module that the plan names itself is refused if it does not keep the law.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from shardhet.fsdp.microbatch.batching import BatchAxis, Layout, flatten
from shardhet.fsdp.microbatch.joining import spans_of
from shardhet.fsdp.microbatch.layered import Visit, run_visit, tensors_in
from shardhet.fsdp.sharding.unit import UnitModule
from shardhet.fsdp.tokens.law import ByTokens, NotByTokensError, axes_of, by_tokens
from shardhet.records.plan import RankPlan

# A module is worth its recomputation if its graph holds as much, per byte of its arguments and
# results: all but single products, lookups and fused norms.
LEAST_KEPT = 0.5
logger = logging.getLogger(__name__)


class Tiles:
    """Makes the functions of units' visits on a rank, and knows what keeps the token law."""

    def __init__(self, rank_plan: RankPlan, device: torch.device) -> None:
        self._plan = rank_plan
        self._device = device
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._known: dict[Hashable, ByTokens | str] = {}  # or why not
        self._is_inside = False  # of a module that runs in tiles, or is tried
        self._is_probe = False
        self._is_unused = False  # whether nobody looks at results of the next call

    def function_of(
        self, module: UnitModule, *, recomputes: bool = False, is_probe: bool = False
    ) -> Callable[..., Any]:
        """The forward of a unit's module, in tiles where the plan says so.

        ``recomputes``: its visit runs it once more in backward, with gradients enabled.
        """
        # What is compiled is called on pieces as a whole; torch has seen what is inside it.
        is_compiled = _is_compiled(module.forward)
        inside = [
            (f"{module.fqn}.{name}", each)
            for name, each in module.module.named_modules()
            if name
            and not is_compiled
            and (self._plan.tiles(module.fqn) or self._plan.tiles(f"{module.fqn}.{name}"))
        ]
        if not (inside or self._plan.tiles(module.fqn)):
            return module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._is_probe = is_probe
            with self._intercepted(inside, module.fqn):
                if not self._plan.tiles(module.fqn):
                    return module.forward(*args, **kwargs)
                own = self._call(module.fqn, module.module, module.forward, False)
                # Of what is repeated, the values of a unit's own results are of no use.
                self._is_unused = recomputes and torch.is_grad_enabled()
                return own(*args, **kwargs)

        return forward

    @contextmanager
    def _intercepted(
        self, inside: list[tuple[str, nn.Module]], unit_fqn: str
    ) -> Iterator[None]:
        is_named = not self._plan.tiles(unit_fqn)
        before = [vars(each).get("forward") for _, each in inside]
        for fqn, each in inside:
            each.forward = self._call(fqn, each, each.forward, is_named)
        try:
            yield
        finally:
            for (_, each), forward in zip(inside, before, strict=True):
                if forward is None:
                    del each.forward
                else:
                    each.forward = forward

    def _call(
        self, fqn: str, module: nn.Module, function: Callable[..., Any], is_named: bool
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_unused, self._is_unused = self._is_unused, False
            if self._is_inside:
                return function(*args, **kwargs)
            leaves, spec = flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            try:
                number, axes = axes_of(fqn, tensors)
                key = (fqn, Layout.of(leaves, spec), tuple(axes), module.training)
                found = None
                if number > self._plan.tokens_per_tile:
                    found = self._found(key, module, function, (args, kwargs))
            except NotByTokensError as reason:
                if is_named:
                    raise ValueError(
                        f"{reason}, so it cannot be computed in tiles. Leave it out of "
                        "Plan.by_hand(tiles=[...])."
                    ) from None
                found = None
            if found is None or not (is_named or found.kept_ratio >= LEAST_KEPT):
                return function(*args, **kwargs)
            needs_grad = torch.is_grad_enabled() and any(
                each.requires_grad for each in (*tensors, *module.parameters())
            )
            with self._inside():
                visit = self._visit(fqn, function, found, number, is_unused=is_unused)
                return run_visit(visit, self._anchor if needs_grad else None, leaves)

        return call

    def _found(
        self, key: Any, module: nn.Module, function: Callable[..., Any], arguments: Any
    ) -> ByTokens:
        """How such a call is cut; raises ``NotByTokensError``, also if it was tried before."""
        if _joins_samples(self._known.get(key)):
            key = (*key, *(leaf.shape for leaf in tensors_in(arguments)))
        if key not in self._known:
            try:
                with self._inside(), _disable_current_modes():
                    found = by_tokens(key[0], module, function, arguments)
                if found.draws:  # of one process, that draws once for all tokens
                    raise NotByTokensError(f"{key[0]}: it draws random numbers (dropout)")
                self._known[key] = found
            except NotByTokensError as reason:
                logger.info("tiles: not of %s", reason)
                self._known[key] = str(reason)  # its frames would hold the arguments
        known = self._known[key]
        if isinstance(known, str):
            raise NotByTokensError(known)
        return known

    def _visit(
        self,
        fqn: str,
        function: Callable[..., Any],
        found: ByTokens,
        number: int,
        *,
        is_unused: bool,
    ) -> Visit:
        """The visit of a module whose samples are so many tokens."""
        whole, rest = divmod(number, size := self._plan.tokens_per_tile)
        return Visit(
            unit_fqn=fqn,
            function=function,
            rules=found.rules,
            spans=spans_of((size,) * whole + ((rest,) if rest else ())),
            recomputes=True,
            param_storages=frozenset(),
            device_type=self._device.type,
            around=(),
            only_inputs=self._is_probe,
            only_backward=is_unused,
        )

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False


def _joins_samples(known: ByTokens | str | None) -> bool:
    """Whether rules may be of one number of samples alone: results have rows of samples and
    tokens in one dimension, as those of a router.
    """
    return isinstance(known, ByTokens) and any(
        isinstance(rule, BatchAxis) and not rule.dim for rule in known.rules.outputs
    )


def _is_compiled(function: Any) -> bool:
    while function is not None and not hasattr(function, "_compiled"):
        function = getattr(function, "__wrapped__", None)
    return function is not None
