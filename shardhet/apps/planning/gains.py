"""What more of each resource would give: a table of ``shardhet plan`` that comes row by row."""

from collections.abc import Iterable, Sequence

from rich.console import Console

from shardhet.apps.cli.streamed import StreamedTable
from shardhet.planner.advice.explain import NEGLIGIBLE, Gain, Larger, Resource


def show_gains(
    larger: Sequence[Larger],
    gains: Iterable[Gain],
    console: Console,
    *,
    unit: str,
    with_worse: bool,
) -> list[Gain]:
    """Print what more of each resource would give, as it comes; returns the gains.

    ``with_worse``: some of the devices that take part in these plans are better left out.
    """
    subjects = [_subject(resource, kind) for resource, kind, _, _ in larger]
    amounts = [amount for _, _, amount, _ in larger]
    columns = (
        ("of", max(map(len, subjects))),
        ("more", max(map(len, amounts))),
        (unit, 9),
        ("gain", 7),
    )
    title = "What more would give" + " while all of these devices take part" * with_worse
    table = StreamedTable(console, columns, title=title, num_left=2)
    shown = []
    for subject, gain in zip(subjects, gains, strict=True):
        relative = f"{gain.relative:+.1%}" if gain.relative > NEGLIGIBLE else "-"
        # One device more may be one that is better left out.
        is_worse = relative == "-" and gain.resource is Resource.DEVICES
        value = "-" if is_worse else f"{gain.value:,.4g}"
        table.add_row(subject, gain.amount, value, relative)
        shown.append(gain)
    table.end()
    return shown


def _subject(resource: Resource, kind: str | None) -> str:
    if kind is None:
        return f"all {resource.value}"
    return kind if resource is Resource.DEVICES else f"{resource.value} of {kind}"
