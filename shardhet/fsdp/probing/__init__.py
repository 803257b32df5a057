"""Examines a model before it is trained, and refuses what cannot be shown to be right."""
