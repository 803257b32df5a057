"""Hugging Face models under a plan: the Trainer, model folders and ``generate``."""

from shardhet.hf.folders.loading import load_pretrained
from shardhet.hf.folders.saving import save_pretrained
from shardhet.hf.generation import generate
from shardhet.hf.trainer import HetTrainer

__all__ = ["HetTrainer", "generate", "load_pretrained", "save_pretrained"]
