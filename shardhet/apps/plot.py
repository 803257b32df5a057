"""``shardhet plot RUN...``: what runs have recorded, in a table and a picture."""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from shardhet.apps.cli.plots import draw_curves
from shardhet.apps.cli.streamed import WideConsole, figures_table, say
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.config.checks import ConfigError, check_outputs
from shardhet.config.compose import leaves_of

LAST_STEPS = 10  # of which the mean loss is shown
COPIED = {"loss", "step_time_s", "held_out_loss"}
GIB = 2**30
Curve = dict[int, float]  # by step


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one run has recorded."""

    name: str
    values: Mapping[str, Any]  # of its configuration, by key
    curves: Mapping[str, Curve]  # by the name of what was measured

    @classmethod
    def of(cls, folder: RunFolder, name: str) -> "Record":
        """Read the run; memory is that of its fullest device."""
        curves: dict[str, Curve] = defaultdict(dict)
        for line in folder.metrics_path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # a line that a killed run left in part
                entry = json.loads(line)
                step = int(entry.pop("step"))
                for key in COPIED & entry.keys():
                    curves[key] |= {step: entry[key]} if entry[key] is not None else {}
                memory = [entry[each] for each in entry if each.endswith("/peak_memory_bytes")]
                curves["memory_gib"] |= {step: max(memory) / GIB} if memory else {}
        values = leaves_of(folder.config_path)
        return cls(name=name, values=values, curves=curves)


def records_in(paths: Sequence[Path]) -> list[Record]:
    """Of each run, and of each job of a sweep; ``ConfigError`` for a folder that is neither."""
    found: list[Path] = []
    for path in paths:
        jobs = sorted(path.glob("*/metrics.jsonl"), key=lambda each: (len(str(each)), each))
        folders = [path] if (path / "metrics.jsonl").exists() else [job.parent for job in jobs]
        if not folders:
            raise ConfigError(
                f"{path}: no run has recorded anything there. Pass the folder of a run or of a "
                "sweep: runs/..."
            )
        found += [each.resolve() for each in folders]
    above = Path(os.path.commonpath([each.parent for each in found]))
    return [Record.of(RunFolder(each), str(each.relative_to(above))) for each in found]


def table_of(records: Sequence[Record]) -> Table:
    """One row for each run: in what its configuration differs, and what came of it."""
    keys = dict.fromkeys(key for each in records for key in each.values)
    of_runs = ("run_dir", "resume", "cluster.num_ranks")
    varied = [
        key
        for key in keys
        if key not in of_runs and len({str(each.values.get(key)) for each in records}) > 1
    ]
    names = ("steps", "loss", "held-out loss", "ms/step", "peak GiB")
    table = figures_table("run", *varied, *names, wraps=True)
    for each in records:
        loss, times = each.curves["loss"], each.curves["step_time_s"]
        last = islice(reversed(loss.values()), LAST_STEPS)
        held_out, memory = each.curves["held_out_loss"], each.curves["memory_gib"]
        table.add_row(
            each.name,
            *(str(each.values.get(key)) for key in varied),
            str(max(loss, default=0)),
            f"{fmean(last):.4f}" if loss else "-",
            f"{held_out[max(held_out)]:.4f}" if held_out else "-",
            f"{1000 * median(times.values()):.0f}" if times else "-",
            f"{max(memory.values()):.2f}" if memory else "-",
        )
    return table


def show(records: Sequence[Record]) -> None:
    """Print the table, of which a file gets all columns whole."""
    WideConsole().print(table_of(records))


class TableAtTheEnd(Callback):
    """Makes Hydra end a sweep with the table of its runs."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print the table, if the runs are in folders of this host."""
        with suppress(ConfigError):
            show(records_in([Path(config.hydra.sweep.dir)]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Show the table and draw the picture; the exit status is 2 if there is nothing to show."""
    parser = argparse.ArgumentParser(
        prog="shardhet plot",
        description="Show in what runs differ, their losses, step times and memory, and draw "
        "them beside each other.",
    )
    parser.add_argument("run", type=Path, nargs="+", help="folders of runs or of sweeps")
    parser.add_argument("--out", default="runs.png", help="the picture: .png, .svg or .pdf")
    given = parser.parse_args(arguments)
    try:
        check_outputs(picture=given.out)
        records = records_in(given.run)
    except ConfigError as error:
        parser.error(str(error))
    draw_curves({each.name: each.curves for each in records}, Path(given.out))
    show(records)
    say(Console(highlight=False), f"drawn to {given.out}")


if __name__ == "__main__":
    main()
