"""What a training run is told: hydra schemas, where their values come from, their records."""
