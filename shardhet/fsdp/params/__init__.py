"""A rank's rows as parameters, for optimizers and users."""
