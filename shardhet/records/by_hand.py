"""What a plan by hand is given, made into what a plan holds; errors name the argument."""

from collections.abc import Iterable, Mapping, Sequence, Set
from math import isfinite
from operator import index
from typing import Any, TypeVar

from shardhet.records.cluster import DeviceSpec
from shardhet.records.codec import from_document, to_document
from shardhet.records.stages import Groups, check_num_ranks

T = TypeVar("T")


def last_round_size(total: int | None, num_rounds: int, round_size: int) -> int | None:
    """What is left of ``total`` samples for the last round; None if it is a whole one."""
    num_rounds = whole("num_rounds", num_rounds)
    total = None if total is None else whole("global_batch_size", total)
    if total is None or total == num_rounds * round_size:
        return None
    least = (num_rounds - 1) * round_size + 1
    if not least <= total <= num_rounds * round_size:
        raise ValueError(
            f"plan: global_batch_size is {total} but {num_rounds} rounds of {round_size} "
            f"samples make {least} to {num_rounds * round_size}. Change num_rounds or it."
        )
    return total - least + 1


def whole(name: str, value: Any) -> int:
    """The value as an ``int``, also of numpy; raises ``ValueError`` if it is none."""
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"plan: {name} is {value!r} but must be a whole number.") from None


def whole_of_each(name: str, values: Any) -> list[int]:
    """The same of one value per device."""
    entries = _listed(name, values, "Give one whole number per device.")
    return [whole(f"{name}[{i}]", each) for i, each in enumerate(entries)]


def shares_of_each(
    values: Any, devices: Sequence[DeviceSpec], groups: Sequence[range]
) -> list[float]:
    """One number per device, also of numpy; None: by the memory of ``devices``."""
    if values is None:
        return shares_by_memory(devices, groups)
    wanted = "Give one number per device, which sum to 1."
    entries = _listed("state_shares", values, wanted)
    try:
        return [float(each + 0.0) for each in entries]
    except TypeError:
        raise ValueError(f"plan: state_shares is {values!r}. {wanted}") from None


def records_of_each(name: str, kind: type[T], values: Any) -> list[T]:
    """The records that are given, with their fields checked as in a document."""
    entries = _listed(name, values, f"Give a list, each entry a {kind.__name__}.")
    for i, each in enumerate(entries):
        if not isinstance(each, kind):
            raise ValueError(
                f"plan: {name}[{i}] is {each!r} but must be a {kind.__name__}(...)."
            )
    return [
        from_document(kind, to_document(each), source=f"plan: {name}[{i}]")
        for i, each in enumerate(entries)
    ]


def _listed(name: str, values: Any, wanted: str) -> list[Any]:
    if isinstance(values, str | Mapping | Set) or not isinstance(values, Iterable):
        raise ValueError(f"plan: {name} is {values!r}. {wanted}")
    return list(values)


def is_truth(value: Any) -> bool:
    """Whether it is True or False, also of numpy, or 1 or 0."""
    try:
        return bool(value in (True, False))
    except (ValueError, RuntimeError):  # an array of several
        return False


def truth(name: str, value: Any) -> bool:
    """The value as a ``bool``, also of numpy; raises ``ValueError`` if it is none."""
    if not is_truth(value):
        raise ValueError(f"plan: {name} is {value!r} but must be True or False.")
    return bool(value)


def check_lengths(world_size: int, **sequences: Sequence[Any]) -> None:
    for name, entries in sequences.items():
        if len(entries) != world_size:
            raise ValueError(
                f"plan: {name} has {len(entries)} entries but microbatch_sizes has "
                f"{world_size}. Give one entry per device."
            )


def shares_by_memory(devices: Sequence[DeviceSpec], groups: Sequence[range]) -> list[float]:
    """In proportion to the devices' memory if all state it, and otherwise even; one in all
    for each group of positions.
    """
    check_num_ranks(list(map(len, groups)), len(devices))
    weights = [device.memory_capacity_bytes or 0 for device in devices]
    if not all(weights):
        weights = [1] * len(devices)
    return parts_of_groups(weights, groups)


def parts_of_groups(weights: Sequence[float], groups: Sequence[range]) -> list[float]:
    """Each weight as a part of the sum of its group; groups follow on each other."""
    parts: list[float] = []
    for group in groups:
        total = sum(weights[i] for i in group)
        parts += [weights[i] / total for i in group]
    return parts


def repeated(microbatch_size: int, num_microbatches: int) -> tuple[int, ...]:
    if (
        microbatch_size < 0
        or num_microbatches < 0
        or (num_microbatches and not microbatch_size)
    ):
        raise ValueError(
            f"plan: a device has {num_microbatches} microbatches of {microbatch_size} samples. "
            f"Give it microbatches of at least 1 sample, or none of them."
        )
    return (microbatch_size,) * num_microbatches


