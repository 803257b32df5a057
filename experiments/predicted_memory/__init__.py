"""Predicted beside tracked peaks of memory."""
