"""Detect random numbers that a model draws from Python and NumPy.

No seed of a microbatch reaches these generators: every rank would draw for itself, and a
recomputation anew.  A model may draw from them only if nothing depends on it, as a layerdrop
of 0.0 draws.  So each forward of a probe begins with generators whose next numbers are all
near 0; if any were drawn, further forwards begin with numbers near a half and near 1, and have
to give the same.

Both generators are Mersenne twisters (Matsumoto and Nishimura, 1998): 624 words, each of which
is tempered into 32 bits of output.  Words are chosen so that the tempered ones are as wanted.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NUM_WORDS = 624
NUM_CHOSEN = 500  # 250 numbers; the words that follow are arbitrary, so that loops end
# Words that are tempered into 0, into 2**31 (numbers of 0.5), and into 2**32 - 1.
LOW, MIDDLE, HIGH = 0x0, 0x80102204, 0x12DD9BB3
NUMBERS = {LOW: 0.0, MIDDLE: 0.5, HIGH: 1 - 2.0**-24}
NAMES = ("Python's random", "NumPy's random")


class HostGenerators:
    """The global generators of Python and NumPy, whose states it can set and look at."""

    def __init__(self) -> None:
        self._begun_with: list[Any] = []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context at whose end they are as before."""
        before = _states()
        try:
            yield
        finally:
            _set_states(before)

    def begin(self, word: int) -> None:
        """Let the next numbers of both be near that of the word."""
        filler = range(1, 1 + NUM_WORDS - NUM_CHOSEN)
        words = [word] * NUM_CHOSEN + [(i * 0x9E3779B9) % 2**32 for i in filler]
        python = random.getstate()
        states: list[Any] = [(python[0], (*words, 0), None)]
        if len(_states()) > 1:
            states.append(("MT19937", words, 0, 0, 0.0))
        _set_states(states)
        self._begun_with = _states()

    def drawn(self) -> list[str]:
        """The names of those that have been drawn from since the last ``begin``."""
        pairs = zip(NAMES, _states(), self._begun_with, strict=False)
        return [name for name, now, before in pairs if now != before]


def _states() -> list[Any]:
    """The state of Python's generator, and of NumPy's if it is imported and a twister."""
    states: list[Any] = [random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, *rest = numpy.random.get_state()
        if name == "MT19937":
            states.append((name, words.tolist(), *rest))
    return states


def _set_states(states: list[Any]) -> None:
    random.setstate(states[0])
    if len(states) > 1:
        sys.modules["numpy"].random.set_state(states[1])
