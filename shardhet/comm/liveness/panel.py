"""The verdict as text: for the other ranks, and for the user."""

import json
import textwrap
from dataclasses import asdict

from shardhet.comm.liveness.judging import Fault, Verdict

WIDTH = 96


def verdict_to_json(verdict: Verdict) -> str:
    """The verdict as text that ``verdict_from_json`` reads."""
    return json.dumps({**asdict(verdict), "fault": verdict.fault.value})


def verdict_from_json(text: str) -> Verdict:
    """What ``verdict_to_json`` returned the text of."""
    values = json.loads(text)
    culprits = tuple(values.pop("culprits"))
    return Verdict(fault=Fault(values.pop("fault")), culprits=culprits, **values)


def panel(verdict: Verdict) -> str:
    """The verdict in a frame, with the stack of the rank that stands still."""
    lines = [
        line
        for part in verdict.text.splitlines()
        for line in textwrap.wrap(part, WIDTH) or [""]
    ]
    if verdict.stack:
        when = "is" if verdict.fault is Fault.STILL else "was, at its last sign of life,"
        lines += ["", f"{verdict.name} {when} at", *verdict.stack.splitlines()]
    width = max(WIDTH, *(len(line) for line in lines))
    title = " a rank stands still "
    return "\n".join(
        [
            f"+{title.center(width + 2, '-')}+",
            *(f"| {line.ljust(width)} |" for line in lines),
            f"+{'-' * (width + 2)}+\n",
        ]
    )
