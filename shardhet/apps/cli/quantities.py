"""Quantities as text, the same in all output."""

MIB, GIB = 2**20, 2**30
SMALL_BUDGET_BYTES = 10 * GIB  # below it, tenths of a GiB would say little


def counted(number: int, what: str) -> str:
    """The number with its noun: ``1 device``, ``1,024 devices``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def percent(part: float) -> str:
    """A part of one: ``17%``, ``0.2%``."""
    return f"{part:.0%}" if part >= 0.01 else f"{part:.1%}"


def duration(seconds: float) -> str:
    """The duration as text, in a suitable unit."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def of_budget(used_bytes: float, budget_bytes: float) -> str:
    """How much of a memory budget is used: ``21.1 of 21.6 GiB``, ``31 of 36 MiB``."""
    name = unit_of(budget_bytes)
    return f"{of_budget_in(name, used_bytes, budget_bytes)} {name}"


def unit_of(budget_bytes: float) -> str:
    """In which memory beside such a budget is told: ``MiB`` or ``GiB``."""
    return "MiB" if budget_bytes < SMALL_BUDGET_BYTES else "GiB"


def of_budget_in(unit: str, used_bytes: float, budget_bytes: float) -> str:
    """The same without the unit, ``GiB`` or ``MiB``: ``21.1 of 21.6``."""
    size, digits = (GIB, 1) if unit == "GiB" else (MIB, 0)
    return " of ".join(f"{each / size:,.{digits}f}" for each in (used_bytes, budget_bytes))
