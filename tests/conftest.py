"""Settings that every test shares; nothing here imports torch."""

import os

from hypothesis import settings

# Workers of pytest-xdist are given a narrow one; what programs print is as wide as in a file.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)

# No deadline: machines are shared and slow. The same examples in every run: a failure
# that CI shows is a failure that a reader can have again.
settings.register_profile("shardhet", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shardhet")
