"""The figure of a run is drawn from its folder alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardhet.apps.cli.plots import Series
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.plot import figure_of, main
from shardhet.records.cluster import DeviceSpec


def write_run(path: Path) -> RunFolder:
    """A run of four steps on two devices, with a look and an evaluation every two."""
    folder = RunFolder(path)
    entries: list[dict[str, float | None]] = []
    for step in range(1, 5):
        loss = None if step == 3 else 5.0 - step
        entries.append({"step": step, "loss": loss, "num_tokens": 64, "step_time_s": 0.5})
        if step % 2 == 0:
            use = {f"device{i}/busy_share": 0.5 + 0.1 * i for i in range(2)}
            use |= {f"device{i}/waiting_share": 0.1 for i in range(2)}
            entries.append({"step": step, **use})
            entries.append({"step": step, "held_out_loss": 4.0})
    folder.metrics_path.write_text("".join(json.dumps(each) + "\n" for each in entries))
    folder.save_devices([DeviceSpec(kind="Tesla T4"), DeviceSpec()])
    return folder


def test_series_are_those_of_the_metrics(tmp_path: Path) -> None:
    figure = figure_of(write_run(tmp_path))
    assert figure.losses["loss"] == Series(steps=(1, 2, 4), values=(4.0, 3.0, 1.0))
    assert figure.losses["held_out_loss"].steps == (2, 4)
    assert figure.tokens_per_s.values == (128.0,) * 4
    assert figure.busy_shares["1 device"].values == (0.6, 0.6)
    assert list(figure.busy_shares) == ["0 Tesla T4", "1 device"]
    assert figure.waiting_shares.keys() == figure.busy_shares.keys()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_figure_is_written_where_asked(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_run(tmp_path)
    main([str(tmp_path), "--out", str(tmp_path / f"figure.{suffix}")])
    assert (tmp_path / f"figure.{suffix}").stat().st_size > 5000


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "has no metrics.jsonl. Give the folder of a run." in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "pip install 'shardhet[plots]'" in capsys.readouterr().err


def test_records_of_figures_need_no_matplotlib() -> None:
    code = "import sys, shardhet.apps.cli.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
