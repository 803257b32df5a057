"""The files of a checkpoint: written, read, checked."""
