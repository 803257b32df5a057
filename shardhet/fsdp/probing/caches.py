"""Switches off KV caches of Hugging Face models, which only generation needs.

Their configurations enable ``use_cache`` by default, also in training.  Each microbatch and
each recomputation would append to the cache again, so it is off while a HetFSDP model runs,
as it is under their own gradient checkpointing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class CacheSwitch:
    """Switches off ``use_cache`` in all configurations of a model."""

    def __init__(self, module: nn.Module) -> None:
        found = {
            id(config): config
            for each in module.modules()
            for config in _configs(getattr(each, "config", None))
        }
        self._configs = tuple(found.values())

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which no configuration asks for a cache."""
        asking = [config for config in self._configs if config.use_cache]
        for config in asking:
            config.use_cache = False
        try:
            yield
        finally:
            for config in asking:
                config.use_cache = True


def _configs(config: Any) -> list[Any]:
    """Those of ``config`` and its parts (text, vision) that have ``use_cache``."""
    parts = [config, *vars(config).values()] if hasattr(config, "__dict__") else []
    return [part for part in parts if isinstance(getattr(part, "use_cache", None), bool)]
