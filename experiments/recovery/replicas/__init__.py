"""What replicas cost while all goes well, and what they save when a node is lost."""
