"""Questions that were measured, one folder each; LOG.md keeps what did not work."""
