"""The parts of a training run besides the model: data, optimizer, loop and compiler."""
