"""Options of transformers' Trainer under a plan."""
