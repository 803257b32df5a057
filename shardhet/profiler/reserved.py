"""Memory that a process takes from its device besides PyTorch's tensors.

On an accelerator this is the driver's context, loaded kernels, and what libraries allocate by
themselves, mainly communicator buffers.  Memory of other processes is excluded where possible:
the driver counts by process, but inside a container it may know this process by another number.
"""

import os
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardhet.comm import devices
from shardhet.comm.channel import Channel

LIST_PROCESSES = (
    "nvidia-smi",
    "--query-compute-apps=pid,gpu_uuid,used_gpu_memory",
    "--format=csv,noheader,nounits",
)
LIST_TIMEOUT_S = 10.0
MIB = 2**20


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
    listed = listed_bytes(_list_processes(), pid=os.getpid(), uuid=own.uuid)
    return reserved_on_card(own, [use for use in all_ranks if use], listed)


def reserved_on_card(
    own: CardUse, all_ranks: Sequence[CardUse], process_bytes: int | None
) -> Reserved:
    """The memory besides tensors of one process on a card.

    ``process_bytes`` is what the driver counts for this process, tensors included, or None if
    unknown.
    """
    if process_bytes is not None and process_bytes >= own.cached_bytes:
        return Reserved(
            process_bytes - own.cached_bytes, "memory of this process, by the driver"
        )
    mates = [use for use in all_ranks if use.uuid == own.uuid]
    uncached = own.used_bytes - sum(use.cached_bytes for use in mates)
    return Reserved(
        max(0, uncached // len(mates)),
        f"memory of all processes on the card, divided by the {len(mates)} measured there",
    )


def listed_bytes(listing: str, *, pid: int, uuid: str) -> int | None:
    """Bytes of a process on a card in the output of ``LIST_PROCESSES``; None if not listed."""
    for line in listing.splitlines():
        match [cell.strip() for cell in line.split(",")]:
            case [listed_pid, card, mib] if listed_pid == str(pid) and card.endswith(uuid):
                return int(mib) * MIB if mib.isdecimal() else None
    return None


def _list_processes() -> str:
    try:
        done = subprocess.run(
            LIST_PROCESSES, capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # not installed here, or the driver does not respond
    return done.stdout


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
