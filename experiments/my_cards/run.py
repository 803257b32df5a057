"""From a config.json and a list of cards to plans that are explained: what is printed.

    python -m experiments.my_cards.run

Runs the two commands of README.md in this folder and puts what they print under each.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from experiments.common.results import Page

HERE = Path(__file__).parent
FULL = (
    "shardhet plan cluster=cards.yaml model=hf model.path=qwen seq_len=1024 "
    "global_batch_size=32"
)
COMMANDS = (FULL, f"{FULL} model.lora.rank=8 'model.lora.targets=[q_proj,v_proj]'")


@dataclass(frozen=True, slots=True)
class Printed:
    """A command and what it printed."""

    command: str
    text: str

    @classmethod
    def of(cls, command: str) -> "Printed":
        """Run it in this folder."""
        _, *words = shlex.split(command)
        started = [sys.executable, "-m", "shardhet.apps.main", *words]
        done = subprocess.run(started, cwd=HERE, capture_output=True, text=True, check=True)
        return cls(command, done.stdout)


def main() -> None:
    """Both commands, into README.md."""
    page = Page(HERE, is_kept=True)
    for command in COMMANDS:
        page.tell(f"    {command}\n\n```\n{Printed.of(command).text}```")
    page.write_block()


if __name__ == "__main__":
    main()
