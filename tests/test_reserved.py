"""What a process takes from its device besides tensors."""

import torch

from shardhet.comm.channel import Channel
from shardhet.profiler.reserved import (
    CardUse,
    Reserved,
    find_reserved,
    reserved_on_card,
)

MIB = 2**20


def test_ranks_that_share_a_card_share_what_cannot_be_told_apart() -> None:
    own = CardUse(uuid="aaaa", cached_bytes=200 * MIB, used_bytes=1700 * MIB)
    mate = CardUse(uuid="aaaa", cached_bytes=500 * MIB, used_bytes=1700 * MIB)
    other = CardUse(uuid="bbbb", cached_bytes=9000 * MIB, used_bytes=9000 * MIB)
    found = reserved_on_card(own, [own, mate, other])
    assert found.nbytes == 500 * MIB
    assert "divided by the 2" in found.counted


def test_on_a_cpu_it_is_what_is_resident() -> None:
    found: Reserved = find_reserved(torch.device("cpu"), Channel(None, (0,), 0))
    assert found.nbytes > 10 * MIB  # Python and torch
    assert "resident" in found.counted
