"""The configuration of a training run: Hydra schemas, the sources of values, and records."""
