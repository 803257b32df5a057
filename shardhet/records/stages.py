"""The stages of a pipeline: groups of unlike devices, each with a part of the units.

A stage is a HetFSDP of its own over its devices: uneven batches, and uneven state, inside it.
The samples of a round pass through all stages; within a stage device ``i`` has those of an
interval, in plan order, whatever the intervals of the stages beside it are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from math import isclose


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The units of one stage, and how many devices it has, next in the order of the plan."""

    units: tuple[str, ...]  # fnmatch patterns
    num_ranks: int
    # Rounds that it may have begun and not finished; None: as many as stages follow, and one.
    in_flight: int | None = None

    def has(self, unit_fqn: str) -> bool:
        """Whether one of its patterns is that of the unit."""
        return any(fnmatchcase(unit_fqn, pattern) for pattern in self.units)


def positions_by_stage(stages: Sequence[Stage]) -> tuple[range, ...]:
    """The positions of each stage's devices in the plan."""
    stops = accumulate(stage.num_ranks for stage in stages)
    return tuple(
        range(stop - stage.num_ranks, stop) for stage, stop in zip(stages, stops, strict=True)
    )


def group_with(position: int, groups: Sequence[range]) -> range:
    """The group that holds ``position``; raises ``ValueError`` if there is none."""
    for group in groups:
        if position in group:
            return group
    raise ValueError(f"plan: no position {position!r}; its last is {groups[-1].stop - 1}.")


def rounds_in_flight(stages: Sequence[Stage], num_rounds: int) -> tuple[int, ...]:
    """How many rounds each stage has begun and not finished at most."""
    given = [
        len(stages) - i if stage.in_flight is None else stage.in_flight
        for i, stage in enumerate(stages)
    ]
    return tuple(min(each, num_rounds) for each in given)


def stage_by_unit(stages: Sequence[Stage], unit_fqns: Iterable[str]) -> dict[str, int]:
    """The index of the stage of every unit.

    Raises ``ValueError`` naming units in no stage or in two, and stages without a unit.
    """
    found: dict[str, int] = {}
    for fqn in unit_fqns:
        having = [i for i, stage in enumerate(stages) if stage.has(fqn)]
        if len(having) != 1:
            where = f"stages {having}" if having else "no stage"
            raise ValueError(
                f"plan: unit {fqn!r} is in {where} but must be in one. The stages have "
                f"{[list(stage.units) for stage in stages]}."
            )
        found[fqn] = having[0]
    empty = [i for i in range(len(stages)) if i not in found.values()]
    if found and empty:
        raise ValueError(
            f"plan: stages[{empty[0]}] has units {list(stages[empty[0]].units)}, which are "
            f"those of no unit. The units are {', '.join(found)}."
        )
    return found


def check_num_ranks(num_ranks: Sequence[int], world_size: int) -> None:
    """Raise ``ValueError`` unless the stages have as many devices as the plan."""
    if sum(num_ranks) != world_size:
        raise ValueError(
            f"plan: the stages have {list(num_ranks)} devices, {sum(num_ranks)} in all, but "
            f"the plan has {world_size}. Every device is in one stage."
        )


def check_stages(
    stages: Sequence[Stage],
    *,
    batch_sizes: Sequence[int],  # in a round, by position
    state_shares: Sequence[float],
    tolerance: float,
    num_rounds: int,
) -> None:
    """Raise ``ValueError`` for stages that cannot run."""
    for i, stage in enumerate(stages):
        most = 1 if stage.in_flight is None else stage.in_flight
        if not stage.units or stage.num_ranks < 1 or most < 1:
            raise ValueError(
                f"plan: stages[{i}] has units {list(stage.units)}, num_ranks "
                f"{stage.num_ranks} and in_flight {stage.in_flight}. Give it patterns of "
                "units, and at least 1 device and 1 round in flight."
            )
    check_num_ranks([stage.num_ranks for stage in stages], len(batch_sizes))
    positions = positions_by_stage(stages)
    sizes = [sum(batch_sizes[i] for i in each) for each in positions]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"plan: the stages compute {sizes} samples in a round but must compute equally "
            "many, because every sample passes through all of them. Change the batches."
        )
    for i, each in enumerate(positions):
        total = sum(state_shares[p] for p in each)
        if not isclose(total, 1, rel_tol=0, abs_tol=tolerance):
            raise ValueError(
                f"plan: state shares {[state_shares[p] for p in each]} of stages[{i}] sum to "
                f"{total} but must sum to 1 in each stage. Divide each by {total}."
            )
    in_flight = rounds_in_flight(stages, num_rounds)
    if any(later > earlier for earlier, later in pairwise(in_flight)):
        raise ValueError(
            f"plan: the stages have {list(in_flight)} rounds in flight, which grow along the "
            "pipeline: a stage would wait for a round that the one before does not begin. "
            "Give no stage more than the one before it."
        )
