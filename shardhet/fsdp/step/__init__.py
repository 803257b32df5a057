"""A training step: the order of turns, and what a rank does at each."""
