"""Connections: how a rank learns at once that a process of another host is gone.

``/proc`` tells of this host alone, and connections of NCCL do not end with a process.  So rank
0 listens, each rank of another host connects to it, and only a greeting is sent.  When a
process ends, its system closes its connections, whatever it ended of.

    rank 0  <---- connection ----  each rank of another host
    sees all of these end          sees rank 0 end

Who sees it tells all others (``diagnose``).  A host that loses its power or its network closes
nothing: that is noticed by the patience, as is everything where no connection can be made; but
a host that does not answer is told from a process that does not get to run.
"""

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

from shardhet.comm.failure import ProcessState

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
GREETING_BYTES = 64  # of a greeting, at most: the secret, a space, the rank, a new line
# The system asks the other end after so long without a word, and so often until it counts as
# cut: 40 s, within the usual patience.  A host answers for processes that do not get to run.
KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
MOST_GREETING, GREETING_WITHIN_S = 64, 10.0  # of connections that have not said who they are
ACCEPTED = b"+"


class Connections:
    """Those of this rank; all methods but the constructor are for the watch's thread."""

    def __init__(self, rank: int, *, interface: str | None = None) -> None:
        """``interface``: the address at which others can connect; "": at any; None: nowhere."""
        self.ended: dict[int, ProcessState] = {}  # by rank: GONE if its process has closed it
        self.address = ""  # the port, the secret and the interface that others need
        self._rank = rank
        self._of_rank: dict[int, socket.socket] = {}
        self._greeting: dict[socket.socket, float] = {}  # nothing came yet: accepted when
        self._connecting: threading.Thread | None = None
        self._secret = secrets.token_hex(8)
        self._listener = None if interface is None else _listener(interface)
        if self._listener is not None:
            port = self._listener.getsockname()[1]
            self.address = f"{port} {self._secret} {interface}"
        _all.add(self)

    def connect(self, rank: int, hosts: Sequence[str], address: str) -> None:
        """Connect to ``rank`` at its ``address``, or the first of ``hosts`` that answers.

        It is tried once, beside the watch: a name may take long to be looked up.
        """
        if self._connecting is None:
            self._connecting = threading.Thread(
                target=self._connect, args=(rank, hosts, address), daemon=True
            )
            self._connecting.start()

    def look(self) -> None:
        """Answer who has connected, and find out which connections have ended."""
        self._accept()
        for rank, connection in list(self._of_rank.items()):
            state, _ = _read(connection)
            if state is ProcessState.RUNNING:
                continue
            del self._of_rank[rank]
            connection.close()
            self.ended[rank] = state

    def close(self) -> None:
        """Close all of them."""
        for each in (self._listener, *self._greeting, *self._of_rank.values()):
            if each is not None:
                each.close()
        self._listener = None
        self._greeting.clear()
        self._of_rank.clear()

    def _accept(self) -> None:
        if self._listener is None:
            return
        now_s = time.monotonic()
        for connection, since_s in list(self._greeting.items()):
            self._greet(connection, is_late=now_s - since_s >= GREETING_WITHIN_S)
        with suppress(OSError):  # nobody is waiting; or no file descriptor is left
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._greeting[connection] = now_s
                self._greet(connection)
                if len(self._greeting) > MOST_GREETING:
                    self._greet(next(iter(self._greeting)), is_late=True)

    def _greet(self, connection: socket.socket, *, is_late: bool = False) -> None:
        """Read who it is; whoever is ``is_late``, or nobody that is known, is turned away."""
        state, greeting = _read(connection)
        if state is ProcessState.RUNNING and not greeting and not is_late:
            return
        del self._greeting[connection]
        secret, _, rank = greeting.strip().partition(b" ")
        is_known = secrets.compare_digest(secret, self._secret.encode())
        if not (is_known and rank.isdigit()):
            connection.close()
            return
        with suppress(OSError):
            connection.send(ACCEPTED)
        _keep_alive(connection)
        self._of_rank[int(rank)] = connection

    def _connect(self, rank: int, hosts: Sequence[str], address: str) -> None:
        port, secret, *interface = address.split()
        for host in (*interface, *hosts):
            try:
                connection = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
                connection.sendall(f"{secret} {self._rank}\n".encode())
                is_accepted = connection.recv(1) == ACCEPTED
            except OSError:
                continue
            if is_accepted:
                _keep_alive(connection)
                connection.setblocking(False)
                self._of_rank[rank] = connection
                return
            connection.close()
        logger.info(
            "no connection to rank %d at port %s of %s: if its process dies, this rank learns "
            "of it by the patience of the watch",
            rank,
            port,
            " or ".join(hosts),
        )


def interface_towards(host: str | None) -> str:
    """The address of this host on the way to ``host``; "" where that is not to be had.

    The loopback does not count: a host may know itself by that, and no other finds it there.
    """
    with suppress(OSError):
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            found = probe.getsockname()[0]
        return "" if ip_address(found).is_loopback else found
    return ""


def _listener(interface: str) -> socket.socket | None:
    """At a port that the system chooses; None where that cannot be had."""
    families = [socket.AF_INET6, socket.AF_INET]  # of which the first takes both, or neither
    if interface or not socket.has_dualstack_ipv6():
        families = [socket.AF_INET6 if ":" in interface else socket.AF_INET]
    for family in families:
        with suppress(OSError):  # IPv6 may be there and switched off
            listener = socket.create_server(
                (interface, 0),
                family=family,
                backlog=1024,
                dualstack_ipv6=family is socket.AF_INET6 and not interface,
            )
            listener.setblocking(False)
            return listener
    return None


def _keep_alive(connection: socket.socket) -> None:
    """Let no firewall forget a connection over which nothing is sent, and notice a cut one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _read(connection: socket.socket) -> tuple[ProcessState, bytes]:
    """The state of the process at the other end, and what it has sent."""
    try:
        found = connection.recv(GREETING_BYTES)
    except BlockingIOError:
        return ProcessState.RUNNING, b""
    except ConnectionResetError:
        return ProcessState.GONE, b""
    except OSError:  # no answer, as of a host without power or network
        return ProcessState.CUT, b""
    return ProcessState.RUNNING if found else ProcessState.GONE, found


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _close_in_child() -> None:
    for each in _all:
        each.close()


# A forked process, as a worker of a DataLoader, would keep them open beyond the death of this.
os.register_at_fork(after_in_child=_close_in_child)
