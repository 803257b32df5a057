"""What a process takes from its device besides tensors, and nobody else's memory."""

import torch

from shardhet.comm.channel import Channel
from shardhet.profiler.reserved import (
    CardUse,
    Reserved,
    find_reserved,
    listed_bytes,
    reserved_on_card,
)

MIB = 2**20
LISTING = """\
100, GPU-aaaa, 700
200, GPU-aaaa, 900
200, GPU-bbbb, 300
300, GPU-bbbb, [N/A]
"""


def test_the_driver_knows_a_process_by_its_number_and_card() -> None:
    assert listed_bytes(LISTING, pid=200, uuid="aaaa") == 900 * MIB
    assert listed_bytes(LISTING, pid=200, uuid="bbbb") == 300 * MIB
    assert listed_bytes(LISTING, pid=300, uuid="bbbb") is None
    assert listed_bytes(LISTING, pid=400, uuid="aaaa") is None
    assert listed_bytes("", pid=100, uuid="aaaa") is None


def test_tensors_and_other_processes_do_not_count() -> None:
    own = CardUse(uuid="aaaa", cached_bytes=200 * MIB, used_bytes=5000 * MIB)
    assert reserved_on_card(own, [own], 700 * MIB).nbytes == 500 * MIB


def test_ranks_that_share_a_card_share_what_cannot_be_told_apart() -> None:
    own = CardUse(uuid="aaaa", cached_bytes=200 * MIB, used_bytes=1700 * MIB)
    mate = CardUse(uuid="aaaa", cached_bytes=500 * MIB, used_bytes=1700 * MIB)
    other = CardUse(uuid="bbbb", cached_bytes=9000 * MIB, used_bytes=9000 * MIB)
    found = reserved_on_card(own, [own, mate, other], None)
    assert found.nbytes == 500 * MIB
    assert "divided by the 2" in found.counted
    # A number that is less than its tensors is that of another process.
    assert reserved_on_card(own, [own, mate], 100 * MIB) == found


def test_on_a_cpu_it_is_what_is_resident() -> None:
    found: Reserved = find_reserved(torch.device("cpu"), Channel(None, (0,), 0))
    assert found.nbytes > 10 * MIB  # Python and torch
    assert "resident" in found.counted
