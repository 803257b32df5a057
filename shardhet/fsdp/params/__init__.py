"""What optimizers and users see of a rank's rows."""
