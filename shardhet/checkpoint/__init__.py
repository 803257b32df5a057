"""Portable checkpoints: written under one plan, read under any other, or without one."""

from shardhet.checkpoint.folder import Checkpoints, Latest, Resumed
from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.checkpoint.loading import load
from shardhet.checkpoint.redistribution import redistribute
from shardhet.checkpoint.replicas.replicas import Replicas
from shardhet.checkpoint.saving import PendingSave, save, save_async

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Latest",
    "PendingSave",
    "Replicas",
    "Resumed",
    "load",
    "redistribute",
    "save",
    "save_async",
]
