"""What hardware there is: one record per device, and the nodes and links between them."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from shardhet.records.codec import (
    OMITTABLE,
    Bounds,
    Count,
    Document,
    first_places,
    from_document,
    read_document,
    repeated,
)
from shardhet.records.kinds import (
    ASSUMED,
    DEFAULT_LINKS,
    DeviceKind,
    built_in_kinds,
    cards_document,
    check_supported,
    link_named,
    name_by_driver,
    named_kind,
    spelled_out,
    unknown_kind,
)

MAX_COUNT = 100_000  # nodes or devices in one entry of a description
DESCRIPTIONS = (".yaml", ".yml", ".json")  # ends of names of files
USABLE_MEMORY_FRACTION = 0.9  # of the capacity; shardhet.records.margin says what the rest is
# Of the capacity, for fragmentation, where it is known what libraries take: an assumption.
# Without expandable segments 11 % were lost in one training (NovaSky-AI/SkyRL, pull 1470).
LEAST_FRAGMENTATION = 0.05
MEMORY_TOLERANCE = 0.02  # drivers of different versions reserve different amounts
HostSpeed = Annotated[float, Bounds(minimum=1e8)] | None
_Number = Annotated[int, Bounds(minimum=1, maximum=MAX_COUNT), OMITTABLE]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What is known about one device; ``None`` means "not stated" and matches anything."""

    host: str | None = None  # name of the node
    kind: str | None = None  # "NVIDIA A100-SXM4-80GB", as the driver spells it
    memory_capacity_bytes: Count | None = None
    uuid: str | None = None  # identifies one physical card

    def accepts(self, found: "DeviceSpec") -> bool:
        """Whether the device ``found`` matches the description ``self``."""
        wanted_bytes = self.memory_capacity_bytes or 0
        return (
            self.host in (None, found.host)
            and (self.kind is None or found.kind in (self.kind, name_by_driver(self.kind)))
            and self.uuid in (None, found.uuid)
            and (found.memory_capacity_bytes or 0) >= (1 - MEMORY_TOLERANCE) * wanted_bytes
        )

    def __str__(self) -> str:
        parts = [self.kind or "any device"]
        if self.memory_capacity_bytes is not None:
            parts.append(_binary(self.memory_capacity_bytes))
        if self.host is not None:
            parts.append(f"on {self.host}")
        if self.uuid is not None:
            parts.append(f"({self.uuid})")
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two devices, nodes or regions, in one direction."""

    latency_s: Annotated[float, Bounds(minimum=0.0, maximum=2.0)]
    bandwidth_bytes_per_s: Annotated[float, Bounds(minimum=1e5)]
    source: Annotated[str, OMITTABLE] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host: its devices and the link between them."""

    host: str
    devices: tuple[DeviceSpec, ...]
    link: Link | None = None  # between its devices
    region: Annotated[str, OMITTABLE] = ""
    # For what plans keep on the host, and shared by its devices; None: not stated.
    host_memory_bytes: Count | None = None
    host_bytes_per_s: HostSpeed = None  # that its processors read and write
    # Of each device, what libraries allocate besides tensors; None: the profile counts it.
    library_bytes: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster(Document):
    """All devices and links, in plan order."""

    document_name: ClassVar[str] = "cluster"
    document_version: ClassVar[int] = 1
    nodes: tuple[Node, ...]
    kinds: tuple[DeviceKind, ...] = ()  # specifications; not needed if everything is measured
    between_nodes: Link | None = None
    between_regions: Link | None = None
    usable_memory_fraction: float = USABLE_MEMORY_FRACTION

    def __post_init__(self) -> None:
        hosts = [node.host for node in self.nodes]
        twice = repeated(hosts)
        if twice:
            raise ValueError(f"cluster: hosts {twice} appear twice. Name each once.")
        if not self.devices:
            raise ValueError("cluster: it has no devices. Give at least one node a device.")
        if not 0 < self.usable_memory_fraction <= 1:
            raise ValueError(
                f"cluster: usable_memory_fraction is {self.usable_memory_fraction} but must be "
                "above 0 and at most 1."
            )

    def __hash__(self) -> int:
        return hash((self.nodes[0], len(self.nodes), self.world_size))  # all would take long

    @cached_property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """All devices in plan order."""
        return tuple(chain.from_iterable(node.devices for node in self.nodes))

    @cached_property
    def number_by_kind(self) -> Counter[str | None]:
        """How many devices of each kind there are, in the order of the first ones."""
        return Counter(device.kind for device in self.devices)

    @cached_property
    def node_of(self) -> tuple[Node, ...]:
        """The node of each device, in plan order."""
        return tuple(node for node in self.nodes for _ in node.devices)

    @cached_property
    def positions_by_node(self) -> tuple[range, ...]:
        """The positions of each node's devices, in plan order."""
        sizes = [len(node.devices) for node in self.nodes]
        return tuple(
            range(stop - n, stop) for n, stop in zip(sizes, accumulate(sizes), strict=True)
        )

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def memory_budget_bytes(self, position: int) -> int:
        """How much of one device's memory a plan may use."""
        device = self.devices[position]
        if device.memory_capacity_bytes is None:
            raise ValueError(
                f"cluster: device {position} ({device}) has no memory_capacity_bytes. State "
                "it, or describe its kind."
            )
        return self._budget_bytes(
            device.memory_capacity_bytes, self.node_of[position].library_bytes
        )

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """``memory_budget_bytes`` of every device, in plan order."""
        keys = [
            (device.memory_capacity_bytes, node.library_bytes)
            for node in self.nodes
            for device in node.devices
        ]
        budget_by_key = {k: self.memory_budget_bytes(i) for k, i in first_places(keys).items()}
        return tuple(map(budget_by_key.__getitem__, keys))

    def _budget_bytes(self, capacity_bytes: int, library_bytes: int | None) -> int:
        budget = int(capacity_bytes * self.usable_memory_fraction)
        if library_bytes is None:
            return budget
        rest = int(capacity_bytes * (1 - LEAST_FRAGMENTATION)) - library_bytes
        return max(0, min(budget, rest))

    def capacity_for(self, budget_bytes: int, library_bytes: int | None) -> int:
        """The capacity of a device whose budget is at least so large."""
        capacity = budget_bytes / self.usable_memory_fraction
        if library_bytes is not None:
            capacity = max(capacity, (budget_bytes + library_bytes) / (1 - LEAST_FRAGMENTATION))
        return int(capacity) + 1

    def with_part_of_budgets(self, part: float) -> "tuple[Cluster, dict[int, int]]":
        """The cluster with ``part`` of its budgets, but for those that come with it.

        The latter are by position, of devices on which libraries take most of what is free.
        """
        fraction, bound = self.usable_memory_fraction, dict[int, int]()
        for i, device in enumerate(self.devices):
            budget = self.budgets[i]
            if budget < int((device.memory_capacity_bytes or 0) * fraction):
                bound[i] = int(part * budget)
        return replace(self, usable_memory_fraction=part * fraction), bound

    def kind(self, name: str | None) -> DeviceKind:
        """The specification of a kind; raises ``ValueError`` with the nearest ones."""
        with _at("cluster"):
            check_supported(str(name))
        for kind in self.kinds:
            if kind.kind == name:
                return kind
        if name in built_in_kinds():
            raise ValueError(
                f"cluster: it has devices of kind {name!r} but does not describe it. Describe "
                "the cluster in a file, for Cluster.load, or give Cluster(kinds=...) what "
                "shardhet.records.kinds.built_in_kinds() has of it."
            )
        known = {**built_in_kinds(), **{kind.kind: kind for kind in self.kinds}}
        raise ValueError(f"cluster: {unknown_kind(str(name), known)}")

    def check_described(self) -> None:
        """Raise ``ValueError`` if what times follow from is missing."""
        for name in self.number_by_kind:
            self.kind(name)
        _ = self.links

    @property
    def assumed(self) -> str:
        """A sentence on the links that are assumed, because the description states none."""
        found = [node.link for node in self.nodes] + [self.between_nodes]
        sources = dict.fromkeys(link.source for link in found if link is not None)
        names = [each.removesuffix(ASSUMED) for each in sources if each.endswith(ASSUMED)]
        return f"Links that are not stated are assumed: {', '.join(names)}." if names else ""

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The distinct links that a collective over all devices crosses."""
        first = dict[int, int]()  # of the nodes that share a link
        for i, node in enumerate(self.nodes):
            if len(node.devices) > 1:
                first.setdefault(id(node.link), i)
        crossed = {
            f"nodes[{i}].link, between the devices of {self.nodes[i].host!r}": self.nodes[
                i
            ].link
            for i in first.values()
        }
        if len(self.nodes) > 1:
            crossed["between_nodes"] = self.between_nodes
        if len({node.region for node in self.nodes}) > 1:
            crossed["between_regions"] = self.between_regions
        links = [link for link in crossed.values() if link is not None]
        missing = [where for where, link in crossed.items() if link is None]
        if missing:
            raise ValueError(
                f"cluster: {missing[0]}, is not stated. Write what it is, as 10 GbE, or "
                "measure the cluster."
            )
        return tuple(dict.fromkeys(links))

    def only(self, positions: Collection[int]) -> "Cluster":
        """The cluster of the devices at ``positions``, without nodes that have none of them."""
        kept, nodes, start = sorted(set(positions)), list[Node](), 0
        for node, here in zip(self.nodes, self.positions_by_node, strict=True):
            stop = bisect_left(kept, here.stop, start)
            if stop - start == len(here):
                nodes.append(node)
            elif stop > start:
                devices = tuple(map(self.devices.__getitem__, kept[start:stop]))
                nodes.append(replace(node, devices=devices))
            start = stop
        return replace(self, nodes=tuple(nodes))

    def with_devices(self, devices: Iterable[DeviceSpec]) -> Self:
        """The cluster with other devices in the places of its own, in plan order."""
        each = iter(devices)
        nodes = (
            replace(node, devices=tuple(islice(each, len(node.devices)))) for node in self.nodes
        )
        return replace(self, nodes=tuple(nodes))

    @classmethod
    def from_document(cls, document: Any, *, source: str) -> Self:
        """Build a cluster from a parsed file; raises ``ValueError`` with file and field.

        Hand-written files can use a shorthand: a node with ``count: 4`` stands for four such
        nodes (host "a" becomes "a-0" to "a-3"), and the same holds for a device.
        """
        document = spelled_out(document, source)
        description = from_document(
            _Description,
            document,
            source=source,
            versions=range(cls.document_version, cls.document_version + 1),
        )
        described = {kind.kind: kind for kind in description.kinds}
        # A cluster that was measured and saved has an empty list.
        is_whole = isinstance(document, dict) and document.get("kinds") == []
        if not is_whole:
            described = {**built_in_kinds(), **described}
        named = _named(description, described, source=source)
        with _at(source):
            found = cls(**named.expanded(described))
        return found if is_whole else found._with_default_links()

    @classmethod
    def of_cards(cls, cards: str, *, network: str | None = None) -> Self:
        """The cluster of these cards: ``4090+A6000 | 3090x2`` has two in each of two hosts.

        Hosts may be named, as in ``tower: 4090 | old: 3090x2``.  ``network`` is the link
        between them, as ``10 GbE``.
        """
        with _at("cards"):
            document = cards_document(cards, network, built_in_kinds())
        found = cls.from_document(document, source="cards")
        if ":" in cards:
            return found
        return found.with_devices(replace(device, host=None) for device in found.devices)

    @classmethod
    def named(cls, name: str | Path) -> Self:
        """The cluster of a description's path, or of cards as in ``of_cards``."""
        is_path = isinstance(name, Path) or name.endswith(DESCRIPTIONS) or Path(name).is_file()
        return cls.load(name) if is_path else cls.of_cards(str(name))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote, or a shorter description in YAML.

        A description may name the kinds of ``kinds.csv``.  Its own ``kinds`` come first.
        """
        return cls.from_document(read_document(path), source=str(path))

    def _with_default_links(self) -> Self:
        inside, between = (Link(**link_named(name, key)) for key, name in DEFAULT_LINKS.items())
        nodes = (
            replace(node, link=node.link or inside) if len(node.devices) > 1 else node
            for node in self.nodes
        )
        joins = self.between_nodes or (between if len(self.nodes) > 1 else None)
        return replace(self, nodes=tuple(nodes), between_nodes=joins)


@dataclass(frozen=True, kw_only=True)
class _DescribedDevice(DeviceSpec):
    """One device, or ``count`` that are alike."""

    count: _Number = 1


@dataclass(frozen=True, kw_only=True)
class _DescribedNode(Node):
    """One node, or ``count`` that are alike."""

    devices: tuple[_DescribedDevice, ...]
    count: _Number = 1

    def expanded(self, described: dict[str, DeviceKind]) -> tuple[Node, ...]:
        """The nodes; capacities that are not stated are those of the described kinds."""
        hosts = (
            [self.host] if self.count == 1 else [f"{self.host}-{i}" for i in range(self.count)]
        )
        own = {each.name: getattr(self, each.name) for each in fields(Node)}

        def devices(host: str) -> tuple[DeviceSpec, ...]:
            alike = [(_device(each, host, described),) * each.count for each in self.devices]
            return tuple(chain.from_iterable(alike))

        return tuple(Node(**{**own, "host": host, "devices": devices(host)}) for host in hosts)


@dataclass(frozen=True, kw_only=True)
class _Description:
    """A cluster as people write it."""

    nodes: tuple[_DescribedNode, ...]
    kinds: Annotated[tuple[DeviceKind, ...], OMITTABLE] = ()
    between_nodes: Link | None = None
    between_regions: Link | None = None
    usable_memory_fraction: Annotated[float, OMITTABLE] = USABLE_MEMORY_FRACTION

    def expanded(self, described: dict[str, DeviceKind]) -> dict[str, Any]:
        """The fields of the ``Cluster``; kinds that no device is of are left out."""
        nodes = tuple(node for each in self.nodes for node in each.expanded(described))
        used = dict.fromkeys(device.kind for node in nodes for device in node.devices)
        kinds = tuple(described[kind] for kind in used if kind in described)
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**own, "nodes": nodes, "kinds": kinds}


def _named(
    description: _Description, described: dict[str, DeviceKind], *, source: str
) -> _Description:
    """The description with whole names of kinds.

    Refuses a device that neither states its memory nor is of a described kind, if any is.
    """
    nodes = []
    for i, node in enumerate(description.nodes):
        devices = list(node.devices)
        for j, device in enumerate(devices):
            if described and device.kind is not None and device.memory_capacity_bytes is None:
                with _at(f"{source}: nodes[{i}]: devices[{j}]"):
                    devices[j] = replace(device, kind=named_kind(device.kind, described))
        nodes.append(replace(node, devices=tuple(devices)))
    return replace(description, nodes=tuple(nodes))


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Context in which a ``ValueError`` begins with a place."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _device(
    stated: _DescribedDevice, host: str, described: dict[str, DeviceKind]
) -> DeviceSpec:
    capacity = stated.memory_capacity_bytes
    if capacity is None and stated.kind in described:
        capacity = described[stated.kind].memory_capacity_bytes
    return DeviceSpec(
        host=stated.host or host,
        kind=stated.kind,
        memory_capacity_bytes=capacity,
        uuid=stated.uuid,
    )


def _binary(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
