"""The experiment for one GPU, as far as it goes without one."""

import shutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from experiments.common.results import Page, read_csv
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


def test_rows_are_in_the_file_as_soon_as_they_are_recorded(tmp_path: Path) -> None:
    results = own("results")
    ledger = results.Ledger(tmp_path / "results.csv")
    record = results.Recorder("speed", ledger.add)
    record("a, b", "tokens/s", 2.5, "tokens/s", 3)
    assert read_csv(tmp_path / "results.csv", results.Row) == ledger.rows
    assert ledger.rows[0].case == "a, b"


def test_a_loss_that_is_no_number_differs_as_much_as_can_be() -> None:
    largest_difference = own("results").largest_difference
    assert largest_difference([2.0, 4.0], [2.0, 4.004]) == pytest.approx(1e-3, rel=1e-2)
    assert largest_difference([1.0, float("nan")], [1.0, 1.0]) == 1.0


def test_speed_is_judged_against_both_opponents() -> None:
    results, speed = own("results"), own("speed")
    ledger = results.Ledger(None)
    record = results.Recorder("speed", ledger.add)
    for name, rate in {"HetFSDP": 99.0, "FSDP2": 90.0, "plain PyTorch": 102.0}.items():
        record(f"8 samples: {name}", speed.LOSS, 1e-4)
        for repeat in range(3):
            record(f"8 samples: {name}", speed.RATE, rate + repeat, "tokens/s", repeat)
    [table] = speed.tables(ledger.rows)
    assert [line[3] for line in table.rows] == ["1.000", "1.099", "0.971"]
    assert [bar.holds for bar in speed.bars(ledger.rows)] == [False, True, True]


def test_plans_of_streams_share_one_global_batch() -> None:
    streams = own("streams")
    for world_size in streams.WORLDS:
        cases = streams.cases_for(world_size)
        assert len({case.name for case in cases}) == len(cases)
        for case in cases:
            assert case.plan.world_size == world_size
            assert case.plan.round_size == streams.GLOBAL_BATCH_SIZE


def test_what_a_failed_part_had_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, results, launch, scale = own("run"), own("results"), own("launch"), own("scale")

    def half_a_part(*_: object, on_row: Callable[[object], None], **__: object) -> object:
        results.Recorder(program.nccl.NAME, on_row)("one rank: gather", "seconds", 0.002, "s")
        return launch.Outcome(failure="Traceback\nValueError: no luck")

    monkeypatch.setattr(program, "run_limited", half_a_part)
    shutil.copy(FOLDER / "README.md", tmp_path)
    ledger = results.Ledger(tmp_path / "results.csv")
    page = Page(tmp_path, is_kept=True, heading="a machine")
    report = program.Report(page, ledger, tmp_path)
    job = scale.Job(device=torch.device("cpu"), scale=scale.REHEARSAL, budget_s=1.0)
    [part] = [each for each in program.PARTS if each.name == program.nccl.NAME]
    report.add(part, job, report.run(part, job, 10.0))
    report.close()
    readme = (tmp_path / "README.md").read_text()
    for text in ("a machine", "| one rank: gather | 2.00 |", "did not finish", "no luck"):
        assert text in readme
    assert len(read_csv(tmp_path / "results.csv", results.Row)) == 1


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


def test_hidden_is_the_time_in_which_compute_runs_too() -> None:
    hidden_part = own("overlap").hidden_part
    assert hidden_part([(0, 10), (5, 20)], [(15, 40), (18, 30)]) == 5 / 20
    assert hidden_part([(0, 10)], []) == 0
    assert hidden_part([], [(0, 10)]) == 0


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
