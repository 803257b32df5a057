"""Settings that every test shares; nothing here imports torch."""

from hypothesis import settings

# No deadline: machines are shared and slow. The same examples in every run: a failure
# that CI shows is a failure that a reader can have again.
settings.register_profile("shardhet", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("shardhet")
