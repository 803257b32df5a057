"""Notice that a run must end soon: a signal, or a file that appears.

with EndNotice(model.ask_to_end, files) as notice:
while ...:
notice.look()        # for the files; signals are noticed at once
trainer.train_step() # in which all ranks learn of it
if model.is_asked_to_end:
...              # save, and leave
"""

import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDS_BETWEEN_LOOKS = 1.0


class EndNotice:
    """Listens for the notice on this rank while it is entered; on the main thread."""

    def __init__(
        self, tell: Callable[[], None], *, of_run: Path, of_node: Path | None = None
    ) -> None:
        """``tell`` is called once, from a signal handler or ``look``.

        The file ``of_run`` tells the whole run to end, and may say why.  Signals and the file
        ``of_node`` tell this node, without which others may go on.
        """
        self.reason: str | None = None
        self._tell = tell
        self._of_run = of_run
        self._files = [of_run] if of_node is None else [of_run, of_node]
        self._looked_at_s = 0.0
        self._handlers_before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for each in SIGNALS:
            self._handlers_before[each] = signal.signal(each, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._handlers_before.items():
            signal.signal(each, handler)

    def look(self) -> None:
        """Look for the files, at most once a second."""
        now_s = time.monotonic()
        if self.reason is not None or now_s < self._looked_at_s + SECONDS_BETWEEN_LOOKS:
            return
        self._looked_at_s = now_s
        for path in self._files:
            if path.exists():
                told = path.read_text(encoding="utf-8") if path == self._of_run else ""
                self._receive(told or f"{path} exists")

    def ends_run(self) -> bool:
        """Whether the whole run is told to end, as this rank sees it now."""
        return self._of_run.exists()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:  # the next one, or what an agent makes of it, ends at once
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
        self._receive(signal.Signals(number).name)

    def _receive(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            logger.info("notice that the run has to end: %s", reason)
            self._tell()
