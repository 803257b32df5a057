"""``shardhet export PATH --to FORMAT --out FILE``: write a checkpoint's model as one file."""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shardhet.apps.cli.streamed import refusing, say
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.checkpoint import CheckpointError
from shardhet.checkpoint.format.reading import SavedCheckpoint
from shardhet.checkpoint.loading import read_model
from shardhet.config.checks import ConfigError
from shardhet.config.compose import load_resolved
from shardhet.config.models import HfConf

FORMATS = ("safetensors", "hf")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the model; the exit status is 1 if that fails, 2 if the command line is wrong."""
    parser = argparse.ArgumentParser(
        prog="shardhet export",
        description="Write the parameters and buffers of a checkpoint under the model's own "
        "names to one file, which plain PyTorch opens, or that of a run with model=hf to a "
        "folder, which from_pretrained opens, or PeftModel if it has adapters. The number of "
        "ranks that saved does not matter. Takes host memory for the whole model.",
    )
    parser.add_argument("path", type=Path, help="the folder of a checkpoint")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the format")
    parser.add_argument(
        "--out", type=Path, required=True, help="the file or folder, which must be new"
    )
    given = parser.parse_args(arguments)
    if given.out.exists():
        parser.error(f"{given.out} exists. Name a new file, or remove it.")
    if not given.out.absolute().parent.is_dir():
        parser.error(f"{given.out.absolute().parent} is not a folder. Create it first.")
    kinds = (CheckpointError, ConfigError, OSError)
    with refusing("\nNothing was exported.", kinds, status=1):
        saved = SavedCheckpoint.open(given.path)
        saved.verify()
        tensors = read_model(saved)
        if given.to == "hf":
            write_folder(tensors, given.out, RunFolder(saved.folder.parent.parent))
        else:
            write_model(tensors, given.out)
    num = sum(tensor.numel() for tensor in tensors.values())
    found = f"{len(tensors)} tensors with {num:,} elements"
    say(Console(highlight=False), found, f"written to {given.out}")


def write_model(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write ``tensors`` to ``path``, which appears when it is complete."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.touch()  # an OSError says why it cannot be made
        save_file(_unshared(tensors), unfinished, metadata={"format": "pt"})
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.rename(path)
    except (SafetensorError, RuntimeError) as error:  # of a full disk, for example
        raise OSError(f"{path}: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def write_folder(tensors: Mapping[str, Tensor], path: Path, run: RunFolder) -> None:
    """Write what ``save_pretrained`` does; ``path`` appears when it is complete."""
    conf = load_resolved(run.config_path).model if run.config_path.exists() else None
    if not isinstance(conf, HfConf):
        raise ConfigError(
            f"{run.path}: it is not the folder of a run with model=hf, which has the model's "
            "configuration, but --to hf needs one. Export --to safetensors."
        )
    with torch.device("meta"):
        module: Any = conf.folder().on_meta(dtype=torch.float32, lora=conf.adapters())
    odd = module.load_state_dict(tensors, strict=False, assign=True)
    if odd.unexpected_keys or odd.missing_keys:
        raise ConfigError(
            f"{conf.path}: its config.json is of another model than {run.path} has trained, "
            f"which differs in {sorted(odd.unexpected_keys + odd.missing_keys)[:4]}. Put back "
            "the model's own."
        )
    unfinished = path.with_name(f".{path.name}.unfinished")
    module.save_pretrained(unfinished)
    conf.copy_tokenizer(load_resolved(run.config_path).data, unfinished)
    unfinished.rename(path)


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied parameters as copies: the format allows no shared memory."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        is_shared = id(tensor) in seen
        seen.add(id(tensor))
        found[name] = tensor.clone() if is_shared else tensor
    return found
