"""What else is worth knowing about a plan."""
