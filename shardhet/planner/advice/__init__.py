"""Explanations of a plan, and alternatives to it."""
