"""KV caches of Hugging Face models, which only generation needs.

``use_cache`` is on by default in their configurations, in training too.  A cache that every
block appends to would be appended to again by each microbatch and each recomputation, so it is
off while a HetFSDP model runs, as it is under their own gradient checkpointing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class CacheSwitch:
    """The configurations in a model that ask for a cache."""

    def __init__(self, module: nn.Module) -> None:
        found = {
            id(config): config
            for each in module.modules()
            for config in _configs(getattr(each, "config", None))
        }
        self._configs = tuple(found.values())

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, none of them does."""
        asking = [config for config in self._configs if config.use_cache]
        for config in asking:
            config.use_cache = False
        try:
            yield
        finally:
            for config in asking:
                config.use_cache = True


def _configs(config: Any) -> list[Any]:
    """``config`` and those inside of it, of text and vision parts, that know ``use_cache``."""
    parts = [config, *vars(config).values()] if hasattr(config, "__dict__") else []
    return [part for part in parts if isinstance(getattr(part, "use_cache", None), bool)]
