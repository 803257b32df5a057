"""A Python interpreter that starts with torch imported, in place of ``sys.executable``.

    subprocess.run([warm_python(), "-m", "shardhet.apps.main", "train", ...])

Importing torch takes a process two to four seconds of a core, and a run of ``shardhet train``
is one process per rank and one more.  ``client.py`` is what is started here: it sends its
arguments, environment, working directory and standard streams to ``server.py``, which has
imported torch once and forks; the fork becomes the program.  The client passes signals on and
ends as the program ends.  ``sys.executable`` is the client in a program too, so that the
launchers of torch and submitit start warm ranks.

The programs of one server have the same seed of Python's string hashes.  Each command has a
test that starts it with ``sys.executable`` itself.

Workers of pytest-xdist share the server that their controller has started (``share``).
"""

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.worlds import TRANSFORMERS, preloaded

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SHARED = "SHARDHET_TESTS_WARM_PYTHON"  # where the controller has put it
SERVER_START_S = 120.0  # it imports what programs need, on a busy machine


def share() -> None:
    """Start a server for all workers that this process is going to start."""
    modules = TRANSFORMERS if find_spec("transformers") is not None else ()
    os.environ[SHARED], _ = _started(modules)


@cache
def warm_python() -> str:
    """The path of the interpreter; its server ends with this process, or the controller."""
    shared = os.environ.get(SHARED)
    if shared is None:
        client, server = _started(preloaded)
        assert server.stdout is not None
        is_listening = server.stdout.readline() == b"listening\n"
        assert is_listening, "the server of warm programs has ended"
        return client
    until_s = time.monotonic() + SERVER_START_S
    while not Path(shared).with_name("socket").exists():
        assert time.monotonic() < until_s, "the server of warm programs does not answer"
        time.sleep(0.1)
    return shared


def _started(modules: Sequence[str]) -> tuple[str, "subprocess.Popen[bytes]"]:
    """The interpreter and its server, which imports ``modules`` besides."""
    folder = TemporaryDirectory(prefix="warm-python-")
    client = Path(folder.name) / "python"
    # Isolated and without site-packages: it starts in a few milliseconds.
    client.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
    client.chmod(0o755)
    (Path(folder.name) / "cold-python").symlink_to(sys.executable)
    server = subprocess.Popen(
        [sys.executable, HERE / "server.py", client, *modules],
        cwd=ROOT,
        # A fork outlives the SIGKILL of what it stands for; torch would warn of its sockets.
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdin=subprocess.PIPE,  # its end of file is the end of this process
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is pytest's
    )

    @atexit.register
    def stop() -> None:
        server.communicate()
        folder.cleanup()

    return str(client), server
