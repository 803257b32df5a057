"""Transports, which carry the traffic of a process group in its place.

Everything works over torch's process groups alone.  If the ranks of a group share a host,
a ``Transport`` carries their agreements and their uneven collectives without sockets.  The
only implementation is in ``shared_host``; ``SHARDHET_TRANSPORT=gloo`` disables it.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from shardhet.comm.messages import Pending
    from shardhet.comm.uneven import Gathering, Reduction

SWITCH = "SHARDHET_TRANSPORT"
CHOICES = ("auto", "gloo")
SHARED_HOST = "shardhet.comm.shared_host.transport"


class Transport(Protocol):
    """One queue of agreements and collectives among the ranks of a group, all on the host.

    Every rank makes the same calls in the same order.
    """

    def exchange(
        self, row: Sequence[float], within_s: float | None = None
    ) -> list[list[float]]:
        """Return every process's row, by rank in the group.  Collective.

        All rows have the same length.  Raises ``TimeoutError`` if they do not arrive
        ``within_s``, and ``LostPeerError`` if a process is gone.
        """

    def gather(self, call: "Gathering") -> "Pending":
        """Perform ``collectives.all_gather_uneven``.  Collective."""

    def reduce(self, call: "Reduction") -> "Pending":
        """Perform ``collectives.reduce_scatter_uneven``.  Collective."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized tensor [numel] in the memory that transfers fastest."""

    def give_up(self) -> None:
        """Make every process that waits for this one, now or later, fail with an error."""


def meet(group: dist.ProcessGroup, number: int) -> "tuple[Transport, ...] | None":
    """Return ``number`` transports among the ranks of ``group``; None on all if unavailable.

    Collective over ``group``.
    """
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in CHOICES:
        raise ValueError(f"{SWITCH}={wanted!r}: it is one of {', '.join(CHOICES)}.")
    try:
        shared_host: Any = import_module(SHARED_HOST)
    except ModuleNotFoundError:
        return None
    met: tuple[Transport, ...] | None = shared_host.meet(group, number, wanted == "auto")
    return met


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout that ``group`` was made with."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
