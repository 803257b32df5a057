"""How a rank ends before its time, and what is seen last then: the root cause, in one panel.

Each rank that fails writes a ``Failure`` into the run folder.  Most of them only report that
a peer is gone; the cause is the first that does not.
"""

import json
import logging
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from shardhet.apps.common.run_folder import RunFolder
from shardhet.comm.peers import LostPeerError

logger = logging.getLogger(__name__)

OUTPUT_CLOSED = 128 + signal.SIGPIPE  # as shells report a program that wrote to nobody


class RankConsole(Console):
    """What a rank prints on.  Where nobody reads on, as after ``| head``, the run ends."""

    def on_broken_pipe(self) -> None:
        """End this process quietly, with ``OUTPUT_CLOSED``."""
        logger.info("nobody reads what this rank prints any more: the run ends")
        try:
            super().on_broken_pipe()  # so that nothing is printed at exit either
        except SystemExit:
            raise SystemExit(OUTPUT_CLOSED) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank ended."""

    rank: int
    device: str
    exception: str  # "ValueError: ..."; or how the process was ended
    place: str  # file:line of the innermost frame that is not a library's
    at_s: float  # seconds since the epoch
    is_consequence: bool  # of a failure elsewhere

    @classmethod
    def of(cls, error: BaseException, *, rank: int, device: str) -> "Failure":
        """What ``error`` says about the rank."""
        return cls(
            rank=rank,
            device=device,
            exception="".join(traceback.format_exception_only(error)).strip(),
            place=_place(error),
            at_s=time.time(),
            is_consequence=any(
                isinstance(each, LostPeerError) for each in (error, error.__cause__)
            ),
        )

    def save(self, folder: RunFolder) -> None:
        """Leave it where the launcher looks."""
        path = folder.failure_path(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def _place(error: BaseException) -> str:
    """The innermost line of user code; of this package's or any other where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    if not frames:
        return "unknown"
    innermost = (own or list(frames))[-1]
    return f"{innermost.filename}:{innermost.lineno}"


def read_failures(folder: RunFolder) -> list[Failure]:
    """What the ranks left behind."""
    paths = sorted(folder.logs_dir.glob("rank*.failure.json"))
    return [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def root_cause(said: Sequence[Failure], silent: Iterable[Failure]) -> Failure | None:
    """The failure that the others follow from.

    ``said`` are of ranks that raised; ``silent`` of processes that ended without a word, in
    the order in which they ended.
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
    """The last thing a user sees."""
    rows = [
        ("rank", f"{failure.rank} ({failure.device})"),
        ("error", failure.exception),
        ("at", failure.place),
        ("log", str(folder.log_path(failure.rank))),
    ]
    lines = [Text.assemble((f"{name:6}", "bold"), text) for name, text in rows]
    return Panel(
        Group(*lines), title="the run failed", box=box.ASCII, border_style="red", expand=False
    )
