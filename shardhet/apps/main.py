"""The console script ``shardhet COMMAND ...``; each command has a module of its own."""

import gc
import sys
from importlib import import_module

# Command -> (module with ``main(arguments)``, what it is for).
COMMANDS = {
    "doctor": ("shardhet.extras.doctor", "check versions, devices and links for problems"),
    "cluster": ("shardhet.apps.cluster", "describe these cards in a file, to plan for them"),
    "measure": ("shardhet.apps.measure", "measure the speed of these devices with a model"),
    "plan": ("shardhet.apps.plan", "find the best plan for a cluster and a model"),
    "simulate": ("shardhet.apps.simulate", "simulate one step of a plan, event by event"),
    "train": ("shardhet.apps.train", "train a model on unlike devices"),
    "rehearse": ("shardhet.apps.rehearse", "run a program on CPUs under a plan for any cards"),
    "inspect": (
        "shardhet.apps.checkpoint_inspect",
        "list what a checkpoint contains and verify its files",
    ),
    "export": ("shardhet.apps.checkpoint_export", "write a checkpoint's model as one file"),
    "compare": (
        "shardhet.extras.compare",
        "show where a run was slower than predicted, by unit",
    ),
}


def main() -> None:
    """Pass the command line to the command's own module."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in COMMANDS:
        # Imports and plans make millions of objects that stay, and few cycles.
        gc.set_threshold(100_000, 20, 100)
        try:
            import_module(COMMANDS[command][0]).main(arguments)
        except KeyboardInterrupt:
            raise SystemExit("stopped by SIGINT") from None
        return
    from rich.console import Console

    lines = [f"  shardhet {name:8} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    is_help = command in ("-h", "--help")
    problem = [] if is_help else [f"{command!r} is not a command of shardhet."]
    text = "\n".join([*problem, *lines, "Run a command with --help for its keys."])
    Console(stderr=not is_help, highlight=False, soft_wrap=True).print(text)
    raise SystemExit(0 if is_help else 2)


if __name__ == "__main__":
    main()
