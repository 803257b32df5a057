"""Units and their flat tensors: storage, gathers, reductions, streams."""
