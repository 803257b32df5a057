"""Do the tests notice if one line of the library is wrong?

python -m experiments.mutations.run            two hours on two cores
python -m experiments.mutations.run --first 4  the first four faults of forty
python -m experiments.mutations.run --near     by the tests of the folder alone
python -m experiments.mutations.run --chosen experiments/mutations/chosen_28.csv
                                               by tests that a reader has chosen
"""

import argparse
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.common.machine import REPOSITORY, Environment
from experiments.common.results import console, read_csv, write_csv
from experiments.mutations.copies import changed, has_passed, passes_unchanged, run_tests
from experiments.mutations.faults import Fault, draw
from experiments.mutations.reach import tests_by_fault, tests_near

HERE = Path(__file__).parent
SEED = 101  # 14 drew results.csv
NUM_FAULTS = 40
FOLDERS = ("shardhet/fsdp", "shardhet/planner", "shardhet/pricing", "shardhet/comm")
SECONDS = 3600.0  # of all tests that reach a fault
REACHED = REPOSITORY / "outputs" / "mutations.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests said of a fault."""

    number: int
    path: str
    line: int
    before: str
    after: str
    tests: int  # that reach it; 0: all, because importing does
    found_by: str  # the first test that failed, twice; "" if none has noticed
    seconds: float
    is_by_new_test: bool = False  # one that was written because of this fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Tests that a reader of a fault expects to notice it."""

    number: int
    tests: str  # with spaces between them, the cheapest first


def main() -> None:
    """Draw, run, and keep; what is in results.csv already is not run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=NUM_FAULTS, help="how many of the faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time")
    parser.add_argument("--near", action="store_true", help="ask the tests of the folder")
    parser.add_argument(
        "--chosen", type=Path, help="a file of tests by number, asked before the folder's"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw")
    parser.add_argument("--list", action="store_true", help="show the faults and stop")
    options = parser.parse_args()
    faults = draw(REPOSITORY, FOLDERS, NUM_FAULTS, options.seed)
    if options.list:
        for i, fault in enumerate(faults):
            console.print(f"{i} {fault.path}:{fault.line}", markup=False)
            console.print(f"  - {fault.before.strip()}", markup=False)
            console.print(f"  + {fault.after.strip()}", markup=False)
        return
    console.print(Environment.here().as_markdown())
    path = HERE / f"results_{options.seed}.csv"
    known = read_csv(path, Verdict) if path.exists() else []
    done = {(each.path, each.before, each.after): each for each in known}
    first, more = questions(faults, options.chosen, is_near=options.near)
    todo = [
        (i, fault, first[i], more[i])
        for i, fault in enumerate(faults[: options.first])
        if i in first and (fault.path, fault.before, fault.after) not in done
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(lambda each: judge(*each), todo):
            known.append(verdict)
            write_csv(path, sorted(known, key=lambda each: each.number))
            what = verdict.found_by or "NOT FOUND"
            where = f"{verdict.path}:{verdict.line}"
            console.print(f"{verdict.number} {where} {what}", markup=False)


def questions(
    faults: Sequence[Fault], chosen: Path | None, *, is_near: bool
) -> tuple[dict[int, list[str] | None], dict[int, list[str]]]:
    """By number the tests of faults (None: all), and those to run where none of these fails.

    Of faults for which a file of ``chosen`` tests has none nothing is said.
    """
    if chosen is not None:
        tests = {each.number: each.tests.split() for each in read_csv(chosen, Chosen)}
        return {**tests}, {i: tests_near(faults[i]) for i in tests}
    if is_near:
        near = dict(enumerate(map(tests_near, faults)))
        return {**near}, {i: [] for i in near}
    reached = dict(enumerate(tests_by_fault(faults, REACHED)))
    # A test may have been spared the line by what another has left in the process.
    files = {
        i: sorted({test.partition("::")[0] for test in tests or () if "::" in test})
        for i, tests in reached.items()
    }
    return reached, files


def judge(number: int, fault: Fault, tests: list[str] | None, more: list[str]) -> Verdict:
    """Run ``tests``, then ``more``, on a copy of the tree, until one has failed twice."""
    started_at_s = time.monotonic()
    with changed(fault.path, fault.line, fault.before, fault.after) as tree:
        found_by = first_objection(tree, tests if tests is not None else ["tests"])
        found_by = found_by or first_objection(tree, more)
    return Verdict(
        number=number,
        **asdict(fault),
        tests=len(tests or ()),
        found_by=found_by,
        seconds=time.monotonic() - started_at_s,
    )


def first_objection(tree: Path, tests: list[str]) -> str:
    """The first of ``tests`` that fails, alone too, and passes without the fault.

    Under load a test may run out of time.
    """
    of_no_use: list[str] = []
    while tests:
        done = run_tests(tree, tests, without=of_no_use, limit_s=SECONDS)
        if done is None:
            return f"does not end within {SECONDS:g} s"
        if has_passed(done):
            return ""
        failed = re.findall(
            r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE
        )
        if not failed:
            return "pytest itself"
        again = run_tests(tree, failed[:1], limit_s=SECONDS)
        objects = again is None or not has_passed(again)
        if objects and passes_unchanged(failed[0], limit_s=SECONDS):
            return failed[0]
        of_no_use.append(failed[0])
    return ""


if __name__ == "__main__":
    main()
