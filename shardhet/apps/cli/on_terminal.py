"""Live output: redrawn on a terminal, omitted elsewhere."""

from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import Progress


class OnTerminal:
    """A context in which ``drawing`` is drawn, if the console is a terminal."""

    def __init__(self, console: Console, drawing: Live | Progress) -> None:
        self.console = console
        self._drawing = drawing

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._drawing.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._drawing.stop()
