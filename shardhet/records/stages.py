"""Groups of devices: those of a node, the stages of a pipeline, those that share samples.

Nodes say who carries whose rows between them, and where each rank's replica is kept.

A stage is a HetFSDP of its own over its devices: uneven batches, and uneven state, inside it.
The samples of a round pass through all stages; within a stage device ``i`` has those of an
interval, in plan order, whatever the intervals of the stages beside it are.

Members of a context group compute the same samples, each its part of the tokens: two chunks of
every sample, at the same distance from its start and its end.

    tokens     | 0 0 0 | 1 1 | 2 2 | 1 1 | 0 0 0 |

Under a causal mask the pairs of tokens that it computes are then as many as its tokens times
half of the sample, so work is in proportion to tokens whatever the shares are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

from shardhet.records.layout import Span


@dataclass(frozen=True, slots=True)
class Nodes:
    """The positions of a plan, by node."""

    node_by_position: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> "Nodes":
        """Nodes in order of their first positions, given the name of each position's node."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    def __len__(self) -> int:
        """The number of nodes."""
        return len(set(self.node_by_position))

    def positions(self, node: int) -> list[int]:
        """The positions on ``node``, in ascending order."""
        return [i for i, each in enumerate(self.node_by_position) if each == node]

    def leads(self, position: int) -> bool:
        """Whether ``position`` is the first of its node, which makes and removes folders."""
        return position == self.node_by_position.index(self.node_by_position[position])


def relays(nodes: Nodes, computes: Sequence[bool]) -> tuple[int, ...]:
    """For every position the one that takes part in collectives for it: itself if it computes.

    Otherwise a computing one of its node, or of any node if none computes there: of those
    with the fewest to carry the first.
    """
    carried = [0] * len(computes)
    found = []
    for i, node in enumerate(nodes.node_by_position):
        computing = [j for j in range(len(computes)) if computes[j]]
        near = [j for j in computing if nodes.node_by_position[j] == node]
        relay = i if computes[i] else min(near or computing, key=carried.__getitem__)
        carried[relay] += relay != i
        found.append(relay)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class TwoLevels:
    """Collectives in which every row crosses between nodes once per node.

    On every node that computes, one position is the *taker* of a position's rows: itself on its
    own node if it computes.  It gives them to its *mates*, the others of its node that compute;
    gradients are added up at the takers, and come back as one sum per node:

        owner ==cable==> taker --> mates          mates --> taker ==cable==> owner
    """

    nodes: Nodes
    computes: tuple[bool, ...]  # by position
    node_leaders: tuple[tuple[int, ...], ...]  # by position, in the order of nodes

    @classmethod
    def among(cls, nodes: Nodes, computes: Sequence[bool]) -> "TwoLevels | None":
        """None if fewer than two nodes compute, or none has two that do: then no row crosses
        to a node twice.
        """
        at = [[i for i in nodes.positions(n) if computes[i]] for n in range(len(nodes))]
        near = relays(nodes, computes)
        if sum(map(bool, at)) < 2 or max(map(len, at)) < 2:
            return None
        # Foreign rows are dealt out in turn: each position of a node takes as many as another.
        number = [0] * len(nodes)
        found = []
        for i, home in enumerate(nodes.node_by_position):
            node_leaders = []
            for node, here in enumerate(at):
                if node == home and here:
                    node_leaders.append(near[i])
                elif here:
                    node_leaders.append(here[number[node] % len(here)])
                    number[node] += 1
            found.append(tuple(node_leaders))
        return cls(nodes, tuple(computes), tuple(found))

    @property
    def positions(self) -> tuple[int, ...]:
        """Those that compute."""
        return tuple(i for i, computes in enumerate(self.computes) if computes)

    def node_peers(self, position: int) -> tuple[int, ...]:
        """The positions that compute on the node of ``position``, itself among them."""
        node = self.nodes.node_by_position[position]
        return tuple(i for i in self.nodes.positions(node) if self.computes[i])


def backup_positions(
    nodes: Nodes, num_bytes: Sequence[int], free_bytes: Sequence[int]
) -> list[int | None]:
    """For every position the one, on another node, that keeps a copy of its rows.

    Largest first, each to the node that is then least full relative to the space it has: the
    shares of unlike devices differ, and so may their nodes.  None if there is one node only.

    Args:
        nodes: where the positions are.
        num_bytes: of each position's rows.
        free_bytes: of the folder of each position's node.
    """
    held = [0] * len(nodes)
    for node, own in zip(nodes.node_by_position, num_bytes, strict=True):
        held[node] += own
    kept = [0] * len(num_bytes)  # of others, by position
    found: list[int | None] = [None] * len(num_bytes)
    if len(nodes) == 1:
        return found
    for i in sorted(range(len(num_bytes)), key=lambda i: (-num_bytes[i], i)):
        others = [node for node in range(len(nodes)) if node != nodes.node_by_position[i]]

        def fullness(node: int, added: int = num_bytes[i]) -> float:
            return (held[node] + added) / max(1, free_bytes[nodes.positions(node)[0]])

        node = min(others, key=lambda node: (fullness(node), node))
        backup_position = min(
            nodes.positions(node), key=lambda position: (kept[position], position)
        )
        held[node] += num_bytes[i]
        kept[backup_position] += num_bytes[i]
        found[i] = backup_position
    return found


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
    in_flight = rounds_in_flight(stages, num_rounds)
    if any(later > earlier for earlier, later in pairwise(in_flight)):
        raise ValueError(
            f"plan: the stages have {list(in_flight)} rounds in flight, which grow along the "
            "pipeline: a stage would wait for a round that the one before does not begin. "
            "Give no stage more than the one before it."
        )


Groups = tuple[tuple[int, ...], ...]


class PlanInGroups:
    """A base of plans: their stages, and which devices compute the same samples."""

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

    def refuse_stages(
        self: Any, caller: str, remedy: str = "Give it a plan without stages"
    ) -> None:
        """Raise ``ValueError`` if the plan has stages, for a ``caller`` that has none."""
        if self.stages is not None:
            raise ValueError(
                f"{caller}: the plan has {len(self.stages)} stages, with which it cannot do "
                f"anything yet. {remedy}."
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
