"""Hugging Face models: their Trainer, their folders and their generate, under a plan."""
