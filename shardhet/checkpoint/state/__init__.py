"""The training state that checkpoints hold, rank by rank."""
