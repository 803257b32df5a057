"""Communication in plan order: channels, uneven collectives and failure propagation."""

import os

# Read when torch makes the first process group.  It would keep a record of a kibibyte or more
# of each of the last 2,000 collectives, so that a process grows for its first thousand steps.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")
