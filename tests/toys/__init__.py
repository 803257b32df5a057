"""Features in miniature, each one file: what a feature that is like it has to write."""
