"""Stages of a pipeline: the steps of ranks that compute only a part of the units."""
