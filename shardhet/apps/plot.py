"""``shardhet plot RUN``: loss, throughput and what every device did, as one figure."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from shardhet.apps.cli.display import device_name
from shardhet.apps.cli.plots import RunFigure, Series, draw_run, series_of
from shardhet.apps.launch.run_folder import RunFolder


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the run; SystemExit with a remedy if that is not possible."""
    parser = argparse.ArgumentParser(
        prog="shardhet plot", description="Draw loss, throughput and device use of a run."
    )
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--out", type=Path, help="the file to write (default: RUN/plot.png)")
    given = parser.parse_args(arguments)
    folder = RunFolder(given.run)
    path = given.out or folder.path / "plot.png"
    try:
        import matplotlib  # noqa: F401 -- only to see whether it is here
    except ImportError:
        parser.error("matplotlib is not installed. Run pip install 'shardhet[plots]'.")
    if not folder.metrics_path.is_file():
        parser.error(f"{folder.path} has no metrics.jsonl. Give the folder of a run.")
    draw_run(figure_of(folder), path)
    Console(highlight=False, soft_wrap=True).print(f"written to {path}")


def figure_of(folder: RunFolder) -> RunFigure:
    """The data of the run's figure."""
    lines = folder.metrics_path.read_text(encoding="utf-8").splitlines()
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    names = [device_name(i, device) for i, device in enumerate(folder.load_devices())]
    losses = {key: series_of(entries, key) for key in ("loss", "held_out_loss")}
    return RunFigure(
        title=folder.path.name,
        losses={key: series for key, series in losses.items() if series.steps},
        tokens_per_s=_tokens_per_s(entries),
        busy_shares={
            name: series_of(entries, f"device{i}/busy_share") for i, name in enumerate(names)
        },
        waiting_shares={
            name: series_of(entries, f"device{i}/waiting_share") for i, name in enumerate(names)
        },
    )


def _tokens_per_s(entries: Sequence[dict[str, Any]]) -> Series:
    steps = [entry for entry in entries if "step_time_s" in entry]
    return Series(
        steps=tuple(entry["step"] for entry in steps),
        values=tuple(entry["num_tokens"] / entry["step_time_s"] for entry in steps),
    )
