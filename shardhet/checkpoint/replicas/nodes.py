"""An identity for each node of a run."""

import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_name(folder: Path) -> str:
    """What ranks with the same replicas have in common: the machine and the folder."""
    boot_id = _BOOT_ID.read_text("ascii").strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot_id} {folder}"
