"""The experiment for one GPU, as far as it goes without one."""

from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from experiments.common.results import read_csv
from tests.emulated.accelerator import Accelerator
from tests.programs import run
from tests.worlds import run_ranks

FOLDER = Path(__file__).parent.parent / "experiments" / "gpu"
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


CHECKS = ("controls", "reads", "bad losses")


@pytest.mark.campaign  # of an experiment alone
def test_a_case_that_fails_loses_nothing_of_the_others(tmp_path: Path) -> None:
    """Rehearsed as a program; and the control is noticed."""
    out = tmp_path / "out"
    only = [word for name in CHECKS for word in ("--only", name)]
    program = ["-m", "experiments.gpu.run", "--rehearse", "--out", str(out)]
    done = run([*program, *only, "--fail", "bad losses: SKIP"], FOLDER.parent.parent)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = read_csv(out / "results.csv", own("results").Row)
    checks = own("checks")
    value_by_case = {row.case: row.value for row in rows}
    assert value_by_case["STOP"] == value_by_case["ROLL_BACK"] == 1
    assert "SKIP" not in value_by_case
    [failed] = [row.case for row in rows if row.metric == "failed"]
    assert "made to fail" in failed
    assert "made to fail" in (out / "failures.txt").read_text()
    assert value_by_case[checks.OTHER_RATE] > checks.TOLERANCES[checks.FLOAT32]
    [bar] = checks.control_bars([row for row in rows if row.part == checks.CONTROL])
    assert bar.holds
    assert len(list(out.iterdir())) <= 8
    assert "A loss that is not a number" in (out / "README.md").read_text()


def test_a_first_step_is_taken_in_two_bytes() -> None:
    results, scale, checks = own("results"), own("scale"), own("checks")
    job = scale.Job(
        device=torch.device("cpu"), scale=scale.REHEARSAL, budget_s=1.0, is_rehearsal=True
    )
    ledger = results.Ledger(None)
    checks.first_steps(job, results.Recorder(checks.FIRST_STEPS, ledger.add))
    assert [row.metric for row in ledger.rows] == [checks.DIFFERENCE] * 4
    assert len(checks.SHAPES) == 12
    assert checks.first_bars(ledger.rows)[1].holds


@pytest.mark.campaign  # of an experiment alone
def test_the_memory_part_predicts_and_trains_every_plan() -> None:
    results, scale, memory = own("results"), own("scale"), own("memory")
    job = scale.Job(
        device=torch.device("cpu"),
        scale=scale.REHEARSAL,
        budget_s=1.0,
        is_short=True,
        is_rehearsal=True,
    )
    ledger = results.Ledger(None)
    memory.run(job, results.Recorder("memory", ledger.add))
    [table] = memory.tables(ledger.rows)
    assert len(table.rows) == 4
    assert len(memory.bars(ledger.rows)) == 8
