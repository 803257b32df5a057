"""The experiment for one GPU, as far as it goes without one."""

from functools import partial
from importlib import import_module
from types import ModuleType

import pytest
import torch

from tests.emulated.accelerator import Accelerator
from tests.worlds import run_ranks

GIB = 2**30


def own(name: str) -> ModuleType:
    return import_module(f"experiments.gpu.{name}")


@pytest.mark.parametrize(
    "free_gib, name, batches",
    [(139, "1.3B", (8, 16)), (79, "750M", (4, 8)), (23.5, "210M", (4, 8))],
)
def test_the_model_fits_the_memory_found(
    free_gib: float, name: str, batches: tuple[int, int]
) -> None:
    scale = own("scale").scale_for(int(free_gib * GIB))
    assert scale.name == name
    assert (scale.microbatch_size, scale.recomputed_batch_size) == batches


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="too little"):
        own("scale").scale_for(GIB)


def _hidden(rank: int) -> list[list[float]]:
    """What the check of overlap and its control find on an emulated accelerator."""
    overlap, found = own("overlap"), []
    for is_serial in (False, True):
        with Accelerator().installed() as accelerator:
            sleep, clock = partial(_sleep, accelerator), partial(_clock, accelerator)
            steps = overlap.step_times(accelerator.device, sleep, clock, is_serial=is_serial)
            found.append([hidden for _, hidden in steps])
    return found


def _sleep(accelerator: Accelerator, seconds: float) -> None:
    accelerator.current.begin("sleep", seconds)


def _clock(accelerator: Accelerator) -> float:
    accelerator.module().synchronize()
    return accelerator.host.now_s


def test_the_check_of_overlap_passes_and_its_control_fails() -> None:
    [(hidden, control)] = run_ranks(_hidden, 1, fresh_world=True)
    overlap = own("overlap")
    assert min(hidden) >= overlap.LEAST_HIDDEN, hidden
    assert max(control) <= overlap.MOST_OF_CONTROL, control


def test_a_first_step_is_taken_in_two_bytes() -> None:
    results, scale, checks = own("results"), own("scale"), own("checks")
    job = scale.Job(
        device=torch.device("cpu"), scale=scale.REHEARSAL, budget_s=1.0, is_rehearsal=True
    )
    ledger = results.Ledger(None)
    checks.first_steps(job, results.Recorder(checks.FIRST_STEPS, ledger.add))
    assert [row.metric for row in ledger.rows] == [checks.DIFFERENCE] * 4
    assert len(checks.SHAPES) == 12
    [bar] = results.bars_of(checks.FIRST_STEPS, checks.FIRST_METRICS, ledger.rows)
    assert bar.holds


def test_a_bad_loss_stops_the_run_or_changes_nothing() -> None:
    results, scale, checks = own("results"), own("scale"), own("checks")
    job = scale.Job(
        device=torch.device("cpu"), scale=scale.REHEARSAL, budget_s=1.0, is_rehearsal=True
    )
    ledger = results.Ledger(None)
    checks.guards(job, results.Recorder(checks.GUARDS, ledger.add))
    found = [(row.metric, row.value) for row in ledger.rows]
    assert found == [(checks.AS_EXPECTED, 1.0)] * 3
