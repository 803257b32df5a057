"""A transport for ranks that share a host's memory; everything works without it."""
