"""What launchers know of a cluster: its hosts and their numbers of processes, but no cards.

Who gives such a file or line as a cluster is told how to go on from it.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

HOST = r"[A-Za-z0-9][\w.-]*"


class Launched(NamedTuple):
    """One host; None: its name or number of processes is not stated."""

    host: str | None
    number: int | None


def of_launcher(text: str, document: Any = None) -> str | None:
    """What to write in place of a launcher's file or line; None if this is none."""
    for what, read in (
        ("accelerate's configuration", _of_accelerate(document)),
        ("a launcher's line", _of_line(text)),
        ("a hostfile", _of_hostfile(text)),
        ("Slurm's list of nodes", _of_slurm(text)),
    ):
        if found := list(read):
            return (
                f"this is {what}, which does not say what cards there are. {_to_go_on(found)}"
            )
    return None


def _to_go_on(found: list[Launched]) -> str:
    cards = " | ".join(
        f"{each.host}: " * bool(each.host) + f"CARDx{each.number or 'N'}" for each in found
    )
    asked = ["a name for each CARD (4090)"]
    if any(each.number is None for each in found):
        asked.append("their number for each N")
    if len(found) > 1:
        asked.append("what joins the hosts for LINK (10GbE)")
    network = " network=LINK" * (len(found) > 1)
    return f"Give cards='{cards}'{network}, with {', '.join(asked)}."


def _of_accelerate(document: Any) -> Iterator[Launched]:
    if not isinstance(document, dict) or "num_processes" not in document:
        return
    machines, processes = document.get("num_machines", 1), document["num_processes"]
    yield from _alike(machines, processes, is_of_all=True)


def _of_line(text: str) -> Iterator[Launched]:
    if not re.search(r"\btorchrun\b|torch\.distributed\.(run|launch)|accelerate launch", text):
        return
    given = {
        name.replace("_", "-"): value
        for name, value in re.findall(r"--([\w-]+)[= ](?:\d+:)?(\w+)", text)
    }
    if "accelerate launch" in text:
        yield from _alike(given.get("num-machines", 1), given.get("num-processes"), True)
    else:
        yield from _alike(given.get("nnodes", 1), given.get("nproc-per-node", 1), False)


def _alike(machines: Any, processes: Any, is_of_all: bool) -> Iterator[Launched]:
    hosts = int(machines) if str(machines).isdigit() else 1
    number = int(processes) if str(processes).isdigit() else None
    if number is not None and is_of_all:
        number = None if number % hosts else number // hosts
    yield from [Launched(None, number)] * hosts


def _of_hostfile(text: str) -> Iterator[Launched]:
    lines = [each.partition("#")[0].split() for each in text.splitlines()]
    found = []
    for words in filter(None, lines):
        slots = re.search(r"\bslots=(\d+)", " ".join(words))
        if slots is None or not re.fullmatch(HOST, words[0]):
            return
        found.append(Launched(words[0], int(slots[1])))
    yield from found


def _of_slurm(text: str) -> Iterator[Launched]:
    """Of ``gpu[01-03,7],login``."""
    part = rf"{HOST}(?:\[[\d,-]+\])?"
    if "[" not in text or not re.fullmatch(rf"\s*{part}(?:,{part})*\s*", text):
        return
    for name, numbers in re.findall(rf"({HOST}?)(?:\[([\d,-]+)\]|(?=,|\s*$))", text):
        for span in numbers.split(","):
            first, _, last = span.partition("-")
            if not first:
                yield Launched(name, None)
                continue
            for number in range(int(first), int(last or first) + 1):
                yield Launched(f"{name}{number:0{len(first)}d}", None)
