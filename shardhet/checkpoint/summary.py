"""What a checkpoint holds, told without a model, whatever number of ranks wrote it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.entries import GROUPS, STATE
from shardhet.checkpoint.format.errors import CheckpointError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A checkpoint in numbers and names."""

    manifest: Manifest | None  # None: written by another program, without digests
    plan: Plan | None
    groups: tuple[Mapping[str, Any], ...]  # options, and fqns as "params"
    states: tuple[str, ...]  # names of the optimizer's states
    tensors: Mapping[str, StoredTensor]  # of the model, by fqn
    num_files: int
    num_bytes: int  # of tensors and values

    @property
    def num_elements(self) -> int:
        """Of all tensors of the model; a tied one counts under each of its names."""
        return sum(prod(each.shape) for each in self.tensors.values())


def summary_of(saved: SavedCheckpoint) -> Summary:
    """Read what there is to say.  Raises ``CheckpointError`` where a file is damaged."""
    manifest = saved.manifest
    with Reader.of(saved) as reader:
        groups = param_groups(saved, reader, GROUPS)
    states = states_by_fqn(saved, STATE).values()
    return Summary(
        manifest=manifest,
        plan=_plan_of(saved),
        groups=tuple(groups),
        states=tuple(dict.fromkeys(name for each in states for name in each)),
        tensors={fqn: saved.stored.tensors[name] for fqn, name in model_names(saved).items()},
        num_files=len(manifest.files) + 1 if manifest is not None else len(saved.file_names),
        num_bytes=saved.num_bytes,
    )


def _plan_of(saved: SavedCheckpoint) -> Plan | None:
    if saved.manifest is None or files.PLAN not in saved.manifest.files:
        return None
    try:
        return Plan.load(saved.folder / files.PLAN)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{saved.folder / files.PLAN}: {error}") from None


def read_model(saved: SavedCheckpoint) -> dict[str, Tensor]:
    """The model's state dict in host memory; tied names share a tensor."""
    by_place: dict[Any, Tensor] = {}
    found: dict[str, Tensor] = {}
    with Reader.of(saved) as reader, torch.no_grad():
        for fqn, name in model_names(saved).items():
            chunks = saved.stored.tensors[name].chunks
            if not chunks or chunks not in by_place:
                by_place[chunks] = reader.tensor(name)
            found[fqn] = by_place[chunks]
    return found
