"""Have the server fork, and end as the fork ends; started by the first line it is given."""

import json
import os
import signal
import socket
import sys

# Modules, "program" for a test's own; others get a cold interpreter.
FORKED = ("shardhet.", "experiments.", "torch.distributed.run", "tests.", "program")
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
HERE = os.path.dirname(sys.argv[0])  # noqa: PTH120 -- pathlib takes longer than all of this


def main() -> None:
    """Run ``[-u] -m MODULE ARGUMENT ...`` in a fork of the server."""
    arguments = sys.argv[1:]
    is_unbuffered = arguments[:1] == ["-u"]
    if is_unbuffered:
        arguments = arguments[1:]
    if arguments[:1] != ["-m"] or not arguments[1].startswith(FORKED):
        os.execv(os.path.join(HERE, "cold-python"), sys.argv)  # noqa: PTH118
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is somebody to tell
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(HERE, "socket"))  # noqa: PTH118
    request = json.dumps(
        {
            "arguments": arguments[1:],
            "environment": dict(os.environ),
            "folder": os.getcwd(),  # noqa: PTH109
            "is_unbuffered": is_unbuffered,
        }
    ).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
    server.sendall(request)
    answers = server.makefile("r")
    pid = int(answers.readline())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    exit_code = int(answers.readline())
    if exit_code < 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        if -exit_code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


if __name__ == "__main__":
    main()