def ragged(rank_batch_size: int, microbatch_size: int) -> tuple[int, ...]:
    if rank_batch_size < 0:
        raise ValueError(
            f"plan: a device has rank_batch_size {rank_batch_size}. Give it 0 samples or more."
        )
    if rank_batch_size and microbatch_size < 1:
        raise ValueError(
            f"plan: a device has {rank_batch_size} samples but microbatch size "
            f"{microbatch_size}. Give it a microbatch size of at least 1."
        )
    whole, rest = divmod(rank_batch_size, microbatch_size) if rank_batch_size else (0, 0)
    return (microbatch_size,) * whole + ((rest,) if rest else ())


def of_each(name: str, claim: Any, world_size: int) -> list[Any]:
    """One entry per device of what may be said of all."""
    if is_truth(claim):
        return [bool(claim)] * world_size
    wanted = "Give True, False, or a list with one entry per device."
    entries = _listed(name, claim, wanted)
    check_lengths(world_size, **{name: entries})
    return [bool(each) if is_truth(each) else each for each in entries]


def microbatches_of_each(
    sizes: Sequence[int], counts: Sequence[int] | None, batches: Sequence[int] | None
) -> list[tuple[int, ...]]:
    """Every device's microbatches: so many of one size, or a batch cut into that size."""
    if counts is not None and batches is not None:
        raise ValueError(
            "plan: num_microbatches and rank_batch_sizes both given. Drop one of them."
        )
    sizes = whole_of_each("microbatch_sizes", sizes)
    if batches is not None:
        batches = whole_of_each("rank_batch_sizes", batches)
        check_lengths(len(sizes), rank_batch_sizes=batches)
        return [ragged(b, m) for b, m in zip(batches, sizes, strict=True)]
    counts = [int(each > 0) for each in sizes] if counts is None else counts
    counts = whole_of_each("num_microbatches", counts)
    check_lengths(len(sizes), num_microbatches=counts)
    return [repeated(m, n) for m, n in zip(sizes, counts, strict=True)]


def patterns_of(claim: Any, key: str, every: tuple[str, ...]) -> tuple[str, ...]:
    """The patterns of units that a claim stands for: all, none, or those that it lists."""
    if is_truth(claim):
        return every if claim else ()
    if isinstance(claim, str) or not isinstance(claim, Iterable):  # a str is one of letters
        remedy = f" Write [{claim!r}]." if isinstance(claim, str) else ""
        raise ValueError(
            f"plan: {key} is {claim!r} for a device but must be True, False or a list of "
            f"patterns.{remedy}"
        )
    listed = list(claim)
    wrong = [each for each in listed if not isinstance(each, str)]
    if wrong:
        raise ValueError(
            f"plan: {key} has {wrong[0]!r} among its patterns of units, which are names: "
            "'blocks.0', or 'blocks.*'."
        )
    return tuple(map(str, listed))


def check_units(units: Sequence[Any]) -> None:
    fqns = [unit.fqn for unit in units]
    for i, unit in enumerate(units):
        if unit.numel < 0 or unit.fqn in fqns[:i]:
            raise ValueError(
                f"plan: units[{i}] has fqn {unit.fqn!r} and numel {unit.numel}, but names must "
                f"differ and numel be at least 0. Make the plan again for this model."
            )


def names_in_full(patterns: Sequence[str]) -> list[str]:
    return [each for each in patterns if not set(each) & set("*?[")]


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


def inputs_of_each(claim: Any, recomputed: Sequence[Any]) -> Sequence[Any]:
    """Whether, or of which units, inputs are on hosts; True: those that are recomputed."""
    of_any = [each is not False for each in recomputed]
    given = of_each("inputs_on_host", claim, len(recomputed))
    return of_any if claim is True and any(of_any) else given


def samples_of(sizes: Sequence[Sequence[int]], groups: Groups) -> int:
    """The samples of devices with such microbatches, those of a context group once."""
    again = {i for group in groups for i in group[1:]}
    return sum(sum(each) for i, each in enumerate(sizes) if i not in again)


def check_rank(i: int, rank: Any, tolerance: float) -> None:
    """Raise ``ValueError`` for microbatches, or a share, that no device can have."""
    if rank.tokens_per_tile < 1:
        raise ValueError(
            f"plan: ranks[{i}] has tokens_per_tile {rank.tokens_per_tile} but it must be at "
            "least 1."
        )
    if any(size < 1 for size in rank.microbatch_sizes):
        raise ValueError(
            f"plan: ranks[{i}] has microbatch sizes {rank.microbatch_sizes} but each must be "
            "at least 1. Leave the list empty if the device only stores."
        )
    if not (isfinite(rank.state_share) and 0 <= rank.state_share <= 1 + tolerance):
        raise ValueError(
            f"plan: ranks[{i}] has state_share {rank.state_share} but it must lie between 0 "
            "and 1."
        )
