"""Memory that a process takes from its device besides PyTorch's tensors.

On an accelerator this is the driver's context, loaded kernels, and what libraries allocate by
themselves, mainly communicator buffers.  What other programs hold on the card counts, too: it
is not there for training.
"""

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardhet.comm import devices
from shardhet.comm.channel import Channel


@dataclass(frozen=True, slots=True)
class Reserved:
    """Reserved bytes, and a description of what was counted."""

    nbytes: int
    counted: str


@dataclass(frozen=True, slots=True)
class CardUse:
    """What a rank knows about the memory of its accelerator."""

    uuid: str
    cached_bytes: int  # by PyTorch's allocator in this process
    used_bytes: int  # by all processes


def find_reserved(device: torch.device, control: Channel) -> Reserved:
    """The memory that this process now holds besides tensors.  Collective over ``control``."""
    own = None if devices.is_on_host(device) else _card_use(device)
    all_ranks: list[CardUse | None] = control.exchange_objects(own)
    if own is None:
        return Reserved(_resident_bytes(), "memory resident before the model was built")
    return reserved_on_card(own, [use for use in all_ranks if use])


def reserved_on_card(own: CardUse, all_ranks: Sequence[CardUse]) -> Reserved:
    """The memory besides tensors of one process on a card."""
    card_peers = [use for use in all_ranks if use.uuid == own.uuid]
    uncached = own.used_bytes - sum(use.cached_bytes for use in card_peers)
    return Reserved(
        max(0, uncached // len(card_peers)),
        f"memory of all processes on the card, divided by the {len(card_peers)} measured there",
    )


def _card_use(device: torch.device) -> CardUse:
    module = devices.module_of(device)
    free_bytes, total_bytes = module.mem_get_info(device)
    return CardUse(
        uuid=str(module.get_device_properties(device).uuid),
        cached_bytes=module.memory_reserved(device),
        used_bytes=total_bytes - free_bytes,
    )


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.is_file():
        num_pages = int(statm.read_text(encoding="ascii").split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes
