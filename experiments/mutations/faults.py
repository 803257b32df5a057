"""Single-line faults, drawn by seed from the syntax trees of source files."""

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

SWAPPED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
EXTREMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of one file that says something else."""

    path: str  # below the repository
    line: int
    before: str  # the line as it is
    after: str


def draw(root: Path, folders: Sequence[str], number: int, seed: int) -> list[Fault]:
    """``number`` faults from different places, in the order in which they were drawn."""
    rng = random.Random(seed)
    found = [
        fault
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
        for fault in faults_of(path, root)
    ]
    places: set[tuple[str, int]] = set()
    drawn = []
    for fault in rng.sample(found, len(found)):
        if len(drawn) < number and (fault.path, fault.line) not in places:
            places.add((fault.path, fault.line))
            drawn.append(fault)
    return drawn


def faults_of(path: Path, root: Path) -> Iterator[Fault]:
    """All faults of a file that fit on one line."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    in_messages = _lines_of_messages(tree)
    for node in ast.walk(tree):
        for change in _changes(node):
            line = getattr(node, "lineno", 0)
            if line in in_messages or line != getattr(node, "end_lineno", 0):
                continue
            after = _changed_line(source, node, change)
            before = source.splitlines()[line - 1]
            if after is not None and after != before:
                yield Fault(
                    path=str(path.relative_to(root)), line=line, before=before, after=after
                )


def _lines_of_messages(tree: ast.AST) -> set[int]:
    """Where errors are worded, and types are told to a type checker alone."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if (
            isinstance(node, ast.Raise | ast.JoinedStr | ast.AnnAssign | ast.Assert)
            or is_typing
        ):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _changes(node: ast.AST) -> Iterator[Callable[[], ast.AST]]:
    """New nodes in the place of ``node``."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = SWAPPED.get(type(node.ops[0]))
        if other is not None:
            yield lambda: ast.Compare(node.left, [other()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield lambda: ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield lambda: ast.BoolOp(SWAPPED[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda: node.operand
    elif isinstance(node, ast.Assign) and _is_flag(node.value):
        flag = node.value
        yield lambda: ast.Assign(node.targets, ast.Constant(not flag.value))
    elif isinstance(node, ast.Return) and _is_flag(node.value):
        value = node.value
        yield lambda: ast.Return(ast.Constant(not value.value))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield lambda: ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        other_name = EXTREMES.get(node.func.id)
        if other_name is not None:
            yield lambda: ast.Call(ast.Name(other_name), node.args, node.keywords)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda: ast.Pass()  # what the call did is not done


def _is_flag(node: ast.AST | None) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and type(node.value) is bool


def _changed_line(source: str, node: ast.AST, change: Callable[[], ast.AST]) -> str | None:
    segment = ast.get_source_segment(source, node)
    line = source.splitlines()[node.lineno - 1]  # type: ignore[attr-defined]
    if segment is None or "\n" in segment:
        return None
    start = node.col_offset  # type: ignore[attr-defined]
    text = ast.unparse(ast.fix_missing_locations(change()))
    keeps = isinstance(node, ast.Expr | ast.Constant | ast.Call | ast.Assign | ast.Return)
    return line[:start] + (text if keeps else f"({text})") + line[start + len(segment) :]
