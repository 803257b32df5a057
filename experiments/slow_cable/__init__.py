"""Collectives in two levels over a slow cable; see README.md."""
