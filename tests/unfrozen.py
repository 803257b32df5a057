"""What is imported stays: a tenth of the time of importing went to the search for garbage."""

import gc

gc.disable()  # until tests/frozen.py
