"""The tables, from rows alone."""

from collections.abc import Sequence

from experiments.common.results import markdown_table
from experiments.other_peoples_models.records import Row, Verdict


def as_markdown(rows: Sequence[Row]) -> str:
    """What became of each family, and what was refused."""
    if not rows:
        return "No case was run."
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row.commit for row in rows))
    parts = (f"Rows of commits {commits}.", _counts(rows), _families(rows), _texts(rows))
    return "\n\n".join(part for part in parts if part)


def _counts(rows: Sequence[Row]) -> str:
    lines = [
        [way, *(str(_count(rows, way, verdict)) for verdict in Verdict)]
        for way in dict.fromkeys(row.way for row in rows)
    ]
    lines.append(["all", *(str(_count(rows, None, verdict)) for verdict in Verdict)])
    return markdown_table(["way of calling", *(verdict.value for verdict in Verdict)], lines)


def _count(rows: Sequence[Row], way: str | None, verdict: Verdict) -> int:
    return sum(row.verdict == verdict.value and way in (None, row.way) for row in rows)


def _families(rows: Sequence[Row]) -> str:
    lines = []
    for family in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == family]
        exact = [row for row in own if row.verdict == Verdict.EXACT.value]
        others = [f"{row.way}, {row.plan}: {row.verdict}" for row in own if row not in exact]
        outside = [row.grad_error for row in exact if row.way not in ("labels", "num_items")]
        lines.append(
            [
                family,
                f"{len(exact)} of {len(own)}",
                "; ".join(others),
                f"{max(outside):.0e}" if outside else "",
            ]
        )
    return markdown_table(["family", "exact", "others", "gradient error"], lines)


def _texts(rows: Sequence[Row]) -> str:
    said: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.text:
            said.setdefault((row.verdict, row.text), []).append(row)
    parts = []
    for (verdict, text), own in said.items():
        names = ", ".join(dict.fromkeys(f"{row.family} ({row.way})" for row in own))
        parts.append(f"- {verdict}: {names}: {text}")
    return "\n".join(parts)
