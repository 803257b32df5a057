"""The demo: what it plans, what it shows, and that it runs from a shell to a falling loss."""

import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from shardhet.apps.demo import even_plan, lr_fraction, parse_options, uneven_plan
from shardhet.apps.demo_report import (
    EMULATED,
    Reporter,
    StepMetrics,
    WorkDone,
    plan_table,
    work_table,
)
from shardhet.data import TableScores
from shardhet.plan import Plan

MIB = 2**20


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardhet.apps.demo", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def text_of(table: Table) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def step_metrics(step: int, bits: float = 4.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        train_bits_per_byte=bits,
        grad_norm=0.5,
        learning_rate=1e-3,
        num_tokens=1000,
        step_time_s=0.5,
    )


def reporter(out_dir: Path | None = None, *, is_rank_zero: bool = True) -> Reporter:
    return Reporter(num_steps=4, steps_per_line=2, out_dir=out_dir, is_rank_zero=is_rank_zero)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickRun:
    stdout: str
    entries: list[dict[str, float]]  # of its metrics
    plan: Plan

    @property
    def bits_per_byte(self) -> list[float]:
        return [v for entry in self.entries for k, v in entry.items() if "bits_per_byte" in k]


def quick_run(out_dir: Path, *arguments: str) -> QuickRun:
    run = run_demo("--quick", "--out", str(out_dir), *arguments)
    assert run.returncode == 0, run.stderr
    return QuickRun(
        stdout=run.stdout,
        entries=[json.loads(line) for line in (out_dir / "metrics.jsonl").open()],
        plan=Plan.load(out_dir / "plan.json"),
    )


@pytest.fixture(scope="module")
def uneven_run(tmp_path_factory: pytest.TempPathFactory) -> QuickRun:
    return quick_run(tmp_path_factory.mktemp("uneven"))


def test_a_quick_run_shows_the_plan_and_learns(uneven_run: QuickRun) -> None:
    assert uneven_run.plan.ranks == uneven_plan().ranks
    for rank in uneven_plan().ranks:
        assert str(rank.device.kind).removeprefix(EMULATED) in uneven_run.stdout
    held_out = [float(b) for b in re.findall(r"held-out (\d\.\d+) bits", uneven_run.stdout)]
    assert held_out[0] == pytest.approx(8.0, abs=0.1)  # knows nothing: a byte is 8 bits
    assert held_out[-1] < 4.52  # what the unigram table needs
    losses = [e["train_bits_per_byte"] for e in uneven_run.entries if "grad_norm" in e]
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 2


def test_an_even_plan_gives_the_same_losses(uneven_run: QuickRun, tmp_path: Path) -> None:
    even_run = quick_run(tmp_path, "--even")
    assert even_run.plan.ranks == even_plan().ranks
    assert len(even_run.bits_per_byte) == 16 + 2 * 3
    # In float32 and through 16 optimizer steps; test_parity asks for more.
    assert even_run.bits_per_byte == pytest.approx(uneven_run.bits_per_byte, abs=1e-4)


def test_a_rank_that_fails_ends_the_demo_with_its_name_and_its_error(tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("in the way")
    run = run_demo("--quick", "--out", str(not_a_folder))
    assert run.returncode == 1
    last_line = run.stderr.splitlines()[-1]
    assert last_line.startswith("demo: rank 0 failed first")
    assert str(not_a_folder) in last_line


def test_plan_decouples_compute_from_state() -> None:
    ranks = uneven_plan().ranks
    by_samples = sorted(range(4), key=lambda i: ranks[i].rank_batch_size)
    by_state = sorted(range(4), key=lambda i: ranks[i].state_share)
    assert by_samples != by_state
    assert ranks[by_state[-1]].rank_batch_size == 0
    assert len({rank.num_microbatches for rank in ranks}) > 2
    assert len({rank.device for rank in ranks}) == 4  # else ranks could not be told apart


def test_plan_table_shows_each_device_beside_an_even_split() -> None:
    text = text_of(plan_table(uneven_plan(), [3 * MIB, 0, 2 * MIB, 5 * MIB], title="a title"))
    rows = [re.split(r"\s*\u2502\s*", line)[1:-1] for line in text.splitlines()]
    assert ["0 big", "3 x 8", "24 (60%)", "no", "3.00 (30%)", "10", "2.50"] in rows
    assert ["1 cramped", "3 x 4", "12 (30%)", "yes", "0.00 (0%)", "10", "2.50"] in rows
    assert ["3 store", "none", "0 (0%)", "no", "5.00 (50%)", "10", "2.50"] in rows


def test_a_ragged_last_microbatch_is_shown() -> None:
    plan = Plan.by_hand(microbatch_sizes=[4, 2], rank_batch_sizes=[11, 1], state_shares=[1, 0])
    text = text_of(plan_table(plan, [MIB, 0], title=""))
    assert "2 x 4 + 3" in text
    assert "1 x 1" in text


def test_work_table_shows_what_was_measured() -> None:
    idle = WorkDone(num_samples=0, compute_s=0.0, wait_s=12.25, state_bytes=MIB // 2)
    text = text_of(work_table(uneven_plan(), [idle] * 4))
    assert text.count("12.2 s") == 4
    assert text.count("0.50") == 4


def test_a_line_averages_the_steps_since_the_last_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = reporter()
    for step, bits in enumerate([5.0, 4.0, 3.0, 2.0], start=1):
        shown.show_step(step_metrics(step, bits))
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r"train (\S+)", line)[0] for line in lines] == ["4.500", "2.500"]
    assert all("2,000 tokens/s" in line for line in lines)
    assert ["1 s left" in lines[0], "0 s left" in lines[1]] == [True, True]


def test_ranks_other_than_zero_show_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = reporter(tmp_path / "out", is_rank_zero=False)
    silent.show_plan(uneven_plan(), Table())
    silent.show_step(step_metrics(2))
    silent.show_held_out(
        2, 3.0, TableScores(unigram_bits_per_byte=4.0, bigram_bits_per_byte=3.0)
    )
    silent.show_end(Table())
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "out").exists()


def test_learning_rate_rises_then_falls_and_never_stops() -> None:
    fractions = [lr_fraction(step, 100) for step in range(100)]
    peak = fractions.index(max(fractions))
    assert max(fractions) == 1.0
    assert fractions[: peak + 1] == sorted(fractions[: peak + 1])
    assert fractions[peak:] == sorted(fractions[peak:], reverse=True)
    assert 0 < fractions[-1] < 0.1
    assert all(0 < lr_fraction(step, n) <= 1 for n in range(1, 9) for step in range(n))


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options(["--steps", "3"]).num_evaluations == 3
    with pytest.raises(SystemExit):
        parse_options(["--steps", "0"])
    assert "at least 1" in capsys.readouterr().err
