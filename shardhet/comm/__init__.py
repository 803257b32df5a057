"""Ranks in the order of a plan: channels, uneven collectives, and how failures spread."""
