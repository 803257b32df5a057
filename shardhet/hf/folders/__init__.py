"""Hugging Face model folders: read and written in shards."""
