"""Switches off KV caches and gradient checkpointing of Hugging Face models while they run.

Their configurations enable ``use_cache`` by default, also in training.  Each microbatch and
each recomputation would append to the cache again, so it is off while a HetFSDP model runs,
as it is under their own gradient checkpointing.  A model that computes something else with a
cache than without (some tell packed sequences by their positions only without) is refused.
Their checkpointing would call units once more in backward; the plan says what is recomputed.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


class CacheSwitch:
    """Switches off ``use_cache`` in all configurations of a model."""

    def __init__(self, module: nn.Module) -> None:
        found = {
            id(config): config
            for each in module.modules()
            for config in _configs(getattr(each, "config", None))
        }
        self._configs = tuple(found.values())
        self._checkpointing: list[Any] = [
            each for each in module.modules() if getattr(each, "gradient_checkpointing", False)
        ]
        if self._checkpointing:
            warnings.warn(
                "gradient_checkpointing of the model has no effect, because the plan says what "
                "each rank recomputes: Plan.by_hand(..., recompute=True).",
                stacklevel=3,
            )
        for config in (each for each in self._configs if each.use_cache):
            try:
                config.use_cache = True
            except Exception as error:  # a frozen class raises anything
                raise ValueError(_FROZEN.format(type(config).__name__)) from error
        self._stays_on = False

    @property
    def is_asked_for(self) -> bool:
        """Whether any configuration asks for a cache."""
        return any(config.use_cache for config in self._configs)

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context in which ``off`` leaves the caches on."""
        self._stays_on = True
        try:
            yield
        finally:
            self._stays_on = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which no configuration asks for a cache."""
        asking = [each for each in self._configs if each.use_cache and not self._stays_on]
        for config in asking:
            config.use_cache = False
        for each in self._checkpointing:
            each.gradient_checkpointing = False
        try:
            yield
        finally:
            for config in asking:
                config.use_cache = True
            for each in self._checkpointing:
                each.gradient_checkpointing = True


@cache
def tell_of_caches() -> None:
    """Say once that they are off."""
    logger.warning(
        "model(...): config.use_cache is True, but HetFSDP trains without KV caches, as "
        "transformers' Trainer does. This model computes the same without one."
    )


_FROZEN = (
    "{}.use_cache is True and cannot be set, but HetFSDP trains without KV caches. Make the "
    "configuration with use_cache=False."
)


def _configs(config: Any) -> list[Any]:
    """Those of ``config`` and its parts (text, vision) that have ``use_cache``."""
    parts = [config, *vars(config).values()] if hasattr(config, "__dict__") else []
    return [part for part in parts if isinstance(getattr(part, "use_cache", None), bool)]
