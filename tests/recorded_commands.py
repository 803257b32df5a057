"""Commands with what they print, as they were recorded: texts change where somebody sees it.

``PYTHONPATH=. python -m tests.recorded_commands`` plays all of ``recorded/commands`` anew and
writes what is printed now.  A session begins with a title; ``$ write FILE`` writes the lines up
to END, and every other command runs in the folder of its session.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from shardhet.apps.plan import main as plan
from shardhet.apps.simulate import main as simulate
from shardhet.apps.train import checked_world_size
from shardhet.config.checks import ConfigError
from shardhet.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    check_choices,
    conf_dir,
    reasons_of,
    register_schemas,
    to_conf,
)


def train(arguments: list[str]) -> int:
    """What is said of a configuration that cannot be run, before anything starts."""
    OmegaConf.register_new_resolver("run_stamp", lambda: "stamp", replace=True)
    register_schemas()
    # wandb as where it is not installed
    with (
        mock.patch.dict(sys.modules, wandb=None),
        initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE),
    ):
        try:
            check_choices(arguments)
            checked_world_size(to_conf(compose(CONFIG_NAME, arguments)), num_launched=None)
        except ConfigError as error:
            sys.stderr.write(f"{error}\n")
        except HydraException as error:
            sys.stderr.write("\n".join(reasons_of(error)))
        else:
            return 0
    return 2


FOLDER = Path(__file__).parent / "recorded" / "commands"
PROGRAMS = {"plan": plan, "simulate": simulate, "train": train}


def sessions(path: Path) -> dict[str, str]:
    """The text of each session of a file by its title."""
    parts = re.split(r"^## (.*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def played(session: str) -> str:
    """The text of a session with what its commands print now."""
    with TemporaryDirectory() as folder, chdir(folder):
        lines = "\n".join(_lines(iter(session.splitlines()), Path(folder)))
    return lines.replace(folder, "FOLDER") + "\n"


def _lines(recorded: Iterator[str], folder: Path) -> Iterator[str]:
    for line in recorded:
        if line.startswith("$ write "):
            text = [*takewhile(lambda each: each != "END", recorded)]
            path = folder / line.removeprefix("$ write ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join([*text, ""]), encoding="utf-8")
            yield from (line, *text, "END")
        elif line.startswith("$ "):
            yield from (line, *printed(line.removeprefix("$ ")))
    files = sorted(str(each.relative_to(folder)) for each in folder.rglob("*.*"))
    yield from (f"[leaves {', '.join(files)}]", "")


def printed(command: str) -> Iterator[str]:
    """What a command writes to both streams, and how it ends unless that is well."""
    name, *arguments = shlex.split(command)
    text = StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        try:
            code = PROGRAMS[name](arguments)
        except SystemExit as error:
            code = error.code
    yield from (each.rstrip() for each in text.getvalue().splitlines() if each.strip())
    if code:
        yield f"[ends with {code}]"


def main() -> None:
    """Write all anew, or the files that are named."""
    for path in sorted(FOLDER.glob("*.txt")):
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        found = sessions(path)
        texts = [f"## {title}\n{played(text)}" for title, text in found.items()]
        path.write_text("".join(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
