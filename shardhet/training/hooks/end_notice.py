"""EndNotice: a run learns that it must end soon, from a signal or from a file that appears."""

import logging
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from shardhet.training.hooks.hooks import Hook, Hooks

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDS_BETWEEN_LOOKS = 1.0


class EndNotice(Hook):
    """Ends the run on all ranks, after a whole step, if any one rank is given notice.

    That is SIGTERM, SIGUSR1 or Ctrl-C, of which a second one ends the program at once, or a
    file.  ``SaveCheckpoints`` then writes a checkpoint.
    """

    def __init__(
        self, of_run: str | Path | None = None, *, of_node: str | Path | None = None
    ) -> None:
        """The file ``of_run`` tells the whole run to end, and may say why.

        Signals and the file ``of_node`` tell this node, without which others may go on.
        """
        self.reason: str | None = None
        self._of_run = None if of_run is None else Path(of_run)
        self._of_node = None if of_node is None else Path(of_node)
        self._looked_at_s = 0.0
        self._handlers_before: dict[signal.Signals, Any] = {}

    def begin(self, run: Hooks) -> None:
        self._model = run.model
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                self._handlers_before[each] = signal.signal(each, self._on_signal)

    def end(self, error: BaseException | None) -> None:
        for each, handler in self._handlers_before.items():
            signal.signal(each, handler)

    def before_step(self, step: int) -> None:
        """Look for the files, at most once a second."""
        now_s = time.monotonic()
        if self.reason is not None or now_s < self._looked_at_s + SECONDS_BETWEEN_LOOKS:
            return
        self._looked_at_s = now_s
        for path in (self._of_run, self._of_node):
            if path is not None and path.exists():
                told = path.read_text(encoding="utf-8") if path == self._of_run else ""
                self._receive(told or f"{path} exists")

    def ends_run(self) -> bool:
        """Whether the whole run is told to end, as this rank sees it now."""
        return self._of_run is not None and self._of_run.exists()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:  # the next one, or what an agent makes of it, ends at once
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
        self._receive(signal.Signals(number).name)

    def _receive(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            logger.info("notice that the run has to end: %s", reason)
            self._model.ask_to_end()
