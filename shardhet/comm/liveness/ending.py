"""Ends of processes: this one ends once the run cannot go on, and notices ends of others.

at once         connections are broken, so that a blocked collective raises
after a grace   a training thread that is still blocked, or is itself at fault, is ended
                with the whole process, by ``os._exit``

A training thread that has noticed handles its error for as long as it likes.  Once the program
ends, the process gets ``SECONDS_FOR_EXIT``: destructors of torch may wait for a store that
stands still (torch 2.13).

[Note: The launcher of a rank]
It is torchrun's agent on this host, or ``shardhet train``, which is an agent too: the nearest
ancestor that was not itself started with this rank's variables, as a shell in between is.
Linux can kill a process when its parent ends (PR_SET_PDEATHSIG), but it does so when the
parent's *thread* ends, and never if the parent ended before the call; so a thread looks once a
second who the launcher is.  A launcher that ended before the first look has left this rank to
another process, which, unlike an agent, has not loaded torch.

[Note: Connections]
How a rank learns at once that a process of another host is gone: ``/proc`` tells of this host
alone, and connections of NCCL do not end with a process.  So rank 0 listens, each rank of
another host connects to it, and only a greeting is sent.  When a process ends, its system
closes its connections, whatever it ended of.

    rank 0  <---- connection ----  each rank of another host
    sees all of these end          sees rank 0 end

Who sees it tells all others (``diagnose``).  A host that loses its power or its network closes
nothing: that is noticed by the patience, as is everything where no connection can be made; but
a host that does not answer is told from a process that does not get to run.
"""

import atexit
import faulthandler
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

from shardhet.comm.failure import ProcessState, stat_of
from shardhet.comm.groups import break_all_connections

logger = logging.getLogger(__name__)

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: start the run again
GRACE_S = 5.0  # for a training thread to notice that its connections are broken
SECONDS_FOR_EXIT = 15.0
OF_THIS_RANK = "TORCHELASTIC_ERROR_FILE"  # agents of torch give each rank one of its own
SECONDS_BETWEEN_LOOKS = 1.0

_launcher: list[int] = []  # at most one; -1 if it was gone at the first look


class Ending:
    """The end of this process, step by step, driven by the watch."""

    def __init__(self, text: str, *, is_at_fault: bool, breaks_after_s: float) -> None:
        """``is_at_fault``: this rank is the one that stands still, so it will not notice.

        A training thread that is blocked for ``breaks_after_s`` has its connections broken; 0
        breaks them now.  ``GRACE_S`` later the process is ended.
        """
        self._text, self._is_at_fault = text, is_at_fault
        self._breaks_after_s = breaks_after_s
        self._blocked_s = 0.0
        self._breaking: threading.Thread | None = None
        atexit.register(_limit_exit)
        if not breaks_after_s:
            self._break()

    def advance(self, passed_s: float, *, is_waiting: bool, stack: str) -> None:
        """Go on after ``passed_s``; does not return if the process has to end now."""
        self._blocked_s += passed_s if is_waiting or self._is_at_fault else 0.0
        if self._breaking is None:
            if self._blocked_s >= self._breaks_after_s:
                self._break()
                self._blocked_s = 0.0
        elif self._blocked_s >= GRACE_S:
            _exit(
                f"{self._text}\nThis process ends with exit status {EXIT_STATUS}, because its "
                f"training thread does not react. It is at\n{stack}"
            )

    def join(self, within_s: float) -> None:
        """Wait for what this has started: a thread that outlives the interpreter aborts it."""
        if self._breaking is not None:
            self._breaking.join(within_s)

    def _break(self) -> None:
        # Not here: to abort a communicator may block, and the grace goes on meanwhile.
        self._breaking = threading.Thread(
            target=break_all_connections, name="shardhet break", daemon=True
        )
        self._breaking.start()


def launcher_of(pid: int) -> int | None:
    """The process that has launched the rank ``pid``; see [Note: The launcher of a rank].

    None if no agent of torch has, or the system does not say.
    """
    mine = _file_of(pid)
    if mine is None:
        return None
    while (parent := _parent_of(pid)) is not None and _file_of(parent) == mine:
        pid = parent
    return parent


def end_with_launcher() -> None:
    """From now on, end this process within seconds if the agent that started it is gone.

    Does nothing in a process that no agent has started: a program may outlive its shell.
    """
    if OF_THIS_RANK not in os.environ or _launcher:
        return
    launcher = _launcher_now()
    _launcher.append(-1 if _has_adopted(launcher) else launcher)
    threading.Thread(target=_look_for_launcher, name="shardhet launcher", daemon=True).start()


def end_if_launcher_is_gone() -> None:
    """End this process now if ``end_with_launcher`` would end it soon."""
    if not _launcher or _launcher_now() == _launcher[0]:
        return
    which = "" if _launcher[0] < 0 else f", process {_launcher[0]},"
    _exit(
        f"the launcher of this rank{which} is gone (killed, or out of memory). This rank ends "
        f"with exit status {EXIT_STATUS}; start the run again to go on."
    )


def _look_for_launcher() -> None:
    while True:
        end_if_launcher_is_gone()
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _launcher_now() -> int:
    return launcher_of(os.getpid()) or os.getppid()


def _has_adopted(pid: int) -> bool:
    """Whether a process has adopted this rank, whose launcher had ended before the first look.

    An agent has loaded torch, and it is of this rank's user, who may look into it.
    """
    try:
        return "libtorch" not in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return pid == 1 and Path("/proc/self/maps").exists()


def _file_of(pid: int) -> bytes | None:
    """The value of ``OF_THIS_RANK`` with which a process was started."""
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = each.partition(b"=")
            if name == OF_THIS_RANK.encode():
                return value
    return None


def _parent_of(pid: int) -> int | None:
    with suppress(OSError):
        fields = stat_of(pid)
        return None if fields is None else int(fields[1])
    return None


def _exit(message: str) -> NoReturn:
    logger.critical("%s", message)
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{message}\n")
    end_now(EXIT_STATUS)


def end_now(status: int) -> NoReturn:
    """End the process, whatever its threads do, and without the destructors of torch."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    os._exit(status)


def _limit_exit() -> None:
    """End the process, with status 1, if the interpreter has not ended it in time."""
    # A thread of C, which no lock of the interpreter stops.
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 -- open until the process ends
    faulthandler.dump_traceback_later(SECONDS_FOR_EXIT, exit=True, file=nowhere)


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
