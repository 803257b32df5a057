"""The tables, from rows alone."""

from collections.abc import Sequence
from statistics import median

from experiments.common.results import markdown_table
from experiments.other_peoples_models.records import Row, Verdict


def as_markdown(rows: Sequence[Row]) -> str:
    """What became of each family, what was refused, what it costs."""
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
    header = [
        "family",
        "exact",
        "others",
        "gradient error",
        "start s",
        "step ms, plain",
        "ours",
    ]
    lines = []
    for family in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == family]
        exact = [row for row in own if row.verdict == Verdict.EXACT.value]
        others = [f"{row.way}, {row.plan}: {row.verdict}" for row in own if row not in exact]
        outside = [row.grad_error for row in exact if row.way not in ("labels", "num_items")]
        alone = [row for row in exact if row.plan == "1 rank"]
        lines.append(
            [
                family,
                f"{len(exact)} of {len(own)}",
                "; ".join(others),
                f"{max(outside):.0e}" if outside else "",
                f"{median(row.start_s for row in alone):.2f}" if alone else "",
                f"{1000 * median(row.plain_step_s for row in alone):.0f}" if alone else "",
                f"{1000 * median(row.step_s for row in alone):.0f}" if alone else "",
            ]
        )
    return markdown_table(header, lines)


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
