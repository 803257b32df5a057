"""Transports, which carry the traffic of a process group in its place.

Everything works over torch's process groups alone.  If the ranks of a group share a host,
a ``Transport`` carries their agreements and their uneven collectives without sockets.  The
only implementation is ``extras.shared_host``, without which all goes on over gloo.

``SHARDHET_TRANSPORT=gloo`` disables it, and lets gloo carry the tensors of accelerators too, in
place of NCCL: the libraries of two vendors do not understand each other.
"""

import os
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from shardhet.comm.calls import Transport

SWITCH = "SHARDHET_TRANSPORT"
CHOICES = ("auto", "gloo")
SHARED_HOST = "shardhet.extras.shared_host.transport"


def wants_gloo() -> bool:
    """Whether everything travels over gloo, by the environment of this process."""
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in CHOICES:
        raise ValueError(f"{SWITCH}={wanted!r}: it is one of {', '.join(CHOICES)}.")
    return wanted == "gloo"


def meet(group: dist.ProcessGroup, number: int) -> tuple[Transport, ...] | None:
    """Return ``number`` transports among the ranks of ``group``; None on all if unavailable.

    Collective over ``group``.
    """
    is_wanted = not wants_gloo()
    try:
        shared_host: Any = import_module(SHARED_HOST)
    except ModuleNotFoundError:
        return None
    met: tuple[Transport, ...] | None = shared_host.meet(group, number, is_wanted)
    return met


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout that ``group`` was made with."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
