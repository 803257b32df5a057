"""A plan as a table: a row for neighbouring devices that do the same."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from html import escape
from itertools import groupby
from typing import Any

SHARES_ALIKE = 5e-4  # shares that differ by no more, which is a few rows, are shown as one


class ShownPlan:
    """A base of plans: how they are printed."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        size, batch = self.world_size, self.global_batch_size
        return f"<Plan {self.digest} of {size} devices and {batch} samples a step>"

    def __str__(self) -> str:
        return plan_table(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"  # in notebooks


def plan_table(plan: Any) -> str:
    """What a step is, and what each device computes and stores."""
    units = [unit.fqn for unit in plan.units]
    columns = ["device", "samples", "microbatches", "recomputes", "state"]
    on_host = any(rank.is_on_host for rank in plan.ranks)
    columns += ["on the host"] * on_host + ["stage"] * (plan.stages is not None)
    owns, shares = any(rank.owned for rank in plan.ranks), plan.context_groups is not None
    columns += ["matrices"] * owns + ["tokens"] * shares
    rows, numbers = [columns], samples_of_step(plan)
    for positions in alike(plan, lambda i: plan.ranks[i].state_share):
        rank = plan.ranks[positions[0]]
        there = {"inputs": rank.inputs_on_host, "optimizer": rank.optimizer_on_host}
        cells = [
            named_row(positions, rank.device.kind or "any device"),
            f"{numbers[positions[0]]:,}",
            microbatches(rank.microbatch_sizes),
            recomputed(rank, units),
            f"{rank.state_share:.2%}",
        ]
        cells += [
            ", ".join(what for what, is_there in there.items() if is_there) or "-"
        ] * on_host
        if plan.stages is not None:
            cells.append(str(plan.groups.index(plan.group_of(positions[0]))))
        cells += [f"{sum(each.number for each in rank.owned or ())}"] * owns
        cells += [tokens_cell(rank)] * shares
        rows.append(cells)
    return "\n".join([_heading(plan), *_drawn(rows)])


def _heading(plan: Any) -> str:
    """The step, with what is said of it that is not usual."""
    said = [
        f"{field.name}={value}"
        for field in fields(plan)
        if field.default is not MISSING
        and field.name not in ("stages", "units", "last_round_size", "holds_for")
        and (value := getattr(plan, field.name)) != field.default
    ]
    said += ["the table shows one round"] * (plan.num_rounds > 1)
    step = f"{plan.world_size} devices; a step is {plan.global_batch_size:,} samples"
    step += "" if plan.holds_for is None else f" in {plan.holds_for.param_dtype}"
    return f"{step} ({', '.join(said)})" if said else step


def _drawn(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        " | ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    border = f"+{'-' * (len(lines[0]) + 2)}+"
    under = f"|{'+'.join('-' * (width + 2) for width in widths)}|"
    head, *body = (f"| {line} |" for line in lines)
    return [border, head, under, *body, border]


def samples_of_step(plan: Any) -> list[int]:
    """How many samples of a step each device computes, by position."""
    return [
        (plan.num_rounds - 1) * rank.rank_batch_size + sum(plan.last_microbatch_sizes(i))
        for i, rank in enumerate(plan.ranks)
    ]


def alike(plan: Any, share: Callable[[int], float]) -> list[range]:
    """Neighbouring positions that do the same, given the share of the state of each."""
    numbers = samples_of_step(plan)

    def key(i: int) -> tuple[object, ...]:
        rank = plan.ranks[i]
        on_host = rank.inputs_on_host, rank.optimizer_on_host, rank.tiled_units
        same = (rank.device.kind, rank.microbatch_sizes, rank.recomputed_units, on_host)
        shared = plan.context_group(i)[1:] and plan.context_group(i), rank.token_share
        return (*same, numbers[i], plan.group_of(i), rank.owned, shared)

    found: list[range] = []
    for i in range(plan.world_size):
        first = found[-1][0] if found else i
        if found and key(i) == key(first) and abs(share(i) - share(first)) <= SHARES_ALIKE:
            found[-1] = range(first, i + 1)
        else:
            found.append(range(i, i + 1))
    return found


def tokens_cell(rank: Any) -> str:
    """The part of each sample's tokens that a device computes."""
    return "all" if rank.token_share is None else f"{rank.token_share:.2%}"


def named_row(positions: range, kind: str) -> str:
    """``0-7 NVIDIA A100`` or ``0 NVIDIA A100``."""
    first, last = positions[0], positions[-1]
    return f"{first} {kind}" if first == last else f"{first}-{last} {kind}"


def microbatches(sizes: Sequence[int]) -> str:
    """``3 x 8 + 1 x 4``."""
    parts = [(size, len(list(each))) for size, each in groupby(sizes)]
    return " + ".join(f"{number} x {size}" for size, number in parts) or "-"


def recomputed(rank: Any, units: Sequence[str]) -> str:
    """Which units are recomputed, in few words: ``12 of 24 blocks, head``; and tiles."""
    if not rank.microbatch_sizes:
        return "-"
    of_units = _recomputed(rank, units)
    if not rank.tiled_units:
        return of_units
    return f"{of_units}; in tiles of {rank.tokens_per_tile:,} tokens"


def _recomputed(rank: Any, units: Sequence[str]) -> str:
    if not rank.recomputed_units:
        return "-"
    if rank.recomputed_units == ("*",):
        return "all"
    claims_by_name: dict[str, list[bool]] = {}
    for fqn in units:
        prefix, _, last = fqn.rpartition(".")
        claims = claims_by_name.setdefault(prefix if last.isdigit() else fqn, [])
        claims.append(rank.recomputes(fqn))
    short = {name: name.rpartition(".")[2] for name in claims_by_name}
    if len(set(short.values())) < len(short):  # encoder.layers and decoder.layers
        short = {name: name for name in short}
    return ", ".join(
        short[name] if all(claims) else f"{sum(claims)} of {len(claims)} {short[name]}"
        for name, claims in claims_by_name.items()
        if any(claims)
    )
