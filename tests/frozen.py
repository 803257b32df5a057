"""What is imported by now is never garbage: forks neither look at it nor copy it."""

import gc

gc.collect()
gc.freeze()
gc.enable()
