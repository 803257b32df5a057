"""load: a checkpoint into a model and its optimizer, under any plan.

Order of collectives (all ranks, in this order; "checkpoint.load" is their name):

    0  of the save of this model that is under way, if there is one
    1  all ranks have come; then every rank has opened the folder and verified its share of
       the files
    2  every rank has compared names and shapes with its model and optimizer
    3  every rank has read its rows

Before 2 and 3 a source that is not a folder all ranks see exchanges what they will read.

Model and optimizer are untouched if 1 or 2 raises.  A failure in 3 (a disk that stops
answering) leaves them half loaded.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.entries import GROUPS, MODEL, STATE
from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.checkpoint.format.metadata import BytesPlace
from shardhet.checkpoint.format.reading import (
    Reader,
    SavedCheckpoint,
    param_groups,
    states_by_fqn,
)
from shardhet.checkpoint.format.values import decode, tensor_names
from shardhet.checkpoint.saving import wait_for_pending
from shardhet.checkpoint.state.optimizer_state import (
    Optimizers,
    StoredState,
    check_classes,
    is_inner,
    listed,
    options_for,
    part_by_param,
    restore,
    some,
    trained_params,
)
from shardhet.checkpoint.state.parts import ModelPart, parts_of
from shardhet.checkpoint.state.ranks import Ranks, check_order
from shardhet.comm.channel import may_take_long
from shardhet.fsdp import HetFSDP
from shardhet.records.layout import Span

logger = logging.getLogger(__name__)


class CheckpointSource(Protocol):
    """A checkpoint that all ranks read, each the rows that it holds."""

    is_one_folder: bool  # that all ranks see under one path

    def open(self, ranks: Ranks) -> SavedCheckpoint:
        """Open and verify it.  Raises ``CheckpointError`` naming what is damaged or missing."""
        ...

    def fetch(self, saved: SavedCheckpoint, places: Sequence[BytesPlace], ranks: Ranks) -> None:
        """Bring ``places``, which this rank will read, to where it can.  Collective."""
        ...


class FolderSource:
    """A folder that all ranks see."""

    is_one_folder = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, ranks: Ranks) -> SavedCheckpoint:
        """Open it, and verify this rank's share of its files."""
        if ranks.is_writer:
            files.recover(self._path)
        saved = SavedCheckpoint.open(self._path)
        saved.verify(ranks.position, ranks.world_size)
        if saved.manifest is None and ranks.is_writer:
            logger.warning("%s has no manifest: its files cannot be verified", self._path)
        return saved

    def fetch(self, saved: SavedCheckpoint, places: Sequence[BytesPlace], ranks: Ranks) -> None:
        """Nothing: every rank reads what it needs itself."""


CALL = "checkpoint.load"
ONE_ROW = Span(0, 1)  # of a scalar


@may_take_long(CALL)
def load(model: nn.Module, optimizer: Optimizers, path: str | Path) -> Any:
    """Load model and optimizer from the folder ``path``; returns ``extra``.  Collective.

    The plan, the number of ranks and the dtypes may be others than when it was saved.  A plain
    module is loaded by each process that calls, without the others.  A checkpoint that
    ``torch.distributed.checkpoint`` wrote of ``{"model": ..., "optim": ...}`` (or of a model's
    state dict alone) is read too, but has no digests that its files could be compared with.
    Gradients stay as they are; ``model.step`` of a HetFSDP is that of the checkpoint.

    Args:
        model: has the parameters and buffers of the one that was saved.
        optimizer: of the same class; all of them in a list, if there are several; None leaves
            their state in the file.
        path: the folder that ``save`` was given.

    Raises ``CheckpointError`` on every rank if a file is damaged or missing, or listing names
    and shapes that do not fit; model and optimizer are then untouched.
    """
    check_order(CALL, model, path)
    return load_from(model, optimizer, FolderSource(Path(path).absolute()))


@may_take_long(CALL)
def load_from(model: nn.Module, optimizer: Optimizers, source: CheckpointSource) -> Any:
    """As ``load``, from any source.  Collective."""
    wait_for_pending(model)
    ranks = Ranks(model)
    ranks.meet(CALL)
    loading = _Loading(model, optimizer, source, ranks)
    opened = ranks.agree(loading.open, call=CALL)
    if len(set(opened)) > 1:
        raise CheckpointError(
            f"ranks have opened different checkpoints: {opened} in plan order. Name one folder "
            "that all ranks share."
        )
    source.fetch(loading.saved, loading.places_of_values(), ranks)
    ranks.agree(loading.compare, call=CALL)
    source.fetch(loading.saved, loading.places_of_rows(), ranks)
    ranks.agree(loading.take, call=CALL)
    return loading.extra


