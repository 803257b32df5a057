"""Quantities as text, the same in all output."""

MIB, GIB = 2**20, 2**30
SMALL_BUDGET_BYTES = 10 * GIB  # below it, tenths of a GiB would say little


def counted(number: int, what: str) -> str:
    """The number with its noun: ``1 device``, ``1,024 devices``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """The duration as text, in a suitable unit."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def of_budget(used_bytes: float, budget_bytes: float) -> str:
    """How much of a memory budget is used: ``21.1 of 21.6 GiB``, ``31 of 36 MiB``."""
    if budget_bytes < SMALL_BUDGET_BYTES:
        return f"{used_bytes / MIB:,.0f} of {budget_bytes / MIB:,.0f} MiB"
    return f"{used_bytes / GIB:.1f} of {budget_bytes / GIB:.1f} GiB"
