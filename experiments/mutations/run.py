"""Do the tests notice if one line of the library is wrong?

python -m experiments.mutations.run            two hours on two cores
python -m experiments.mutations.run --first 4  the first four faults of forty
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest

from experiments.common.machine import REPOSITORY, Environment
from experiments.common.results import console, read_csv, write_csv
from experiments.mutations.faults import Fault, draw

HERE = Path(__file__).parent
SEED = 14
NUM_FAULTS = 40
FOLDERS = ("shardhet/fsdp", "shardhet/planner", "shardhet/pricing", "shardhet/comm")
SECONDS_OF_A_FILE = 600.0
# Asked in this order, file by file, until one notices.  The last entry is for all folders.
TESTS = {
    "shardhet/planner": "planner objectives planner_search recompute explain planner_highs"
    " plan_app",
    "shardhet/pricing": "cost simulator planner objectives profiles cluster_description"
    " architectures plan_app",
    "shardhet/comm": "collectives shared_host distributed comm deaths bad_input parity doctor",
    "shardhet/fsdp": "parity order probe odd_units autograd_edges ordinary_calls bad_input"
    " optimizers_on_rows module_surface root_dropout wrapping unit_runner observer compiling"
    " parity_low_precision parity_foreign hf_folder hf_generate counting_forwards fuzz_models"
    " distributed deaths",
}
FOR_ALL = "experiment_scale measure trainer train demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests said of a fault."""

    number: int
    path: str
    line: int
    before: str
    after: str
    found_by: str  # a test file; "" if none has noticed
    seconds: float


def main() -> None:
    """Draw, run, and keep; what is in results.csv already is not run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=NUM_FAULTS, help="how many of the faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time")
    parser.add_argument("--list", action="store_true", help="show the faults and stop")
    options = parser.parse_args()
    faults = draw(REPOSITORY, FOLDERS, NUM_FAULTS, SEED)
    if options.list:
        for i, fault in enumerate(faults):
            console.print(f"{i} {fault.path}:{fault.line}", markup=False)
            console.print(f"  - {fault.before.strip()}", markup=False)
            console.print(f"  + {fault.after.strip()}", markup=False)
        return
    console.print(Environment.here().as_markdown())
    path = HERE / "results.csv"
    known = read_csv(path, Verdict) if path.exists() else []
    done = {(each.path, each.before, each.after): each for each in known}
    todo = [
        (i, fault)
        for i, fault in enumerate(faults[: options.first])
        if (fault.path, fault.before, fault.after) not in done
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(lambda each: judge(*each), todo):
            known.append(verdict)
            write_csv(path, sorted(known, key=lambda each: each.number))
            what = verdict.found_by or "NOT FOUND"
            console.print(f"{verdict.number} {verdict.path}:{verdict.line} {what}")


def judge(number: int, fault: Fault) -> Verdict:
    """Run the tests on a copy of the tree with the fault."""
    started_at_s = time.monotonic()
    verdict = partial(Verdict, number=number, **asdict(fault))
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        copy_tree(tree)
        changed = (tree / fault.path).read_text(encoding="utf-8").splitlines(keepends=True)
        assert changed[fault.line - 1].rstrip("\n") == fault.before
        changed[fault.line - 1] = fault.after + "\n"
        (tree / fault.path).write_text("".join(changed), encoding="utf-8")
        folder_of_fault = "/".join(fault.path.split("/")[:2])
        for name in f"{TESTS[folder_of_fault]} {FOR_ALL}".split():
            # Twice: under load a test may fail for want of time.
            test_file = f"tests/test_{name}.py"
            if not passes(tree, test_file) and not passes(tree, test_file):
                return verdict(found_by=name, seconds=time.monotonic() - started_at_s)
    return verdict(found_by="", seconds=time.monotonic() - started_at_s)


def copy_tree(tree: Path) -> None:
    """Copy what the tests need to ``tree``."""
    for part in ("shardhet", "tests", "experiments", "conf"):
        shutil.copytree(REPOSITORY / part, tree / part)
    shutil.copy(REPOSITORY / "pyproject.toml", tree)


def test_command(tree: Path, test_file: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a test file of ``tree`` until one fails, and its environment."""
    # A test of time would object to the load of this campaign instead.
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not alone"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return [*command, "-p", "no:cacheprovider", test_file], environment


def passes(tree: Path, test_file: str) -> bool:
    """Whether a test file has nothing to say."""
    command, environment = test_command(tree, test_file)
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS_OF_A_FILE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


if __name__ == "__main__":
    main()