class _Loading:
    """One rank's part."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        source: CheckpointSource,
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._optimizers = listed(optimizer)
        self._source = source
        self._ranks = ranks
        self.saved: SavedCheckpoint
        self._parts: list[ModelPart] = []
        self._name_by_fqn: dict[str, str] = {}  # of the part, to the entry
        self._options: list[dict[str, Any]] = []
        self.extra: Any = None

    def open(self) -> str:
        """Open and verify; what identifies the checkpoint."""
        self.saved = saved = self._source.open(self._ranks)
        facts = "" if saved.manifest is None else saved.manifest.to_json()
        where = f"{saved.folder} " if self._source.is_one_folder else ""
        return f"{where}({files.digest_of_bytes(facts.encode())})"

    def places_of_values(self) -> list[BytesPlace]:
        """Where all plain values lie, and the tensors of ``extra``."""
        stored, manifest = self.saved.stored, self.saved.manifest
        extra = () if manifest is None else tensor_names(manifest.extra)
        tensors = [stored.tensors[name] for name in extra if name in stored.tensors]
        return [
            *stored.values.values(),
            *(chunk.place for tensor in tensors for chunk in tensor.chunks),
        ]

    def places_of_rows(self) -> list[BytesPlace]:
        """Where this rank's rows lie, of the model and of the optimizer's states."""
        tensors = self.saved.stored.tensors
        wanted = [(self._name_by_fqn[part.fqn], part.rows) for part in self._parts]
        if self._optimizers:
            parts = self._trained()
            wanted += [
                (name, self._rows_of(name, parts[fqn]))
                for fqn, states in states_by_fqn(self.saved, STATE).items()
                for name in states.values()
                if name in tensors
            ]
        return [c.place for name, rows in wanted for c in tensors[name].chunks_with(rows)]

    def _rows_of(self, name: str, part: ModelPart) -> Span:
        """The rows that this rank reads of a state: a piece is of who has the parameter."""
        shape = self.saved.stored.tensors[name].shape
        if not shape:
            return ONE_ROW
        return part.rows if shape == part.global_shape else Span(0, shape[0] * part.is_here)

    def compare(self) -> None:
        """Raise unless everything that will be read is there and fits."""
        self._parts = parts_of(self._model)
        self._name_by_fqn = _match(self.saved, self._parts)
        manifest = self.saved.manifest
        if manifest is not None:
            missing = set(tensor_names(manifest.extra)) - self.saved.stored.tensors.keys()
            if missing:
                raise CheckpointError(f"{self.saved.folder}: extra lacks {sorted(missing)}.")
        if not self._optimizers:
            return
        if not any(name.startswith(GROUPS) for name in self.saved.stored.values):
            raise CheckpointError(
                f"{self.saved.folder}: it holds no optimizer. Load with optimizer=None."
            )
        with Reader.of(self.saved) as reader:
            groups = param_groups(self.saved, reader, GROUPS)
        if manifest is not None:
            classes, folder = manifest.optimizer, self.saved.folder
            check_classes(self._optimizers, self._parts, groups, classes, folder)
        self._options = options_for(self._optimizers, self._parts, groups)
        self._check_states()

    def _check_states(self) -> None:
        """States of parameters that are trained, of their shape or scalars."""
        tensors = self.saved.stored.tensors
        parts = self._trained()
        problems = []
        for fqn, states in states_by_fqn(self.saved, STATE).items():
            if fqn not in parts:
                problems.append(f"state of {fqn}, which is not trained")
                continue
            for state, name in states.items():
                part, shape = parts[fqn], tensors[name].shape if name in tensors else ()
                is_piece = shape not in ((), part.global_shape) or is_inner(state, states)
                if is_piece and part.rows.numel and not part.is_whole:
                    problems.append(
                        f"{name} {shape} is of the whole parameter {part.global_shape}, which "
                        "is cut into rows (whole_matrices=True stores it whole)"
                    )
        if problems:
            raise CheckpointError(
                f"{self.saved.folder}: its optimizer does not fit: {some(problems)}. Train the "
                "parameters that were trained."
            )

    def _trained(self) -> dict[str, ModelPart]:
        """The parts of the optimizers' parameters, under all their names."""
        known, params = part_by_param(self._parts), trained_params(self._optimizers)
        return {fqn: known[param] for param in params for fqn in known[param].fqns}

    @torch.no_grad()
    def take(self) -> None:
        """Read this rank's rows, and everything that ranks have whole."""
        with Reader.of(self.saved) as reader:
            for part in self._parts:
                reader.read_rows(self._name_by_fqn[part.fqn], part.rows, part.tensor)
            if self._optimizers:
                states = self._read_states(reader)
                restore(self._optimizers, self._parts, states, self._options)
            if self.saved.manifest is not None:
                self.extra = decode(self.saved.manifest.extra, reader.tensor)
        if isinstance(self._model, HetFSDP) and self.saved.manifest is not None:
            self._model.step = self.saved.manifest.step or 0

    def _read_states(self, reader: Reader) -> dict[str, dict[str, StoredState]]:
        parts = self._trained()
        tensors = self.saved.stored.tensors
        by_fqn = states_by_fqn(self.saved, STATE)
        scalars = self._scalar_names(by_fqn, parts)
        found: dict[str, dict[str, StoredState]] = {}
        for fqn, states in by_fqn.items():
            part = parts[fqn]
            saved_param = tensors[self._name_by_fqn[part.fqn]]
            for state, name in states.items():
                if name not in tensors:
                    value, follows_param = reader.value(name), False
                    if isinstance(value, str) and not part.is_whole:
                        continue
                elif is_inner(state, states) and not part.rows.numel:
                    continue
                elif tensors[name].shape not in ((), part.global_shape):
                    if not part.rows.numel:
                        continue
                    value = reader.tensor(name)
                    follows_param = tensors[name].dtype == saved_param.dtype
                elif state in scalars:
                    value, follows_param = reader.tensor(name), False
                else:
                    value = self._read_like(part, name, reader)
                    follows_param = tensors[name].dtype == saved_param.dtype
                found.setdefault(part.fqn, {})[state] = StoredState(value, follows_param)
        return found

    def _read_like(self, part: ModelPart, name: str, reader: Reader) -> Tensor:
        """A state's rows in the shape of the local parameter."""
        assert part.param is not None
        dtype = self.saved.stored.tensors[name].dtype
        rows = torch.empty(part.tensor.shape, dtype=dtype)
        reader.read_rows(name, part.rows, rows)
        return rows.view(part.param.shape)

    def _scalar_names(
        self, by_fqn: Mapping[str, Mapping[str, str]], parts: Mapping[str, ModelPart]
    ) -> set[str]:
        """States that are one number whatever the parameter is.

        Those of a 0-d parameter could be either; the other parameters say which.
        """
        tensors = self.saved.stored.tensors
        return {"step"} | {
            state
            for fqn, states in by_fqn.items()
            for state, name in states.items()
            if parts[fqn].global_shape and name in tensors and not tensors[name].shape
        }


