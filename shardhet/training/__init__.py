"""What a training run needs besides the model: data, optimizer, loop, compiler."""
