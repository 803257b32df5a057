"""The models that examples, tests and experiments train."""
