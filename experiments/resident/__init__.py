"""Frozen weights that stay unsharded, over slow links."""
