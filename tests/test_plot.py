"""Runs in a table and a picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardhet.apps.cli.plots import TimelineTrack, draw_timeline
from shardhet.apps.plot import main

pytest.importorskip("matplotlib", reason="pictures need matplotlib")


def record(folder: Path, lr: float, losses: list[float | None]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run_dir: {folder}\nseed: 0\noptim: {{lr: {lr}}}\n")
    steps = enumerate(losses, start=1)
    lines = [{"step": i, "loss": loss, "step_time_s": 0.25} for i, loss in steps]
    lines += [{"step": len(losses), "held_out_loss": 1.5, "held_out_bits_per_byte": 3.0}]
    for i in range(2):
        lines.append({"step": 1, f"device{i}/peak_memory_bytes": 2**30 * (i + 1)})
    text = "\n".join(map(json.dumps, lines))
    (folder / "metrics.jsonl").write_text(text + '\n{"step": 9, "lo')


def test_runs_are_shown_by_what_they_differ_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "alone", 0.1, [4.0, None, 2.0])
    for i, lr in enumerate((0.2, 0.3)):
        record(tmp_path / "sweep" / str(i), lr, [3.0])
    picture = tmp_path / "runs.svg"
    main([f"{tmp_path}/alone", f"{tmp_path}/sweep", "--out", str(picture)])
    table = capsys.readouterr().out.splitlines()
    cells = [line.strip("|").split("|") for line in table if line.startswith("| ")]
    assert [[cell.strip() for cell in row] for row in cells] == [
        ["run", "optim.lr", "steps", "loss", "held-out loss", "ms/step", "peak GiB"],
        ["alone", "0.1", "3", "3.0000", "1.5000", "250", "2.00"],
        ["sweep/0", "0.2", "1", "3.0000", "1.5000", "250", "2.00"],
        ["sweep/1", "0.3", "1", "3.0000", "1.5000", "250", "2.00"],
    ]
    assert picture.read_text().count("<svg") == 1
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere")])
    assert "nowhere: no run has recorded anything there" in capsys.readouterr().err


def test_memory_in_pictures_has_the_unit_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [(0.0, 2.0**20), (1.0, 2.0**20)]
    from matplotlib.figure import Figure

    seen: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _path: seen.append(figure))
    for budget, unit in ((2**26, "MiB"), (2**34, "GiB")):
        lane = TimelineTrack(
            label="0 x", spans=[("agree", 0.0, 1.0)], memory_bytes=held, budget_bytes=budget
        )
        draw_timeline("a step", [lane], Path("unused.png"))
        work, memory = seen.pop().axes
        assert memory.get_ylabel() == f"{unit} held"
        assert memory.lines[0].get_ydata()[0] == 2**20 / (2**20 if unit == "MiB" else 2**30)
        [said] = work.get_legend().get_texts()
        assert said.get_text() == "waits for the slowest device"
