"""A HetTrainer under a plan with stages."""
