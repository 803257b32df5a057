"""Which tests reach a line: the whole suite is run once, on a copy that writes it down.

A test that never comes to a line cannot tell what stands there.  So each fault is shown to the
tests that reach its statement, and to no others.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from experiments.common.machine import REPOSITORY
from experiments.mutations.copies import MARKS, copy_tree
from experiments.mutations.faults import Fault

# Put into the copy.  Ranks of the tests are told the name of their test (tests/worlds.py),
# and programs inherit it.
MARK = """
import os

_seen = set()


def mark(number):
    place = (number, os.environ.get("PYTEST_CURRENT_TEST", ""))
    if place not in _seen:
        _seen.add(place)
        with open({path!r}, "a") as file:
            file.write(f"{{number}} {{place[1]}}\\n")
"""


# Test files of a folder, by what stands after test_; the nearest folder counts.
NEAR = {
    "shardhet/fsdp/probing": "probe ordinary_calls odd_units as_written fuzz_models "
    "order parity",
    "shardhet/fsdp": "parity autograd_edges order module_surface ordinary_calls samples splits "
    "observer checkpoint redistribution parity_foreign odd_units fuzz_models",
    "shardhet/planner": "planner planner_search planner_highs planner_receivers planner_bound "
    "planner_large_batch objectives fewer explain steady plan_app",
    "shardhet/pricing": "cost architectures derive recompute reserved planner "
    "workload schedule plan_app demo",
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


def tests_by_fault(faults: Sequence[Fault], keep: Path) -> list[list[str] | None]:
    """For each fault the tests that reach it, quick files first; None where importing does.

    What was found is kept in the file ``keep``, and read there if it is of the same faults.
    """
    names = [f"{fault.path}:{fault.line} {fault.after.strip()}" for fault in faults]
    if keep.exists():
        kept = json.loads(keep.read_text(encoding="utf-8"))
        if kept["faults"] == names:
            return kept["tests"]  # type: ignore[no-any-return]
    tests = _observe(faults)
    keep.parent.mkdir(parents=True, exist_ok=True)
    keep.write_text(json.dumps({"faults": names, "tests": tests}), encoding="utf-8")
    return tests


def _observe(faults: Sequence[Fault]) -> list[list[str] | None]:
    with tempfile.TemporaryDirectory() as folder:
        tree, seen, report = (Path(folder, name) for name in ("tree", "seen", "report.xml"))
        copy_tree(tree)
        seen.touch()
        (tree / "shardhet" / "reached.py").write_text(MARK.format(path=str(seen)))
        marked = {path: _mark(tree / path, faults) for path in {each.path for each in faults}}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
        subprocess.run(
            [*command, "-m", MARKS, "-p", "no:cacheprovider", f"--junit-xml={report}"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            check=False,  # tests of the wheel and of imports object to the mark
        )
        tests: list[set[str]] = [set() for _ in faults]
        for line in seen.read_text(encoding="utf-8").splitlines():
            number, _, test = line.partition(" ")
            tests[int(number)].add(_nodes(test) if test else "")
        seconds = _seconds_by_file(report)
    return [
        sorted(tests[i], key=lambda test: (seconds.get(test.partition("::")[0], 0.0), test))
        if i in marked[fault.path] and "" not in tests[i]
        else None
        for i, fault in enumerate(faults)
    ]


def _seconds_by_file(report: Path) -> dict[str, float]:
    """What the files of tests took, of pytest's own report."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[name] = seconds.get(name, 0.0) + float(case.attrib["time"])
    return seconds


def _nodes(test: str) -> str:
    """What to run for ``test_x.py::test_y[1] (call)``; for a fixture of it the whole file."""
    name, _, phase = test.rpartition(" ")
    return name if phase == "(call)" else name.partition("::")[0]


def _mark(path: Path, faults: Sequence[Fault]) -> set[int]:
    """Put a mark before the statement of every fault of ``path``; which have one."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    marks: list[tuple[int, int]] = []
    for i, fault in enumerate(faults):
        if path.as_posix().endswith(fault.path):
            line = _statement(ast.parse(source), fault.line)
            if line is not None:
                marks.append((line, i))
    for line, i in sorted(marks, reverse=True):
        indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
        call = f"__import__('shardhet.reached', fromlist=['mark']).mark({i})"
        lines.insert(line - 1, f"{indent}{call}\n")
    path.write_text("".join(lines), encoding="utf-8")
    return {i for _, i in marks}


def _statement(tree: ast.Module, line: int) -> int | None:
    """The first line of the innermost statement of a function that holds ``line``."""
    found = None
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for block in _blocks(function):
                for statement in block:
                    decorators = getattr(statement, "decorator_list", [])
                    start = min([statement.lineno, *(each.lineno for each in decorators)])
                    if start <= line <= (statement.end_lineno or start):
                        found = max(found or 0, start)
    return found


def _blocks(node: ast.AST) -> Iterable[list[ast.stmt]]:
    """Lists of statements before each of which another may stand; no ``elif`` is one."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, [])
        is_elif = (
            name == "orelse"
            and isinstance(node, ast.If)
            and len(block) == 1
            and isinstance(block[0], ast.If)
            and block[0].col_offset == node.col_offset
        )
        if isinstance(block, list) and block and not is_elif:
            yield block
        for child in block if isinstance(block, list) else ():
            yield from _blocks(child)
    for name in ("handlers", "cases"):
        for child in getattr(node, name, []):
            yield from _blocks(child)
