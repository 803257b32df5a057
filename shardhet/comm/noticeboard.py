"""Texts that ranks leave for each other, from any thread and without a collective."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from shardhet.comm.channel import Channel
from shardhet.comm.failure import MEND, SECONDS_BETWEEN_LOOKS
from shardhet.comm.peers import holder_of

LIMIT_S = 1800.0  # as torch's for a collective


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


def from_first_rank(key: str, make: Callable[[], str], *, what: str) -> str:
    """The text that rank 0 makes, on every rank that asks for it by the same ``key``.

    Rank 0 leaves it in the rendezvous store, or why it has failed, and waits for nobody.  The
    others look for either; if rank 0 ends without, so does what holds the store.  Raises
    ``RuntimeError`` on them then.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    group: Any = dist.group.WORLD
    store, name = group.get_group_store(), f"shardhet_{key}"
    if group.rank() == 0:
        try:
            text = make()
        except BaseException as error:
            store.set(name, json.dumps([f"{type(error).__name__}: {error}", ""]))
            raise
        store.set(name, json.dumps([None, text]))
        return text
    deadline_s = time.monotonic() + LIMIT_S
    try:
        while not store.check([name]):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{LIMIT_S:,.0f} s have passed")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        failure, text = json.loads(store.get(name))
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(
            f"rank 0 has not left {what} in the store, which {holder_of(store)[0]} holds: "
            f"{error}. Call it on every rank with the same arguments, and look at rank 0's log."
        ) from error
    if failure is not None:
        raise RuntimeError(f"rank 0 failed to make {what}: {failure}\n{MEND}")
    return str(text)
