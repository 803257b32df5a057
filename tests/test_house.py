"""The rules of the house: how large the package, its files and its folders may be.

``python tests/test_house.py`` prints the code lines of each folder.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "shardhet"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_CODE_LINES = 41_291
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CLASS_LINES, MAX_FILES_IN_FOLDER = 450, 80, 250, 14
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def lines_of(node: ast.AST) -> set[int]:
    return set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]


def code_lines(text: str) -> int:
    """Lines without blank ones, comments, docstrings and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= lines_of(node)
        elif isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and ast.get_docstring(node, clean=False):
            left_out |= lines_of(node.body[0])
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - left_out)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def test_code_lines_are_counted_as_described() -> None:
    text = (
        '"""Doc."""\n\nimport ast\n\n# why\nx = f(\n    1,\n)\n\n\ndef f():\n    """Doc."""\n'
    )
    assert code_lines(text) == 4


def test_the_package_does_not_grow() -> None:
    assert sum(code_lines(path.read_text()) for path in FILES) <= MAX_CODE_LINES


def test_files_and_folders_are_small() -> None:
    long = {name_of(p): n for p in FILES if (n := p.read_text().count("\n")) > MAX_FILE_LINES}
    full = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert not long
    assert not {each.name for each, n in full.items() if n > MAX_FILES_IN_FOLDER}


def test_functions_and_classes_are_short() -> None:
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            most = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
            is_one = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if is_one and len(lines_of(node)) > most:
                found[f"{name_of(path)}.{node.name}"] = len(lines_of(node))
    assert not found


def test_no_circle_of_files() -> None:
    """Imports for annotations count as well."""
    known = {name_of(path): path for path in FILES if path.name != "__init__.py"}
    imported: dict[str, set[str]] = {}
    for name, path in known.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        short = {each.removeprefix("shardhet."): each for each in found & set(known) - {name}}
        mine = name.removeprefix("shardhet.")
        imported[mine] = set(short)
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of files: {error.args[1]}") from None


ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
DOTTED = re.compile(r"``(?:shardhet\.)?([a-z_]+(?:\.\w+)+)``")


def leads_somewhere(dotted: str) -> bool:
    """Whether a path of modules, and of names in the last of them, is there."""
    parts = dotted.split(".")
    for i in range(len(parts), 0, -1):
        place = PACKAGE.joinpath(*parts[:i])
        files = [f for f in (place.with_suffix(".py"), place / "__init__.py") if f.exists()]
        if files:
            return all(re.search(rf"\b{name}\b", files[0].read_text()) for name in parts[i:])
    return False


def test_modules_that_docstrings_name_are_there() -> None:
    assert leads_somewhere("fsdp.step.schedule_executor.RUNS")
    assert not leads_somewhere("fsdp.schedule_executor.RUNS")
    named = {
        (name_of(path), found)
        for path in FILES
        for found in DOTTED.findall(path.read_text())
        if found.partition(".")[0] in ROOMS
    }
    assert not {each for each in named if not leads_somewhere(each[1])}


if __name__ == "__main__":
    sums: Counter[str] = Counter()
    for path in FILES:
        sums[str(path.parent.relative_to(PACKAGE.parent))] += code_lines(path.read_text())
    print("\n".join(f"{n:6,} {room}" for room, n in (*sums.items(), ("all", sums.total()))))  # noqa: T201
