"""Models for examples, tests and experiments."""
