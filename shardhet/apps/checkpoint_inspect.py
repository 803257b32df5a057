"""``shardhet inspect PATH``: show what a checkpoint contains, and verify its files."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from shardhet.apps.cli.streamed import WideConsole, refusing
from shardhet.checkpoint import CheckpointError, Checkpoints
from shardhet.checkpoint.format.manifest import Manifest
from shardhet.checkpoint.format.metadata import StoredTensor
from shardhet.checkpoint.format.reading import SavedCheckpoint
from shardhet.checkpoint.summary import Summary, summary_of

MIB = 2**20
SHOWN_OPTIONS = ("lr", "weight_decay", "momentum", "betas")


def main(arguments: Sequence[str] | None = None) -> None:
    """Show the checkpoint; the exit status is 1 if it is not whole, 2 if there is none."""
    parser = argparse.ArgumentParser(
        prog="shardhet inspect",
        description="Show what a checkpoint holds, and read all its files to see whether they "
        "are what was written. No GPU and no number of ranks is needed.",
    )
    parser.add_argument(
        "path",
        type=Path,
        help="a checkpoint, or a folder with one per step (a run, or its checkpoints/)",
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor of the model")
    given = parser.parse_args(arguments)
    console = WideConsole(soft_wrap=True)
    if not given.path.is_dir():
        parser.error(f"{given.path} is not a folder. Give the folder of a checkpoint.")
    of_run = given.path / "checkpoints"
    checkpoints = Checkpoints(of_run if of_run.is_dir() else given.path)
    if checkpoints.steps():
        paths = [checkpoints.path_of(step) for step in checkpoints.steps()]
        broken = [_show_line(path, console) for path in paths]
        if any(broken):
            raise SystemExit(1)
        return
    with refusing("", (CheckpointError,), status=1):
        saved = SavedCheckpoint.open(given.path)
        summary = summary_of(saved)
        saved.verify()
    console.print(_table(summary))
    if given.tensors:
        for name, each in summary.tensors.items():
            console.print(f"{name} {list(each.shape)} {_dtype(each)}", markup=False)
    verdict = (
        f"Complete: all {summary.num_files} files match their digests."
        if summary.manifest is not None
        else "Complete, but written without digests: its files cannot be verified."
    )
    console.print(verdict)


def _show_line(path: Path, console: Console) -> bool:
    """One line on one of many checkpoints; whether it is broken."""
    try:
        saved = SavedCheckpoint.open(path)
        saved.verify()
    except CheckpointError as error:
        console.print(f"{path.name}  broken  {error}", markup=False)
        return True
    console.print(f"{path.name}  whole  {saved.num_bytes / MIB:,.1f} MiB", markup=False)
    return False


def _table(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(summary):
        table.add_row(name, text)
    return table


def _rows(summary: Summary) -> list[tuple[str, str]]:
    dtypes = sorted(set(map(_dtype, summary.tensors.values())))
    rows = [
        *_manifest_rows(summary.manifest),
        (
            "model",
            f"{summary.num_elements:,} elements in {len(summary.tensors):,} tensors of "
            f"{', '.join(dtypes)}",
        ),
        ("plan", _plan(summary)),
        ("states", ", ".join(summary.states) or "none"),
        ("size", f"{summary.num_bytes / MIB:,.1f} MiB in {summary.num_files} files"),
    ]
    for number, group in enumerate(summary.groups):
        options = [f"{name} {group[name]}" for name in SHOWN_OPTIONS if name in group]
        params = f"{len(group['params']):,} parameters"
        rows.append((f"group {number}", ", ".join([params, *options])))
    return rows


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _manifest_rows(manifest: Manifest | None) -> list[tuple[str, str]]:
    if manifest is None:
        return [("written by", "another program")]
    versions = ", ".join(f"{name} {v or 'unknown'}" for name, v in manifest.versions.items())
    num_ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    is_named = isinstance(manifest.extra, dict)
    extra = ", ".join(manifest.extra) if is_named else type(manifest.extra).__name__
    return [
        ("step", "unknown" if manifest.step is None else f"{manifest.step:,}"),
        ("written by", f"{num_ranks}; {versions}"),
        ("digest", manifest.model_digest),
        ("optimizer", manifest.optimizer or "none"),
        ("extra", "none" if manifest.extra is None else extra),
    ]


def _plan(summary: Summary) -> str:
    plan = summary.plan
    if plan is None:
        return "none"
    shares = ", ".join(f"{share:.1%}" for share in plan.state_shares[:8])
    more = ", ..." if plan.world_size > 8 else ""
    return (
        f"{plan.world_size} devices, {plan.global_batch_size} samples a step, "
        f"shares {shares}{more}; digest {plan.digest}"
    )
