"""Portable checkpoints: written under one plan, read under any other, or without one."""

from shardhet.checkpoint.errors import CheckpointError
from shardhet.checkpoint.loading import load
from shardhet.checkpoint.saving import PendingSave, save, save_async

__all__ = ["CheckpointError", "PendingSave", "load", "save", "save_async"]
