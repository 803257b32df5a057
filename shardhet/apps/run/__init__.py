"""One rank of a run: training, or measuring."""
