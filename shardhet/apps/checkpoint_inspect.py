"""``shardhet inspect PATH``: show what a checkpoint contains, and verify its files."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from shardhet.apps.cli.streamed import WideConsole, refusing
from shardhet.checkpoint import CheckpointError, Checkpoints
from shardhet.checkpoint.format.entries import GROUPS, STATE
from shardhet.checkpoint.format.files import PLAN
from shardhet.checkpoint.format.manifest import Manifest
from shardhet.checkpoint.format.metadata import StoredTensor
from shardhet.checkpoint.format.reading import (
    Reader,
    SavedCheckpoint,
    param_groups,
    states_by_fqn,
)
from shardhet.checkpoint.loading import model_names
from shardhet.records.plan import Plan

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
        names = model_names(saved)
        tensors = {fqn: saved.stored.tensors[name] for fqn, name in names.items()}
        table = _table(saved, tensors)
        saved.verify()
    console.print(table)
    if given.tensors:
        for name, each in tensors.items():
            console.print(f"{name} {list(each.shape)} {_dtype(each)}", markup=False)
    status = (
        f"Complete: all {_num_files(saved)} files match their digests."
        if saved.manifest is not None
        else "Complete, but written without digests: its files cannot be verified."
    )
    console.print(status)


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


def _table(saved: SavedCheckpoint, tensors: Mapping[str, StoredTensor]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(saved, tensors):
        table.add_row(name, text)
    return table


def _rows(
    saved: SavedCheckpoint, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, str]]:
    """What it holds; a tied tensor counts under each of its names."""
    dtypes = sorted(set(map(_dtype, tensors.values())))
    numel = sum(prod(each.shape) for each in tensors.values())
    states = dict.fromkeys(s for each in states_by_fqn(saved, STATE).values() for s in each)
    yield from _manifest_rows(saved.manifest)
    yield "model", f"{numel:,} elements in {len(tensors):,} tensors of {', '.join(dtypes)}"
    yield "plan", _plan(saved)
    yield "states", ", ".join(states) or "none"
    yield "size", f"{saved.num_bytes / MIB:,.1f} MiB in {_num_files(saved)} files"
    with Reader.of(saved) as reader:
        groups = param_groups(saved, reader, GROUPS)
    for number, group in enumerate(groups):
        options = [f"{name} {group[name]}" for name in SHOWN_OPTIONS if name in group]
        params = f"{len(group['params']):,} parameters"
        yield f"group {number}", ", ".join([params, *options])


def _num_files(saved: SavedCheckpoint) -> int:
    """Of all, the manifest among them."""
    if saved.manifest is None:
        return len(saved.file_names)
    return len(saved.manifest.files) + 1


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


def _plan(saved: SavedCheckpoint) -> str:
    if saved.manifest is None or PLAN not in saved.manifest.files:
        return "none"
    try:
        plan = Plan.load(saved.folder / PLAN)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{saved.folder / PLAN}: {error}") from None
    shares = ", ".join(f"{share:.1%}" for share in plan.state_shares[:8])
    more = ", ..." if plan.world_size > 8 else ""
    return (
        f"{plan.world_size} devices, {plan.global_batch_size} samples a step, "
        f"shares {shares}{more}; digest {plan.digest}"
    )
