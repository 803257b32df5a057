"""Where a checkpoint is read from."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.metadata import BytesPlace
from shardhet.checkpoint.format.reading import SavedCheckpoint
from shardhet.checkpoint.state.ranks import Ranks

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
