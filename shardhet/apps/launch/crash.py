"""Failures in the run folder, and the panel that shows the root cause of a failed run.

Each rank that fails writes its ``Failure`` there.  Most of them only report that a peer is
gone; the root cause is the first that does not.
"""

import json
import logging
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from shardhet.apps.cli.streamed import WideConsole
from shardhet.apps.launch.run_folder import RunFolder, write_whole
from shardhet.comm.failure import Failure, FailureKind
from shardhet.comm.liveness.ending import OF_THIS_RANK

logger = logging.getLogger(__name__)

KEY = "shardhet"  # of a failure, in what torch's launcher reads of a rank
OUTPUT_CLOSED = 128 + signal.SIGPIPE  # as shells report a program killed by SIGPIPE


class RankConsole(WideConsole):
    """The console of a rank.  If nobody reads its output, as after ``| head``, the run ends."""

    def on_broken_pipe(self) -> None:
        """End this process quietly, with ``OUTPUT_CLOSED``."""
        logger.info("the output of this rank is closed; the run ends")
        try:
            super().on_broken_pipe()  # also prevents output at exit
        except SystemExit:
            raise SystemExit(OUTPUT_CLOSED) from None


def is_repeated(failure: Failure, folder: RunFolder) -> bool:
    """Whether its rank failed in the same way, at the same step, when it last started."""
    paths = (folder.failure_path(failure.rank), folder.failure_before_path(failure.rank))
    before = [Failure.from_json(path.read_text()) for path in paths if path.exists()]
    return failure.kind is not FailureKind.LOST and any(
        (each.what, each.step) == (failure.what, failure.step) for each in before
    )


def save_failure(failure: Failure, folder: RunFolder) -> None:
    """Write the failure to where the launcher looks for it.

    Where the run folder takes no file, as on a full disk, that is the launcher's own.
    """
    path, text = folder.failure_path(failure.rank), failure.to_json()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as error:
        logger.warning("%s: %s", path, error)
        document = {"message": failure.what, "timestamp": failure.at_s, KEY: text}
        with suppress(KeyError, OSError):  # what has failed counts, not this
            Path(os.environ[OF_THIS_RANK]).write_text(json.dumps(document))


def read_failures(folder: RunFolder, log_dir: Path | None = None) -> list[Failure]:
    """The failures that the ranks have written, in the run folder or to torch's launcher.

    ``log_dir`` has what torch's launcher keeps of each rank.
    """
    texts = [path.read_text() for path in sorted(folder.logs_dir.glob("rank*.failure.json"))]
    if log_dir is not None:
        documents = [json.loads(path.read_text()) for path in log_dir.rglob("error.json")]
        texts += [each[KEY] for each in documents if KEY in each]
    return [Failure.from_json(text) for text in texts]


def root_cause(said: Sequence[Failure], silent: Iterable[Failure]) -> Failure | None:
    """The failure that caused the others.

    ``said`` are failures that ranks reported; ``silent`` are processes that ended without a
    report, in the order in which they ended.
    """
    by_time = sorted(said, key=lambda failure: failure.at_s)
    causes = [failure for failure in by_time if failure.kind is not FailureKind.LOST]
    spoken = {failure.rank for failure in said}
    killed = [failure for failure in silent if failure.rank not in spoken]
    return next(iter([*causes, *killed, *by_time]), None)


def crash_panel(failure: Failure, folder: RunFolder) -> Panel:
    """The panel that a user sees last."""
    rows = [
        ("rank", failure.name.removeprefix("rank ")),
        ("error", failure.what),
        ("at", failure.where),
    ]
    if (log := folder.log_path(failure.rank)).exists():
        rows.append(("log", str(log)))
    lines = [Text.assemble((f"{name:6}", "bold"), text) for name, text in rows]
    return Panel(
        Group(*lines), title="the run failed", box=box.ASCII, border_style="red", expand=False
    )
