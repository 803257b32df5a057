"""An optional transport for ranks that share a host's memory."""
