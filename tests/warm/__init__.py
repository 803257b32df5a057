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
"""

import atexit
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.worlds import preloaded

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@cache
def warm_python() -> str:
    """The path of the interpreter; its server ends with this process."""
    folder = TemporaryDirectory(prefix="warm-python-")
    client = Path(folder.name) / "python"
    # Isolated and without site-packages: it starts in a few milliseconds.
    client.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
    client.chmod(0o755)
    (Path(folder.name) / "cold-python").symlink_to(sys.executable)
    server = subprocess.Popen(
        [sys.executable, HERE / "server.py", client, *preloaded],
        cwd=ROOT,
        stdin=subprocess.PIPE,  # its end of file is the end of this process
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is pytest's
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == b"listening\n", "the server of warm programs has ended"

    @atexit.register
    def stop() -> None:
        server.communicate()
        folder.cleanup()

    return str(client)
