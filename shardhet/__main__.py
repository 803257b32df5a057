"""``python -m shardhet COMMAND ...``: the same as ``shardhet COMMAND ...``."""

from shardhet.apps.main import main

if __name__ == "__main__":
    main()
