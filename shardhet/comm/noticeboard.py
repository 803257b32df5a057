"""Texts that ranks leave for each other, from any thread and without a collective."""

from contextlib import suppress
from typing import Any

from shardhet.comm.channel import Channel


class Noticeboard:
    """One text per position of a channel, kept in the rendezvous store under ``topic``.

    A topic is used once.  ``store`` is None if there is only one process.
    """

    def __init__(self, store: Any | None, topic: str, world_size: int) -> None:
        self._store = store
        self._topic = topic
        self._texts: dict[int, str] = {}  # if there is no store
        self._world_size = world_size

    @classmethod
    def of(cls, channel: Channel, topic: str) -> "Noticeboard":
        """Return a board among the processes of ``channel``."""
        group: Any = channel.group
        store = None if group is None else group.get_group_store()
        return cls(store, topic, channel.world_size)

    def post(self, position: int, text: str) -> None:
        """Leave ``text`` for the others."""
        if self._store is None:
            self._texts[position] = text
        else:
            self._store.set(self._key(position), text)

    def read_all(self) -> list[str] | None:
        """Every position's text; None until all have posted theirs.  Does not wait."""
        positions = range(self._world_size)
        if self._store is None:
            has_all = len(self._texts) == self._world_size
            return [self._texts[each] for each in positions] if has_all else None
        keys = [self._key(position) for position in positions]
        if not self._store.check(keys):
            return None
        return [self._store.get(key).decode() for key in keys]

    def clear(self, position: int) -> None:
        """Remove the text of ``position``."""
        if self._store is not None:
            with suppress(RuntimeError):  # some kinds of store keep what they have
                self._store.delete_key(self._key(position))

    def _key(self, position: int) -> str:
        return f"shardhet_{self._topic}_{position}"
