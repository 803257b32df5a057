"""Which cases ``make test`` runs, where ``make campaign`` runs the others."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest


def one_in(stride: int, cases: Iterable[Any]) -> list[Any]:
    """``cases`` for ``parametrize``: the first of every ``stride`` stays in ``make test``."""
    return [
        case if i % stride == 0 else for_campaign(*(case if type(case) is tuple else (case,)))
        for i, case in enumerate(cases)
    ]


def only(few: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """``cases`` for ``parametrize``: ``few`` of them stay in ``make test``."""
    return [
        case if case in few else for_campaign(*(case if type(case) is tuple else (case,)))
        for case in cases
    ]


def blocks(*of: tuple[int, int]) -> list[Any]:
    """(world size, block) for each block of four; the first of four stays in ``make test``."""
    return one_in(4, quads(*of))


def quads(*of: tuple[int, int]) -> list[tuple[int, int]]:
    """(world size, block) for each block of each four."""
    return [(size, 4 * quad + i) for size, quad in of for i in range(4)]


def for_campaign(*case: Any) -> Any:
    """A case for ``parametrize`` that ``make campaign`` alone runs."""
    return pytest.param(*case, marks=pytest.mark.campaign)


def sample(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Which of a product's cases hold every value of every parameter; the mark ``sampled``.

    One after the other, the first of those with the most values that no other has yet.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    kept: list[int] = []
    missing = set[tuple[str, str]]().union(*values)
    while missing:
        best = max(range(len(cases)), key=lambda i: len(values[i] & missing))
        kept.append(best)
        missing -= values[best]
    return kept
