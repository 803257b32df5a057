"""Groups of devices that may be the stages of a pipeline.

Devices are sorted into parts by what they have in common: region, node, kind, and kind within
one region or node.  A stage is one such part or several of one sorting together.  Parts may be
left out.  Of few devices each is a part of its own, so that all groups of them are listed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations, zip_longest

from shardhet.records.cluster import Cluster, DeviceSpec, Node

MAX_PARTS = 4  # of a sorting; of more, stages are not listed
MAX_SINGLE = 6  # devices, each of which may be a part
Positions = tuple[int, ...]
Stages = tuple[Positions, ...]

SORTINGS: tuple[Callable[[Node, DeviceSpec], object], ...] = (
    lambda node, device: node.region,
    lambda node, device: node.host,
    lambda node, device: device.kind,
    lambda node, device: (node.region, device.kind),
    lambda node, device: (node.host, device.kind),
    lambda node, device: (node.region, *sorted(str(each.kind) for each in node.devices)),
)

MAX_STAGES = 4


def sortings(cluster: Cluster) -> list[Stages]:
    """The different ways to sort the devices into 2 to ``MAX_PARTS`` parts."""
    places = [(node, device) for node in cluster.nodes for device in node.devices]
    found: dict[Stages, None] = {}
    for label in SORTINGS:
        parts: dict[object, list[int]] = {}
        for i, (node, device) in enumerate(places):
            parts.setdefault(label(node, device), []).append(i)
        if 1 < len(parts) <= MAX_PARTS:
            found[tuple(map(tuple, parts.values()))] = None
    if 1 < len(places) <= MAX_SINGLE:
        found[tuple((i,) for i in range(len(places)))] = None
    return list(found)


def orders_of_stages(
    cluster: Cluster, max_stages: int, demanded: Sequence[object] = ()
) -> Iterator[Stages]:
    """The devices of each stage, for all stages, orders and parts left out; each once.

    Of stages that differ only in which of a node's alike devices they have, the first.
    ``demanded`` says what else distinguishes devices, if anything.
    """
    places = [(node.host, each) for node in cluster.nodes for each in node.devices]
    labels = list(zip_longest(places, demanded))
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    number_of = [numbers[label] for label in labels]
    seen = set()
    for parts in sortings(cluster):
        for number in range(2, len(parts) + 1):
            for kept in combinations(parts, number):
                for stages in _ordered(kept, max_stages):
                    look = tuple(tuple(sorted(number_of[i] for i in e)) for e in stages)
                    if look not in seen:
                        seen.add(look)
                        yield stages


def _ordered(parts: Sequence[Positions], max_stages: int) -> Iterator[Stages]:
    """All ordered ways to put parts together into 2 to ``max_stages`` stages."""
    for number in range(2, min(max_stages, len(parts)) + 1):
        for together in _partitions(list(parts), number):
            merged = [tuple(sorted(sum(each, ()))) for each in together]
            yield from permutations(merged)


def _partitions(parts: list[Positions], number: int) -> Iterator[list[list[Positions]]]:
    """All ways to put parts into so many sets that are not empty."""
    if number < 1 or number > len(parts):
        return
    if number == len(parts):
        yield [[each] for each in parts]
        return
    first, rest = parts[0], parts[1:]
    for sets in _partitions(rest, number - 1):
        yield [[first], *sets]
    for sets in _partitions(rest, number):
        for i in range(len(sets)):
            yield [[first, *each] if i == j else each for j, each in enumerate(sets)]
