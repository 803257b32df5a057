"""Which cases ``make test`` runs, where ``make campaign`` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(stride: int, cases: Iterable[Any]) -> list[Any]:
    """``cases`` for ``parametrize``: the first of every ``stride`` stays in ``make test``."""
    return [
        case if i % stride == 0 else for_campaign(*(case if type(case) is tuple else (case,)))
        for i, case in enumerate(cases)
    ]


def for_campaign(*case: Any) -> Any:
    """A case for ``parametrize`` that ``make campaign`` alone runs."""
    return pytest.param(*case, marks=pytest.mark.campaign)
