"""The campaign of faults: one of each kind."""

import pytest

from experiments.recovery.ranks import DEEDS, Fault
from experiments.recovery.run import SECONDS_BEYOND_PATIENCE, inject
from tests.selection import one_in


@pytest.mark.campaign  # of an experiment alone
@pytest.mark.parametrize("seed", one_in(6, range(len(DEEDS))))
def test_a_fault_ends_the_run_with_the_culprit_named(seed: int) -> None:
    outcome = inject(Fault.of(seed))
    assert outcome.verdict == ("untouched" if outcome.deed == "slow" else "named")
    assert outcome.seconds - outcome.timeout_s < SECONDS_BEYOND_PATIENCE
