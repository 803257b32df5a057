"""The campaign of kills, a sample of it."""

import pytest

from experiments.recovery.interrupted.ranks import KILL, LOST, NOTICE, Fault
from experiments.recovery.interrupted.run import interrupt, undisturbed
from tests.selection import one_in


@pytest.mark.parametrize(
    ("seed", "deed"),
    one_in(
        4,
        [
            *[(3, KILL), (13, KILL), (14, KILL), (15, KILL), (1, NOTICE)],
            *[(6, LOST), (7, LOST), (8, LOST), (5, LOST)],
        ],
    ),
)
@pytest.mark.campaign  # as the rest of its program
def test_a_run_that_is_interrupted_goes_on_where_it_was(seed: int, deed: str) -> None:
    fault = Fault.of(seed, deed)
    outcome = interrupt(fault, undisturbed(fault.next_plan))
    is_same = fault.plan == fault.next_plan
    assert outcome.verdict == ("bit-equal" if is_same else outcome.verdict)
    assert outcome.is_well, outcome
