"""Do the tests notice if one line of the library is wrong?

python -m experiments.mutations.run            by the tests of the folder, then by all: hours
python -m experiments.mutations.run --first 4  the first four faults of forty
python -m experiments.mutations.run --near     by the tests of the folder alone
"""

import argparse
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.common.machine import REPOSITORY, Environment
from experiments.common.results import console, read_csv, write_csv
from experiments.mutations.copies import changed, first_objection
from experiments.mutations.faults import Fault, draw

HERE = Path(__file__).parent
SEED = 101  # 14 drew results.csv
NUM_FAULTS = 40
FOLDERS = ("shardhet/fsdp", "shardhet/planner", "shardhet/pricing", "shardhet/comm")
SECONDS = 3600.0  # of all tests that are asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests said of a fault."""

    number: int
    path: str
    line: int
    before: str
    after: str
    tests: int  # that were asked first: those that reach it, in the files of results
    found_by: str  # the first test that failed, twice; "" if none has noticed
    seconds: float
    is_by_new_test: bool = False  # one that was written because of this fault


# Test files of a folder, by what stands after test_; the nearest folder counts.
NEAR = {
    "shardhet/fsdp/probing": "probe ordinary_calls odd_units as_written fuzz_models "
    "order parity",
    "shardhet/fsdp": "parity autograd_edges order module_surface ordinary_calls splits "
    "observer checkpoint redistribution odd_units fuzz_models",
    "shardhet/planner": "planner planner_search planner_receivers planner_bound "
    "planner_large_batch demands fewer explain recorded_commands plan_app",
    "shardhet/pricing": "recorded_prices cost derive recompute reserved planner "
    "workload schedule plan_app demo",
    "shardhet/extras": "shared_host distributed parity",
    "shardhet/comm": "comm collectives liveness shared_host distributed parity emulated "
    "stillness deaths emulated_deaths",
}


def tests_near(fault: Fault) -> list[str]:
    """Test files that import the module of the fault, then those of its folder."""
    module = fault.path.removesuffix(".py").replace("/", ".")
    folder = next(each for each in NEAR if fault.path.startswith(f"{each}/"))
    files = [f"tests/test_{name}.py" for name in NEAR[folder].split()]
    direct = [
        f"tests/{path.name}"
        for path in sorted((REPOSITORY / "tests").glob("test_*.py"))
        if re.search(rf"{re.escape(module)}\b", path.read_text(encoding="utf-8"))
    ]
    return list(dict.fromkeys(sorted(direct, key=lambda each: each not in files) + files))


def main() -> None:
    """Draw, run, and keep; what is in results.csv already is not run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=NUM_FAULTS, help="how many of the faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time")
    parser.add_argument("--near", action="store_true", help="ask the tests of the folder")
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
    more = [] if options.near else ["tests"]
    todo = [
        (i, fault, tests_near(fault), more)
        for i, fault in enumerate(faults[: options.first])
        if (fault.path, fault.before, fault.after) not in done
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(lambda each: judge(*each), todo):
            known.append(verdict)
            write_csv(path, sorted(known, key=lambda each: each.number))
            what = verdict.found_by or "NOT FOUND"
            where = f"{verdict.path}:{verdict.line}"
            console.print(f"{verdict.number} {where} {what}", markup=False)


def judge(number: int, fault: Fault, tests: list[str], more: list[str]) -> Verdict:
    """Run ``tests``, then ``more``, on a copy of the tree, until one has failed twice."""
    started_at_s = time.monotonic()
    with changed(fault.path, fault.line, fault.before, fault.after) as tree:
        found_by, _ = first_objection(tree, tests, limit_s=SECONDS)
        found_by = found_by or first_objection(tree, more, limit_s=SECONDS)[0]
    return Verdict(
        number=number,
        **asdict(fault),
        tests=len(tests),
        found_by=found_by,
        seconds=time.monotonic() - started_at_s,
    )


if __name__ == "__main__":
    main()
