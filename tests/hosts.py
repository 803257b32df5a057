"""Ranks of one host that behave as if each had a host of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from shardhet.comm.groups import Communicators


@contextmanager
def on_different_hosts() -> Iterator[None]:
    """As if the ranks shared no memory, not even for what they agree on."""
    over = Communicators.over

    def apart(*given: Any) -> Communicators:
        return replace(over(*given), transports=None)

    with mock.patch.object(Communicators, "over", apart):
        yield
