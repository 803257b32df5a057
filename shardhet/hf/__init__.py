"""Hugging Face models under a plan: the Trainer, model folders and ``generate``."""

# ruff: noqa: E402  # what imports transformers comes once it is known to be importable
from shardhet.models.pretrained import check_torchvision

check_torchvision()
from shardhet.hf.folders.loading import load_pretrained
from shardhet.hf.folders.saving import save_pretrained
from shardhet.hf.generation import generate
from shardhet.hf.trainer import HetTrainer

__all__ = ["HetTrainer", "generate", "load_pretrained", "save_pretrained"]
