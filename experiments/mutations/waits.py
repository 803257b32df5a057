"""Is any wait, event or change of stream of the runtime removed without the detector objecting?

python -m experiments.mutations.waits           an hour or more on two cores
python -m experiments.mutations.waits --list    the places
python -m experiments.mutations.waits --only fsdp/step comm.py:16 --by pending overlap

With --by only some of the groups of tests are asked; parity is of transports of the host.  The
newest verdict of each place is kept.  A test that fails without the change too, or not alone,
does not count.
"""

import argparse
import ast
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.common.machine import REPOSITORY, Environment, commit_of
from experiments.common.results import console, read_csv, write_csv
from experiments.mutations.copies import changed, first_objection

HERE = Path(__file__).parent
FOLDERS = (
    "shardhet/comm",
    *(f"shardhet/fsdp{room}" for room in ("", "/params", "/sharding", "/stages", "/step")),
)
# What makes nothing wrong but slower or larger: bounds, early events, pinned copies.
BESIDE_WAITS = (
    ("shardhet/records/ops.py", "while kind.max_in_flight is not None", "while False"),
    ("shardhet/fsdp/sharding/flat.py", "if comm.host_runs_ahead:", "if False:"),
    ("shardhet/comm/calls.py", "tensor.pin_memory().to(", "tensor.to("),
    (
        "shardhet/comm/calls.py",
        'tensor.detach().to("cpu", non_blocking=True)',
        "tensor.cpu()",
    ),
)
# Statements that are left out.
WAITS = {
    "keep_until_sent",
    "mark_compute",
    "record",
    "synchronize",
    "wait",
    "wait_all_sent",
    "wait_event",
    "wait_sent",
    "wait_stream",
}
# What is in flight and let go; overlap and peaks in the emulated streams' time; the detector,
# in steps and in pipelines; and tests of the transports of hosts, of which these know nothing.
TESTS = {
    "pending": ["pending"],
    "overlap": ["overlap"],
    "stages": ["emulated_stages"],
    "detector": ["emulated", "host_copy", "places", "inputs_on_host", "optimizer_on_host"],
    "parity": [
        "comm",
        "shared_host",
        "streamed",
        "distributed",
        "redistribution",
        "module_surface",
        "ordinary_calls",
        "checkpoint",
        "hf_generate",
        "parity",
    ],
}
# Where the same call orders work of the host, and the device has nothing to do with it.
ON_THE_HOST = ("shardhet/comm/channel.py",)
SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One line that orders streams, and what stands there instead."""

    path: str
    line: int
    number: int  # of the lines of the file that read like this one, from 0
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said where it is left out."""

    path: str
    line: int  # at the commit
    number: int
    before: str
    after: str
    commit: str
    asked: str
    objected: str  # the detector, or tests of parity over transports of the host; "": none
    test: str  # that failed first
    objection: str  # the last line of the first failure; "" if there is none
    seconds: float


def places() -> Iterator[Place]:
    """All of them, in the order of the sources."""
    for folder in FOLDERS:  # what breaks connections of gloo has a time limit
        for path in sorted((REPOSITORY / folder).glob("*.py")):
            name = str(path.relative_to(REPOSITORY))
            if name in ON_THE_HOST:
                continue
            lines = path.read_text(encoding="utf-8").splitlines()
            like_it: Counter[str] = Counter()
            found = [
                each for node in ast.walk(ast.parse(path.read_text())) if (each := _at(node))
            ]
            for line, after in sorted(found):
                before = lines[line - 1]
                if "timedelta" in before or "enable_timing" in lines[line - 2]:
                    continue
                indent = before[: len(before) - len(before.lstrip())]
                number = like_it[before.strip()]
                like_it[before.strip()] += 1
                yield Place(
                    path=name, line=line, number=number, before=before, after=indent + after
                )
    for name, words, instead in BESIDE_WAITS:
        lines = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
        [line] = [i for i, each in enumerate(lines) if words in each]
        after = lines[line].replace(words, instead)
        yield Place(path=name, line=line + 1, number=0, before=lines[line], after=after)


def _at(node: ast.AST) -> tuple[int, str] | None:
    """The line of a statement that orders streams, and what leaves the order out."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in WAITS:
            # Of several lines, the opening bracket stays: what is between them does nothing.
            return node.lineno, "pass" if node.lineno == node.end_lineno else "("
        case ast.Assign(
            targets=[ast.Attribute()], value=ast.Call(func=ast.Attribute(attr=name))
        ):
            return (node.lineno, "pass") if name == "record_event" else None
        case ast.Assign(
            targets=[ast.Name(id=target)],
            value=ast.Call(func=ast.Attribute(attr="record_event")),
        ):
            return node.lineno, f"{target} = comm._handle.Event()"
        case ast.With(items=[ast.withitem(ast.Call(func=ast.Attribute(attr="on_stream")))]):
            return node.lineno, "if True:"
    return None


def judge(place: Place, tests: Mapping[str, Sequence[str]]) -> Verdict:
    """Run ``tests`` on a copy of the tree without it."""
    started_at_s = time.monotonic()
    with changed(place.path, place.line, place.before, place.after) as tree:
        for who, names in tests.items():
            test, objection = first_objection(tree, names, limit_s=SECONDS)
            objected = who if test else ""
            if test:
                break
    return Verdict(
        path=place.path,
        line=place.line,
        number=place.number,
        before=place.before.strip(),
        after=place.after.strip(),
        commit=commit_of(REPOSITORY),
        asked=" ".join(tests),
        objected=objected,
        test=test,
        objection=objection,
        seconds=time.monotonic() - started_at_s,
    )


def merged(before: Sequence[Verdict], found: Sequence[Verdict]) -> list[Verdict]:
    """All verdicts, the newest of each place, in the order of the sources."""
    by_place = {(each.path, each.before, each.number): each for each in (*before, *found)}
    return sorted(by_place.values(), key=lambda each: (each.path, each.line))


def main() -> None:
    """Leave them out one by one, and write what the detector says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at a time")
    parser.add_argument("--list", action="store_true", help="show the places and stop")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="places with one of these words: path:line code"
    )
    parser.add_argument(
        "--by", nargs="+", choices=TESTS, default=[], help="ask these groups of tests alone"
    )
    options = parser.parse_args()
    todo = [
        place
        for place in places()
        if any(
            words in f"{place.path}:{place.line} {place.before.strip()}"
            for words in options.only
        )
    ]
    by = options.by or TESTS
    tests = {name: [f"tests/test_{each}.py" for each in TESTS[name]] for name in by}
    if options.list:
        for each in todo:
            console.print(f"{each.path}:{each.line} {each.before.strip()}", markup=False)
        console.print(f"{len(todo)} places")
        return
    console.print(Environment.here().as_markdown())
    verdicts: list[Verdict] = []
    path = HERE / ("waits_on_hosts.csv" if [*by] == ["parity"] else "waits.csv")
    before = read_csv(path, Verdict) if path.exists() else []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(partial(judge, tests=tests), todo):
            verdicts.append(verdict)
            write_csv(path, merged(before, verdicts))
            said = verdict.objection or "NO OBJECTION"
            console.print(
                f"{verdict.path}:{verdict.line} {verdict.before}: {said}", markup=False
            )
    for who in tests:
        number = sum(1 for each in verdicts if each.objected == who)
        console.print(f"{number} of {len(verdicts)} are objected to by {who}")


if __name__ == "__main__":
    main()
