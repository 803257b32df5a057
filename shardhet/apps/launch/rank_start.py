"""Starts the program of a rank.  Ctrl-C ends it in silence, also while it still imports torch.

    python -m shardhet.apps.launch.rank_start MODULE ARGUMENTS

The launcher says once that it was Ctrl-C.
"""

import runpy
import sys

BY_SIGINT = 130  # as shells report it


def main() -> None:
    """Run the module that the first argument names, with the others as its own."""
    module = sys.argv.pop(1)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        raise SystemExit(BY_SIGINT) from None


if __name__ == "__main__":
    main()
