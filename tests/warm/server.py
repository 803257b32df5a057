"""Import torch and MODULEs once, then become each program that is asked for in a fork.

    python tests/warm/server.py CLIENT [MODULE ...]

listens at ``socket`` beside CLIENT and ends, with all its programs, at the end of its input.
"""

import atexit
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

# With what they import, nearly all that the commands and the ranks need.
PRELOADED = (
    "scipy.optimize",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "shardhet.apps.measure",
    "shardhet.apps.run.measure_rank",
    "shardhet.apps.train",
    "shardhet.apps.run.worker",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A program to become."""

    arguments: list[str]  # the module's name first
    environment: dict[str, str]
    folder: str
    is_unbuffered: bool
    stream_fds: list[int]  # what the program reads, writes and complains to


class Server:
    """Forks a process per client, and tells each client how its process ended."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        unfinished = path.with_name("socket.new")
        self._listener.bind(str(unfinished))
        self._listener.listen(64)
        unfinished.rename(path)  # who finds it is answered
        self._selector = DefaultSelector()
        self._selector.register(self._listener, EVENT_READ)
        self._selector.register(sys.stdin, EVENT_READ)
        self._client_by_pid: dict[int, socket.socket] = {}
        self._pid_by_fd: dict[int, int] = {}  # the fd of a client or of a process (pidfd)

    def serve(self) -> Request | None:
        """Return in each fork with what it is to be; at the end of input with None."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    self._kill_all()
                    return None
                if key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif key.fd in self._pid_by_fd:  # not told in this round already
                    self._finish(self._pid_by_fd[key.fd])

    def _fork(self) -> Request | None:
        client, _ = self._listener.accept()
        request = _receive(client)
        pid = os.fork()
        if pid == 0:
            self._leave(client)
            return request
        for fd in request.stream_fds:
            os.close(fd)
        client.sendall(b"%d\n" % pid)
        self._client_by_pid[pid] = client
        for fd in (client.fileno(), os.pidfd_open(pid)):
            self._pid_by_fd[fd] = pid
            self._selector.register(fd, EVENT_READ)
        return None

    def _finish(self, pid: int) -> None:
        """The process has ended; or its client has, who was killed: so is the process."""
        os.kill(pid, signal.SIGKILL)  # without effect on one that has ended
        _, status = os.waitpid(pid, 0)
        client = self._client_by_pid.pop(pid)
        exit_code = os.waitstatus_to_exitcode(status)
        with suppress(OSError):  # nobody listens
            client.sendall(b"%d\n" % exit_code)
        for fd in [fd for fd, owner in self._pid_by_fd.items() if owner == pid]:
            self._selector.unregister(fd)
            del self._pid_by_fd[fd]
            if fd != client.fileno():
                os.close(fd)
        client.close()

    def _kill_all(self) -> None:
        for pid in list(self._client_by_pid):
            self._finish(pid)

    def _leave(self, client: socket.socket) -> None:
        """In a fork: nothing of the server stays open."""
        self._selector.close()
        self._listener.close()
        for each in (client, *self._client_by_pid.values()):
            each.close()
        for fd in self._pid_by_fd:
            with suppress(OSError):  # a client's, closed above
                os.close(fd)


def _receive(client: socket.socket) -> Request:
    header, fds, _, _ = socket.recv_fds(client, 8, 3)
    remaining = int.from_bytes(header, "little")
    parts = []
    while remaining:
        parts.append(client.recv(min(remaining, 2**16)))
        remaining -= len(parts[-1])
    return Request(**json.loads(b"".join(parts)), stream_fds=fds)


def _become(request: Request) -> None:
    """Run the module as ``python -m`` would; the interpreter then ends as after that."""
    os.setsid()  # the server is no business of whoever signals the group
    for fd, own in enumerate(request.stream_fds):
        os.dup2(own, fd)
        os.close(own)
    # What is still frozen at the end would be a leak to nanobind, which says so (triton 3.9).
    atexit.register(gc.unfreeze)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    module, *arguments = request.arguments
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [request.folder, *paths, *sys.path]
    if request.is_unbuffered:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if find_spec("sitecustomize") is not None:  # a test's own, in its folder
        importlib.import_module("sitecustomize")
    _run_as_main(module, arguments)


def _run_as_main(module: str, arguments: list[str]) -> None:
    """As runpy does, but for its two frames without a file (nor are there any below).

    torch's rendezvous asks inspect.stack() a dozen times where it is, and a frame without a
    file is looked for in all modules: two seconds of a core.
    """
    spec = find_spec(module)
    assert spec is not None
    assert isinstance(spec.loader, SourceFileLoader)
    sys.argv = [spec.loader.path, *arguments]
    main_module = module_from_spec(spec)
    main_module.__name__ = "__main__"
    sys.modules["__main__"] = main_module
    exec(spec.loader.get_code(module), vars(main_module))


def main() -> None:
    """Serve; in a fork, be the program."""
    client = Path(sys.argv[1])
    sys.path[0] = str(Path(__file__).parents[2])
    gc.disable()
    for module in (*PRELOADED, *sys.argv[2:]):
        importlib.import_module(module)
    sys.executable = str(client)
    del sys.path[0]  # where the server was started is not where programs are
    server = Server(client.parent / "socket")
    inspect.stack()  # knows from now on what this file was, which is no module in a program
    gc.collect()
    gc.freeze()  # what is shared with the forks stays shared
    gc.enable()
    os.write(1, b"listening\n")
    request = server.serve()
    if request is not None:
        _become(request)


if __name__ == "__main__":
    main()
