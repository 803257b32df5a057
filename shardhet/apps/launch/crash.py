"""Failures of ranks, and the panel that shows the root cause at the end of a failed run.

Each rank that fails writes a ``Failure`` into the run folder.  Most of them only report that
a peer is gone; the root cause is the first that does not.
"""

import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from shardhet.apps.cli.streamed import WideConsole
from shardhet.apps.launch.memory_limits import PlansAgainError
from shardhet.apps.launch.run_folder import RunFolder, write_whole
from shardhet.comm.failure import INTERNAL
from shardhet.comm.liveness.ending import OF_THIS_RANK
from shardhet.comm.peers import LostPeerError
from shardhet.comm.progress import progress

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank ended."""

    rank: int
    device: str
    exception: str  # "ValueError: ...", or how the process ended
    place: str  # file:line of the innermost frame outside of libraries
    at_s: float  # seconds since the epoch
    is_consequence: bool  # of a failure elsewhere
    step: int = 0  # the last that was taken
    plans_again: bool = False  # the run goes on under another plan, if ranks are started again

    @classmethod
    def of(cls, error: BaseException, *, rank: int, device: str) -> "Failure":
        """The failure of the rank that raised ``error``."""
        return cls(
            rank=rank,
            device=device,
            exception="".join(traceback.format_exception_only(error)).strip(),
            place=_place(error),
            at_s=time.time(),
            is_consequence=any(
                isinstance(each, LostPeerError) for each in (error, error.__cause__)
            ),
            step=progress.step,
            plans_again=isinstance(error, PlansAgainError),
        )

    def is_repeated(self, folder: RunFolder) -> bool:
        """Whether this rank failed in the same way, at the same step, when it last started."""
        paths = (folder.failure_path(self.rank), folder.failure_before_path(self.rank))
        before = [_read(path) for path in paths if path.exists()]
        return not self.is_consequence and any(
            (each.exception, each.step) == (self.exception, self.step) for each in before
        )

    def save(self, folder: RunFolder) -> None:
        """Write the failure to where the launcher looks for it.

        Where the run folder takes no file, as on a full disk, that is the launcher's own.
        """
        path = folder.failure_path(self.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            logger.warning("%s: %s", path, error)
            document = {"message": self.exception, "timestamp": self.at_s, KEY: asdict(self)}
            with suppress(KeyError, OSError):  # what has failed counts, not this
                Path(os.environ[OF_THIS_RANK]).write_text(json.dumps(document))


def _place(error: BaseException) -> str:
    """The innermost line of user code; without any, that of this package or any other."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename and not INTERNAL.search(frame.filename)
    ]
    if not frames:
        return "unknown"
    innermost = (own or list(frames))[-1]
    return f"{innermost.filename}:{innermost.lineno}"


def read_failures(folder: RunFolder) -> list[Failure]:
    """The failures that the ranks have written."""
    paths = sorted(folder.logs_dir.glob("rank*.failure.json"))
    return [_read(path) for path in paths]


def read_failures_of_launch(log_dir: Path) -> list[Failure]:
    """Those that the run folder did not take, from what torch's launcher keeps of each rank."""
    documents = [json.loads(path.read_text()) for path in log_dir.rglob("error.json")]
    return [Failure(**each[KEY]) for each in documents if KEY in each]


def _read(path: Path) -> Failure:
    return Failure(**json.loads(path.read_text(encoding="utf-8")))


def root_cause(said: Sequence[Failure], silent: Iterable[Failure]) -> Failure | None:
    """The failure that caused the others.

    ``said`` are failures that ranks reported; ``silent`` are processes that ended without a
    report, in the order in which they ended.
    """
    causes = [failure for failure in said if not failure.is_consequence]
    spoken = {failure.rank for failure in said}
    killed = [failure for failure in silent if failure.rank not in spoken]
    if causes:
        return min(causes, key=lambda failure: failure.at_s)
    if killed:
        return killed[0]
    return min(said, key=lambda failure: failure.at_s, default=None)


def crash_panel(failure: Failure, folder: RunFolder) -> Panel:
    """The panel that a user sees last."""
    rows = [
        ("rank", f"{failure.rank} ({failure.device})"),
        ("error", failure.exception),
        ("at", failure.place),
    ]
    if (log := folder.log_path(failure.rank)).exists():
        rows.append(("log", str(log)))
    lines = [Text.assemble((f"{name:6}", "bold"), text) for name, text in rows]
    return Panel(
        Group(*lines), title="the run failed", box=box.ASCII, border_style="red", expand=False
    )
