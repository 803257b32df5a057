"""The experiment for one GPU, as far as it goes without one."""

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from experiments.common.results import Page, read_csv

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


def test_a_part_that_did_not_finish_leaves_a_table_without_what_is_missing() -> None:
    results, accumulation = own("results"), own("accumulation")
    ledger = results.Ledger(None)
    results.Recorder("accumulation", ledger.add)("HetFSDP, l = 4", "step", 0.5, "s")
    [table] = accumulation.tables(ledger.rows)
    assert table.rows == [["HetFSDP, l = 4", "500.0 (500.0-500.0)", "", ""]]
    assert accumulation.bars(ledger.rows) == []


def test_overhead_is_what_a_step_takes_beyond_its_microbatches() -> None:
    results, accumulation = own("results"), own("accumulation")
    ledger = results.Ledger(None)
    record = results.Recorder("accumulation", ledger.add)
    record(accumulation.COMPUTE_CASE, accumulation.COMPUTE, 0.1, "s")
    record("FSDP2, l = 4", accumulation.STEP, 0.5, "s")
    assert accumulation.overhead_s(ledger.rows, "FSDP2, l = 4") == pytest.approx(0.1)


def test_the_picture_shows_what_was_measured(tmp_path: Path) -> None:
    results, accumulation = own("results"), own("accumulation")
    ledger = results.Ledger(None)
    record = results.Recorder("accumulation", ledger.add)
    accumulation.draw(ledger.rows, tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()
    record(accumulation.COMPUTE_CASE, accumulation.COMPUTE, 0.1, "s")
    for count in accumulation.COUNTS:
        record(f"HetFSDP, l = {count}", accumulation.STEP, 0.1 * count + 0.05, "s")
    accumulation.draw(ledger.rows, tmp_path / "some.png")
    assert (tmp_path / "some.png").exists()


def test_plans_of_streams_share_one_global_batch() -> None:
    streams = own("streams")
    for world_size in streams.WORLDS:
        cases = streams.cases_for(world_size)
        assert len({case.name for case in cases}) == len(cases)
        for case in cases:
            assert case.plan.world_size == world_size
            assert case.plan.global_batch_size == streams.GLOBAL_BATCH_SIZE


def test_what_a_failed_part_had_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, results, launch, scale = own("run"), own("results"), own("launch"), own("scale")

    def half_a_part(*_: object, on_row: Callable[[object], None], **__: object) -> object:
        results.Recorder(run.nccl.NAME, on_row)("one rank: gather", "seconds", 0.002, "s")
        return launch.Outcome(failure="Traceback\nValueError: no luck")

    monkeypatch.setattr(run, "run_limited", half_a_part)
    monkeypatch.setattr(run, "HERE", tmp_path)
    shutil.copy(FOLDER / "README.md", tmp_path)
    ledger = results.Ledger(tmp_path / "results.csv")
    report = run.Report(Page(tmp_path, is_kept=True, heading="a machine"), ledger)
    job = scale.Job(device=torch.device("cpu"), scale=scale.REHEARSAL, budget_s=1.0)
    report.add(run.PARTS[-1], job, 10.0)
    report.close()
    readme = (tmp_path / "README.md").read_text()
    for text in ("a machine", "| one rank: gather | 2.00 |", "did not finish", "no luck"):
        assert text in readme
    assert len(read_csv(tmp_path / "results.csv", results.Row)) == 1


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
    assert len(table.rows) == len(memory.bars(ledger.rows)) == 4
