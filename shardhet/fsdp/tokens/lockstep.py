"""What is in place of torch's attention, and pieces of a sequence that meet in it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.nn import functional as F

NUM_PIECES = 2
T = TypeVar("T")
attention = F.scaled_dot_product_attention


@contextmanager
def attending_by(function: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``function`` is in place of ``F.scaled_dot_product_attention``."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = function
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


class Meeting:
    """Where pieces wait for each other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(NUM_PIECES)
        self._brought: list[Any] = [None] * NUM_PIECES

    def meet(self, part: int, brought: Any) -> list[Any]:
        """What all have brought."""
        self._brought[part] = brought
        self.barrier.wait()
        found = list(self._brought)
        self.barrier.wait()
        return found


def in_lockstep(run_piece: Callable[[int, Meeting], T], attend: Callable[..., Any]) -> list[T]:
    """What ``run_piece`` returns for each piece, while ``attend`` is in place of torch's
    attention; raises the first error of any.
    """
    meeting, errors = Meeting(), list[BaseException]()
    found = dict[int, T]()

    def run(part: int) -> None:
        try:
            found[part] = run_piece(part, meeting)
            meeting.meet(part, None)  # nobody waits for who has ended
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()  # who has left is not waited for

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(NUM_PIECES)]
    with attending_by(attend):
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    if errors:
        raise errors[0]
    return [found[part] for part in range(NUM_PIECES)]
