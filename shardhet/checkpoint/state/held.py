"""What one rank holds of a model and its optimizer, ready to be written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.checkpoint.format.entries import (
    EXTRA,
    MODEL,
    Entry,
    HeldPart,
    RankContents,
    entries_of,
    whole_entry,
)
from shardhet.checkpoint.format.metadata import DTYPES
from shardhet.checkpoint.format.values import encode
from shardhet.checkpoint.format.writing import Description
from shardhet.checkpoint.state.optimizer_state import (
    Optimizers,
    class_of_groups,
    groups_of,
    listed,
    states_of,
)
from shardhet.checkpoint.state.parts import parts_of
from shardhet.checkpoint.state.ranks import Ranks
from shardhet.fsdp import HetFSDP


class RankState:
    """The tensors and values of this rank, by the names of their entries."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.content: dict[str, Any] = {}
        self.extra: Any = None  # as JSON
        self.extra_entries: list[tuple[str, Tensor]] = []
        self.plan_json: str | None = None

    def collect(
        self, model: nn.Module, optimizer: Optimizers, path: Path, extra: Any
    ) -> RankContents:
        """Find out what there is; raises ``CheckpointError`` for what cannot be saved."""
        parts = parts_of(model)
        self.content = {MODEL + part.fqn: part.tensor for part in parts}
        optimizers = listed(optimizer)
        groups = groups_of(optimizers, parts)
        states, rows = states_of(optimizers, parts)
        self.content |= rows
        if self._ranks.is_writer:
            self.extra = encode(extra, "extra", self._keep)
        if isinstance(model, HetFSDP):
            self.plan_json = model.plan.to_json()
        return RankContents(
            position=self._ranks.position,
            path=str(path),
            step=model.step if isinstance(model, HetFSDP) else None,
            parts=tuple(
                HeldPart(
                    part.fqns,
                    part.global_shape,
                    str(part.tensor.dtype),
                    part.rows,
                    part.param is None,
                )
                for part in parts
            ),
            states=states,
            groups=groups,
            optimizer=class_of_groups(optimizers),
        )

    def _keep(self, tensor: Tensor) -> str:
        name = f"{EXTRA}{len(self.extra_entries)}"
        self.extra_entries.append((name, tensor))
        self.content[name] = tensor
        return name

    def described(self, holdings: Sequence[RankContents], writer: int) -> Description:
        """The checkpoint; what is whole everywhere is in the writer's content from now on."""
        return Description(
            holdings=holdings,
            entries=self._add_whole(holdings, writer),
            writer=writer,
            extra=self.extra,
            plan_json=self.plan_json,
        )

    def _add_whole(self, holdings: Sequence[RankContents], writer: int) -> list[Entry]:
        entries = entries_of(holdings, writer)
        if self._ranks.position != writer:
            return entries
        for entry in entries:
            if entry.dtype is None:
                self.content[entry.name] = entry.value
            elif entry.value is not None:
                number = torch.tensor(entry.value, dtype=DTYPES[entry.dtype])
                self.content[entry.name] = number
        for i, (name, tensor) in enumerate(self.extra_entries):
            shape, dtype = tuple(tensor.shape), str(tensor.dtype)
            keys = ("extra", str(i))
            entries.append(whole_entry(name, keys, writer, shape=shape, dtype=dtype))
        return entries

    def copy(self) -> None:
        """Keep copies in host memory instead of the model's own tensors."""
        self.content = {
            name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in self.content.items()
        }

    @property
    def num_bytes(self) -> int:
        """Of this rank's tensors."""
        return sum(each.nbytes for each in self.content.values() if isinstance(each, Tensor))
