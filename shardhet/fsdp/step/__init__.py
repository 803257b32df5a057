"""A training step: what a rank does at each turn."""
