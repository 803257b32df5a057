"""The choices of what a device may recompute, and how a plan names the units.

Ranks meet at every unit, so the choices are nested: one kind of unit after the other, and
for a kind with many units the first quarter, the first half, and so on.  Ranks with different
choices then differ in few classes of turns.
"""

from dataclasses import replace
from fnmatch import fnmatchcase

from shardhet.pricing.cost import CostModel
from shardhet.records.plan import EVERY_UNIT, RankPlan


def recompute_choices(model: CostModel, num_steps: int) -> tuple[tuple[str, ...], ...]:
    """The choices from nothing to everything recomputed, as patterns of unit names.

    The kinds that free the most bytes per FLOP come first; within a kind, the units that run
    first.
    """
    workload = model.workload
    kinds = [kind for kind in workload.kinds if workload.num_units_by_kind[kind.name]]
    kinds.sort(key=lambda kind: -kind.activation_bytes / (kind.forward_flops + 1))
    chosen: set[str] = set()
    choices: list[tuple[str, ...]] = [()]
    for kind in kinds:
        fqns = [unit.fqn for unit in model.visited_units if unit.kind == kind.name]
        ends = [-(-len(fqns) * step // num_steps) for step in range(1, num_steps + 1)]
        choices += [_patterns(model, chosen.union(fqns[:end])) for end in ends]
        chosen.update(fqns)
    return tuple(dict.fromkeys(choices))


def policies(
    model: CostModel, num_steps: int, *, on_host: bool = False, optimizer_on_host: bool = False
) -> tuple[RankPlan, ...]:
    """What devices may do with units, as plans without samples; the first does nothing.

    Long sequences may be computed in tiles. With ``on_host``, recomputed units may keep
    their inputs in the memory of the host, all or none of them. With ``optimizer_on_host``,
    the optimizer may step there beside any of it.
    """
    key, known = (num_steps, on_host, optimizer_on_host), model.known.of_workload.policies
    if key in known:
        return known[key]
    choices = [
        RankPlan(microbatch_sizes=(), state_share=0.0, recomputed_units=patterns)
        for patterns in recompute_choices(model, num_steps)
    ]
    if model.may_tile:
        choices += [replace(each, tiled_units=EVERY_UNIT) for each in choices]
    if on_host:
        again = [each for each in choices if each.recomputed_units]
        choices += [replace(each, inputs_on_host=each.recomputed_units) for each in again]
    if optimizer_on_host:
        choices += [replace(each, optimizer_on_host=True) for each in choices]
    known[key] = tuple(choices)
    return known[key]


def _patterns(model: CostModel, chosen: set[str]) -> tuple[str, ...]:
    """Patterns that match these units and no others; only a few if units are numbered."""
    fqns = [unit.fqn for unit in model.visited_units]
    wanted = [fqn for fqn in fqns if fqn in chosen]
    if wanted == fqns:
        return EVERY_UNIT
    patterns: dict[str, None] = {}
    by_prefix: dict[tuple[str, str], list[str]] = {}
    for fqn in fqns:
        prefix, dot, _ = fqn.rpartition(".")
        by_prefix.setdefault((prefix, dot), []).append(fqn)
    settled: set[str] = set()  # prefixes
    for fqn in wanted:
        prefix, dot, last = fqn.rpartition(".")
        if dot and last.isdigit() and prefix in settled:
            continue
        siblings = by_prefix[prefix, dot]
        taken = [each for each in siblings if each in chosen]
        if not (dot and last.isdigit()):
            patterns[fqn] = None
        elif taken == siblings:
            patterns[f"{prefix}.*"] = None
            settled.add(prefix)
        elif {each.rpartition(".")[2] for each in taken} == set(map(str, range(len(taken)))):
            patterns.update((f"{prefix}.{each}", None) for each in _numbers_below(len(taken)))
            settled.add(prefix)
        else:
            patterns[fqn] = None
    matched = [fqn for fqn in fqns if any(fnmatchcase(fqn, each) for each in patterns)]
    return tuple(patterns if matched == wanted else wanted)


def _numbers_below(stop: int) -> list[str]:
    """Patterns of the decimal numbers 0 ... stop - 1; for 26, ``[0-9] 1[0-9] 2[0-5]``."""
    patterns = []
    for length in range(1, len(str(stop - 1)) + 1):
        largest = str(min(stop, 10**length) - 1)  # of this length
        for i, digit in enumerate(largest):
            # Equal to the largest before digit i, less at i; the last digit may be equal too.
            low = int(i == 0 and length > 1)
            high = int(digit) - (i < length - 1)
            if low <= high:
                span = f"[{low}-{high}]" if low < high else str(low)
                patterns.append(largest[:i] + span + "[0-9]" * (length - i - 1))
    return patterns
