"""Collectives in two levels: rows cross between nodes once per node."""
