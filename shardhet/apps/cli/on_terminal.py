"""Live output: redrawn on a terminal, omitted elsewhere."""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console


class Drawing(Protocol):
    """A live display of rich, or a progress bar."""

    def start(self) -> None:
        """Begin to draw."""

    def stop(self) -> None:
        """Remove what is drawn."""


class OnTerminal:
    """A context in which ``drawing`` is drawn, if the console is a terminal."""

    def __init__(self, console: Console, drawing: Drawing) -> None:
        self.console = console
        self._drawing = drawing

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._drawing.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self._drawing.stop()
