"""Hugging Face models under a plan: the Trainer, model folders and ``generate``."""

from shardhet.hf.generation import generate
from shardhet.hf.loading import load_pretrained
from shardhet.hf.saving import save_pretrained
from shardhet.hf.trainer import HetTrainer

__all__ = ["HetTrainer", "generate", "load_pretrained", "save_pretrained"]
