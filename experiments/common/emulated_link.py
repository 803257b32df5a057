"""A slow link between the ranks of one machine: two networks that a limited cable joins.

Ranks beyond the first ones run in a network namespace of their own.  A pair of virtual Ethernet
devices joins it to this host's network, and a token bucket at each end limits what is sent, so
that the operating system slows the link and no code of the ranks knows of it.  Making them
needs Linux, its commands ``ip`` and ``tc``, and the rights of an administrator.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000  # sched.h
BURST, LATENCY = "64kb", "400ms"  # of the bucket; a packet that would wait longer is dropped
NAMESPACES = Path("/var/run/netns")  # of ip-netns(8)


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """The networks of two groups of ranks, and the names of what joins them."""

    first_ranks: int  # on this side
    device: str  # at both ends
    address: str  # of this side
    namespace: str  # of the other side

    def enter(self, rank: int) -> None:
        """Go to the rank's side; before it opens a connection, or starts a thread."""
        if rank < self.first_ranks:
            return
        with (NAMESPACES / self.namespace).open("rb") as file:
            library = ctypes.CDLL(None, use_errno=True)
            if library.setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"rank {rank}: setns {self.namespace}")


@contextmanager
def emulated_link(
    first_ranks: int, mbit_per_s: float, latency: str = LATENCY
) -> Iterator[EmulatedLink]:
    """Make the networks; they are gone in the end.

    Raises ``OSError`` with what the system has refused.
    """
    number = os.getpid()
    name, side = f"het{number}", f"hs{number}"
    subnet = f"10.{200 + number % 50}.{number // 50 % 250}"
    rate = f"{mbit_per_s * 1e6:.0f}"
    bucket = ("root", "tbf", "rate", rate, "burst", BURST, "latency", latency)
    with ExitStack() as after:
        _do("ip", "netns", "add", name)
        after.callback(_do, "ip", "netns", "delete", name)
        there = ("ip", "-n", name)
        _do("ip", "link", "add", name, "type", "veth", "peer", "name", side)
        after.callback(_do, "ip", "link", "delete", name)
        _do("ip", "link", "set", side, "netns", name)
        _do(*there, "link", "set", side, "name", name)
        for ip, tc, address in (
            (("ip",), ("tc",), f"{subnet}.1"),
            (there, ("tc", "-n", name), f"{subnet}.2"),
        ):
            _do(*ip, "address", "add", f"{address}/24", "dev", name)
            _do(*ip, "link", "set", name, "up")
            _do(*tc, "qdisc", "add", "dev", name, *bucket)
        _do(*there, "link", "set", "lo", "up")
        yield EmulatedLink(first_ranks, name, f"{subnet}.1", name)


def _do(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise OSError(f"{command[0]} is not installed") from None
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
