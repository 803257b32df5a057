"""Whether what the planner says of its plans is true."""
