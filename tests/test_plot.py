"""Runs in a table and a picture."""

import json
import sys
from pathlib import Path

import pytest

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


def test_a_picture_that_cannot_be_drawn_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for out, words in (("runs.txt", "must end in .png"), ("runs.png", "'shardhet[plots]'")):
        with pytest.raises(SystemExit):
            main([str(tmp_path), "--out", out])
        assert words in capsys.readouterr().err
        monkeypatch.setitem(sys.modules, "matplotlib", None)
