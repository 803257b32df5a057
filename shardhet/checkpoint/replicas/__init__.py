"""Copies of the training state on the nodes themselves."""
