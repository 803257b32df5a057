"""Texts that ranks leave for each other, from any thread and without a collective."""

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardhet.comm.failure import ADVICE, holder_of

LIMIT_S = 1800.0  # as torch's for a collective
SECONDS_BETWEEN_LOOKS = 0.05


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
    until_s = time.monotonic() + LIMIT_S
    try:
        while not store.check([name]):  # to wait in C++ would let no Ctrl-C through
            if time.monotonic() > until_s:
                raise TimeoutError(f"{LIMIT_S:,.0f} s have passed")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        failure, text = json.loads(store.get(name))
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(
            f"rank 0 has not left {what} in the store, which {holder_of(store)[0]} holds: "
            f"{error}. Call it on every rank with the same arguments, and look at rank 0's log."
        ) from error
    if failure is not None:
        raise RuntimeError(f"rank 0 failed to make {what}: {failure}\n{ADVICE}")
    return str(text)