def model_names(saved: SavedCheckpoint) -> dict[str, str]:
    """The entries of the model's parameters and buffers, by fqn."""
    tensors = saved.stored.tensors
    if saved.manifest is None and not any(name.startswith(MODEL) for name in tensors):
        others = (STATE, GROUPS)  # a model's state dict alone, without a prefix
        return {name: name for name in tensors if not name.startswith(others)}
    return {name.removeprefix(MODEL): name for name in tensors if name.startswith(MODEL)}


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


def _match(saved: SavedCheckpoint, parts: Sequence[ModelPart]) -> dict[str, str]:
    """The entry of every part by its fqn; raises ``CheckpointError`` listing what differs."""
    names = model_names(saved)
    found = {
        part.fqn: names[fqn] for part in parts for fqn in reversed(part.fqns) if fqn in names
    }
    missing = sorted(part.fqn for part in parts if part.fqn not in found)
    unexpected = sorted(names.keys() - {fqn for part in parts for fqn in part.fqns})
    others = []
    for part in parts:
        if part.fqn in found:
            stored = saved.stored.tensors[found[part.fqn]]
            dtype = part.tensor.dtype
            if stored.shape != part.global_shape:
                others.append(f"{part.fqn} {stored.shape} instead of {part.global_shape}")
            elif stored.dtype.is_floating_point != dtype.is_floating_point:
                others.append(f"{part.fqn} {stored.dtype} instead of {dtype}")
    if missing or unexpected or others:
        lists = {"missing": missing, "unexpected": unexpected, "of another kind": others}
        shown = "; ".join(f"{what}: {some(which)}" for what, which in lists.items() if which)
        raise CheckpointError(
            f"{saved.folder}: it does not fit the model: {shown}. Load it into the model that "
            "was saved."
        )
    return found
