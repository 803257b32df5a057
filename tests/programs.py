"""Commands of shardhet as their users start them, each in a folder of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.warm import ROOT, warm_python
from tests.worlds import patience

# A decoder that takes no time, on a CPU; for all commands that know ``model`` and ``data``.
SMALL_MODEL = (
    "model.width=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.hidden_width=16",
    "data.seq_len=8",
    "cluster.device=CPU",
)
# The sources of the package, where all of Python's would be read by each rank.
FEW_TEXTS = ("data=text_dir", f"data.path={ROOT}/shardhet", "data.pattern=*.py")
SHARDHET = ("-m", "shardhet.apps.main")
TORCHRUN = ("-m", "torch.distributed.run")


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Modules in ``folder`` are found first, a sitecustomize.py among them."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}


def start(
    arguments: Sequence[str], folder: Path, *, is_cold: bool = False, **variables: str
) -> subprocess.Popen[str]:
    """``python ARGUMENTS ...`` in ``folder``: warm, or as a user's interpreter starts."""
    return subprocess.Popen(
        [sys.executable if is_cold else warm_python(), *arguments],
        cwd=folder,
        env=environment(folder, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    arguments: Sequence[str],
    folder: Path,
    *,
    within_s: float = 100.0,
    is_cold: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """The same to its end."""
    with start(arguments, folder, is_cold=is_cold, **variables) as process:
        try:
            output, errors = process.communicate(timeout=within_s * patience())
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
