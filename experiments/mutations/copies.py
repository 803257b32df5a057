"""Copies of the tree in which a line says something else, and how their tests are run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from experiments.common.machine import REPOSITORY

MARKS = "not alone and not campaign"


def copy_tree(tree: Path) -> None:
    """Copy what the tests need to ``tree``."""
    for part in ("shardhet", "tests", "experiments", "conf", "docs"):
        shutil.copytree(REPOSITORY / part, tree / part)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, tree)


def passes_unchanged(test: str, *, limit_s: float) -> bool:
    """Whether a test passes on a copy that reads as the tree does."""
    with TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        copy_tree(tree)
        done = run_tests(tree, [test], limit_s=limit_s)
    return done is not None and has_passed(done)


@contextmanager
def changed(path: str, line: int, before: str, after: str) -> Iterator[Path]:
    """A copy of the tree, where ``line`` of ``path`` reads ``after``."""
    with TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        copy_tree(tree)
        lines = (tree / path).read_text(encoding="utf-8").splitlines()
        assert lines[line - 1] == before
        lines[line - 1] = after
        (tree / path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield tree


def run_tests(
    tree: Path, tests: Sequence[str], *, without: Sequence[str] = (), limit_s: float
) -> subprocess.CompletedProcess[str] | None:
    """Run ``tests`` but ``without`` some until one fails; None if they do not end in time."""
    nodes = tree / "nodes.txt"
    excepted = [f"--deselect={test}" for test in without]
    nodes.write_text("\n".join([*excepted, *tests]), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=short"]
    try:
        return subprocess.run(
            # What `make test` runs; a test of time would object to the load of a campaign.
            [*command, "-m", MARKS, "-p", "no:cacheprovider", f"@{nodes}"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def has_passed(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether no test of a run had anything to say."""
    return done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


def first_objection(tree: Path, tests: Sequence[str], *, limit_s: float) -> tuple[str, str]:
    """The first of ``tests`` that fails, alone too, and passes without the fault; what it says.

    Under load a test may run out of time.
    """
    of_no_use: list[str] = []
    while tests:
        done = run_tests(tree, tests, without=of_no_use, limit_s=limit_s)
        if done is None:
            return (said := f"does not end within {limit_s:g} s"), said
        if has_passed(done):
            break
        failed = re.findall(
            r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE
        )
        if not failed:
            return "pytest itself", "failed"
        again = run_tests(tree, failed[:1], limit_s=limit_s)
        objects = again is None or not has_passed(again)
        if objects and passes_unchanged(failed[0], limit_s=limit_s):
            lines = done.stdout.splitlines()
            said = [line.strip() for line in lines if line.startswith("E  ")]
            return failed[0], (said or ["failed"])[0]
        of_no_use.append(failed[0])
    return "", ""
