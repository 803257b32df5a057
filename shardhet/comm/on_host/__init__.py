"""The memory of the host as a place for what devices do not need at once."""
