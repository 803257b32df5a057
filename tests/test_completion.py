"""Tab completion, asked the way bash asks."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.warm import warm_python
from tests.worlds import patience

ROOT = Path(__file__).parent.parent
BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="needs bash")


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for the search path, with the console script in it."""
    script = tmp_path / "shardhet"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {warm_python()} -m shardhet.apps.main "$@"\n'
    )
    script.chmod(0o755)
    return tmp_path


def complete(commands: Path, *lines: str) -> list[set[str]]:
    """What bash offers at the end of each line."""
    asks = [
        f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _shardhet_complete; "
        'echo "${COMPREPLY[@]}"'
        for line in lines
    ]
    program = ['eval "$(shardhet train -sc install=bash)"', "complete -p shardhet", *asks]
    done = subprocess.run(
        [str(BASH), "-c", "\n".join(program)],
        env={"PATH": f"{commands}:/usr/bin:/bin"},
        cwd=commands,
        capture_output=True,
        text=True,
        timeout=60 * patience(),
        check=True,
    )
    registered, *offered = done.stdout.splitlines()
    assert registered.endswith("-F _shardhet_complete shardhet")
    return [set(line.split()) for line in offered]


@needs_bash
@pytest.mark.campaign  # every key of every command
def test_commands_groups_choices_and_keys_are_offered(commands: Path) -> None:
    names, groups, choices, keys = complete(
        commands,
        "shardhet t",
        "shardhet train pl",
        "shardhet train model=small optim=",
        "shardhet train optim=sgd optim.",
    )
    assert names == {"train"}
    assert {"plan=", "plan."} <= groups
    assert choices == {"adamw", "any", "sgd"}  # what follows the =, which parts words in bash
    assert {"optim.lr=", "optim.momentum="} <= keys


@pytest.mark.campaign  # four starts of a shell
@needs_bash
def test_completion_can_be_taken_back(commands: Path) -> None:
    program = """
        eval "$(shardhet train -sc install=bash)"
        eval "$(shardhet train -sc uninstall=bash)"
        complete -p shardhet || echo gone
    """
    done = subprocess.run(
        [str(BASH), "-c", program],
        env={"PATH": f"{commands}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60 * patience(),
        check=False,
    )
    assert done.stdout == "gone\n"
