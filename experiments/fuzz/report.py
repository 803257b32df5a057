"""Tables of a campaign, made of its rows alone."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.common.results import markdown_table
from tests.fuzzing.shapes import REFUSABLE

FAULTS = ("wrong", "crash", "hang")
SEEDS_SHOWN = 6


def as_markdown(rows: Sequence[Any]) -> str:
    """Verdicts in all, refusals by message, and verdicts by trait."""
    legal = [row for row in rows if row.kind == "legal"]
    others = [row for row in rows if row.kind != "legal"]
    return "\n\n".join(
        [
            "Verdicts:",
            markdown_table(*_verdicts(legal, others)),
            *_listed("Faults", [row for row in rows if row.verdict in FAULTS]),
            *_listed("Refused without need", [r for r in legal if r.verdict == "refused"]),
            *_listed("Refused", [row for row in others if row.verdict == "refused"]),
            "By trait (a case has several; `*` marks those that may be refused):",
            markdown_table(*_by_trait(rows)),
        ]
    )


def _verdicts(legal: Sequence[Any], others: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    header = ["cases", "in all", "exact", "refused", *FAULTS, "invalid"]
    rows = [
        [name, str(len(cases)), *_counted(cases)]
        for name, cases in (("legal traits only", legal), ("with others", others))
    ]
    return header, rows


def _counted(cases: Sequence[Any]) -> list[str]:
    counts = Counter(row.verdict for row in cases)
    return [str(counts[name]) for name in ("exact", "refused", *FAULTS, "invalid")]


def _listed(title: str, rows: Sequence[Any]) -> list[str]:
    """Reasons by how often they were given, names and numbers left out."""
    seeds_by_reason: dict[str, list[int]] = {}
    for row in rows:
        seeds_by_reason.setdefault(without_names(row.reason), []).append(row.seed)
    if not rows:
        return [f"{title}: none."]
    ordered = sorted(seeds_by_reason.items(), key=lambda item: -len(item[1]))
    lines = [
        [reason, str(len(seeds)), ", ".join(map(str, seeds[:SEEDS_SHOWN]))]
        for reason, seeds in ordered
    ]
    return [f"{title}:", markdown_table([title.lower(), "cases", "seeds"], lines)]


def without_names(reason: str) -> str:
    """The reason without numbers and quoted names."""
    text = re.sub(r"'[^']*'", "'..'", reason)
    text = re.sub(r"[-+]?\d[\d.e+-]*", "n", text)
    return text.replace("|", "/")[:150]


def _by_trait(rows: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    header = ["trait", "cases", "exact", "refused", *FAULTS, "invalid"]
    rows_by_trait: dict[str, list[Any]] = {}
    for row in rows:
        for trait in row.traits.split("; "):
            rows_by_trait.setdefault(trait, []).append(row)
    return header, [
        [trait + (" *" if trait in REFUSABLE else ""), str(len(cases)), *_counted(cases)]
        for trait, cases in sorted(rows_by_trait.items())
    ]
