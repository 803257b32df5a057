"""The campaigns of faults: one of each kind, and some of the manifests."""

from pathlib import Path

import pytest

from experiments.recovery.manifests import run as manifests
from experiments.recovery.ranks import DEEDS, Fault
from experiments.recovery.run import SECONDS_BEYOND_PATIENCE, inject
from tests.selection import one_in


@pytest.mark.campaign  # of an experiment alone
@pytest.mark.parametrize("seed", one_in(6, range(len(DEEDS))))
def test_a_fault_ends_the_run_with_the_culprit_named(seed: int) -> None:
    outcome = inject(Fault.of(seed))
    assert outcome.verdict == ("untouched" if outcome.deed == "slow" else "named")
    assert outcome.seconds - outcome.patience_s < SECONDS_BEYOND_PATIENCE


@pytest.mark.campaign  # of an experiment alone
def test_manifests_with_other_values_are_refused_or_harmless(tmp_path: Path) -> None:
    whole, audit = manifests.make_whole(tmp_path / "whole"), manifests.Audit()
    outcomes = [manifests.try_out(seed, whole, audit) for seed in range(40)]
    assert [each for each in outcomes if not each.is_well] == []
