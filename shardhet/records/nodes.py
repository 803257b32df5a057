"""Which ranks share a node, who carries whose rows, where each rank's replica is kept."""

from collections.abc import Sequence
from dataclasses import dataclass


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


def carriers(nodes: Nodes, computes: Sequence[bool]) -> tuple[int, ...]:
    """For every position the one that takes part in collectives for it: itself if it computes.

    Otherwise a computing one of its node, or of any node if none computes there: of those
    with the fewest to carry the first.
    """
    carried = [0] * len(computes)
    found = []
    for i, node in enumerate(nodes.node_by_position):
        computing = [j for j in range(len(computes)) if computes[j]]
        near = [j for j in computing if nodes.node_by_position[j] == node]
        carrier = i if computes[i] else min(near or computing, key=carried.__getitem__)
        carried[carrier] += carrier != i
        found.append(carrier)
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
    takers: tuple[tuple[int, ...], ...]  # by position, in the order of nodes

    @classmethod
    def among(cls, nodes: Nodes, computes: Sequence[bool]) -> "TwoLevels | None":
        """None if fewer than two nodes compute, or none has two that do: then no row crosses
        to a node twice.
        """
        at = [[i for i in nodes.positions(n) if computes[i]] for n in range(len(nodes))]
        near = carriers(nodes, computes)
        if sum(map(bool, at)) < 2 or max(map(len, at)) < 2:
            return None
        # Foreign rows are dealt out in turn: each position of a node takes as many as another.
        number = [0] * len(nodes)
        found = []
        for i, home in enumerate(nodes.node_by_position):
            takers = []
            for node, here in enumerate(at):
                if node == home and here:
                    takers.append(near[i])
                elif here:
                    takers.append(here[number[node] % len(here)])
                    number[node] += 1
            found.append(tuple(takers))
        return cls(nodes, tuple(computes), tuple(found))

    @property
    def positions(self) -> tuple[int, ...]:
        """Those that compute."""
        return tuple(i for i, computes in enumerate(self.computes) if computes)

    def mates(self, position: int) -> tuple[int, ...]:
        """The positions that compute on the node of ``position``, itself among them."""
        node = self.nodes.node_by_position[position]
        return tuple(i for i in self.nodes.positions(node) if self.computes[i])


def keepers(
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
        keeper = min(nodes.positions(node), key=lambda position: (kept[position], position))
        held[node] += num_bytes[i]
        kept[keeper] += num_bytes[i]
        found[i] = keeper
    return found
