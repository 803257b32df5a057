"""Context groups: devices that compute the same samples, each its part of the tokens.

A member has two chunks of every sample, at the same distance from its start and its end:

    tokens     | 0 0 0 | 1 1 | 2 2 | 1 1 | 0 0 0 |

Under a causal mask the pairs of tokens that it computes are then as many as its tokens times
half of the sample, so work is in proportion to tokens whatever the shares are.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

from shardhet.records.by_hand import check_lengths, whole_of_each
from shardhet.records.layout import Span

Groups = tuple[tuple[int, ...], ...]


class PlanInGroups:
    """A base of plans: which devices compute the same samples."""

    __slots__ = ()

    def context_group(self: Any, position: int) -> tuple[int, ...]:
        """The positions that compute the same samples as ``position``, itself among them."""
        groups = self.context_groups or ()
        return next((each for each in groups if position in each), (position,))

    def leads(self: Any, position: int) -> bool:
        """Whether it is the first of those, which stands for all of them in counts."""
        return bool(self.context_group(position)[0] == position)

    def token_shares(self: Any, position: int) -> list[float]:
        """The parts of the tokens of its samples that the members of its group have."""
        return [self.ranks[i].token_share or 1.0 for i in self.context_group(position)]

    def refuse_groups(self: Any, caller: str) -> None:
        """Raise ``ValueError`` if the plan has context groups, for a ``caller`` without."""
        if self.context_groups:
            raise ValueError(
                f"{caller}: the plan has context groups {list(self.context_groups)}, whose "
                "seconds and bytes are not known yet. Give it a plan without."
            )


def check_groups(plan: Any, tolerance: float) -> None:
    """Raise ``ValueError`` unless members of groups follow on each other and do the same."""
    groups: Groups = plan.context_groups or ()
    if groups and plan.stages is not None:
        raise ValueError("plan: context_groups with stages. Leave one of them out.")
    members = [i for group in groups for i in group]
    for g, group in enumerate(groups):
        name = f"plan: context_groups[{g}] is {list(group)}"
        if len(group) < 2 or list(group) != list(range(group[0], group[0] + len(group))):
            raise ValueError(f"{name} but must be two or more positions that are adjacent.")
        if not 0 <= group[0] <= group[-1] < len(plan.ranks) or len(set(members)) < len(members):
            raise ValueError(
                f"{name} but the plan has positions 0 to {len(plan.ranks) - 1}, each of which "
                "may be in one group."
            )
        sizes = [plan.ranks[i].microbatch_sizes for i in group]
        if len(set(sizes)) > 1 or not sizes[0]:
            raise ValueError(
                f"{name}, whose microbatches are {sizes}. Members compute the same samples: "
                "give them the same microbatches, and at least one."
            )
    shares = [rank.token_share for rank in plan.ranks]
    given = [i for i, share in enumerate(shares) if share is not None]
    totals = [sum(shares[i] or 0.0 for i in group) for group in groups]
    are_parts = all(isfinite(shares[i]) and shares[i] > 0 for i in given)
    if (
        given != sorted(members)
        or not are_parts
        or any(abs(total - 1) > tolerance for total in totals)
    ):
        raise ValueError(
            f"plan: token_share is {shares} but each member of a context group has one above "
            "0, they sum to 1 in each group, and no other device has one."
        )


def groups_by_hand(
    groups: Sequence[Sequence[int]] | None, weights: Sequence[float] | None, world_size: int
) -> tuple[Groups, list[float | None]]:
    """What a plan holds: each member's weight as a part of its group's; None for others."""
    found = tuple(tuple(whole_of_each("context_groups", each)) for each in groups or ())
    weights = [1.0] * world_size if weights is None else list(weights)
    check_lengths(world_size, token_shares=weights)
    shares: list[float | None] = [None] * world_size
    for group in found:
        inside = [i for i in group if 0 <= i < world_size]  # others are refused by the plan
        total = sum(weights[i] for i in inside)
        for i in inside:
            shares[i] = weights[i] / total if total else 0.0
    return found, shares


def token_spans(num_tokens: int, shares: Sequence[float]) -> list[tuple[Span, ...]]:
    """Each member's tokens: two chunks, and in the middle one."""
    half, last = num_tokens // 2, len(shares) - 1
    if last and half < len(shares):
        raise ValueError(
            f"model(...): a sample has {num_tokens} tokens but a context group of "
            f"{len(shares)} devices needs {2 * len(shares)}. Leave such samples out, or pad."
        )
    total, borders = sum(shares), [0]
    for i, reached in enumerate(accumulate(shares[:-1]), start=1):
        wanted = round(half * reached / total)
        borders.append(min(max(wanted, borders[-1] + 1), half - len(shares) + i))
    spans: list[tuple[Span, ...]] = [
        (Span(start, stop), Span(num_tokens - stop, num_tokens - start))
        for start, stop in pairwise(borders)
    ]
    return [*spans, (Span(borders[last], num_tokens - borders[last]),)]
