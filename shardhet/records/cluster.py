"""What hardware there is: one record per device, and the nodes and links between them."""

import json
import sys
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from shardhet.records.fields import Fields, parse_json, read_document

CLUSTER_VERSION = 1
MAX_COUNT = 100_000  # nodes or devices in one entry of a description
USABLE_MEMORY_FRACTION = 0.9  # of the capacity; the rest is the allocator's slack
MEMORY_TOLERANCE = 0.02  # drivers of different versions reserve different amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What is known about one device; ``None`` means "not stated" and matches anything."""

    host: str | None = None  # name of the node
    kind: str | None = None  # "NVIDIA A100-SXM4-80GB", as the driver spells it
    memory_capacity_bytes: int | None = None
    uuid: str | None = None  # identifies one physical card

    def accepts(self, found: "DeviceSpec") -> bool:
        """Whether the device ``found`` matches the description ``self``."""
        wanted_bytes = self.memory_capacity_bytes or 0
        return (
            self.host in (None, found.host)
            and self.kind in (None, found.kind)
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

    def to_dict(self) -> dict[str, Any]:
        """The stated fields only, ready for JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, stated: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``; raises ``ValueError`` naming the key that is wrong."""
        types = {"host": str, "kind": str, "memory_capacity_bytes": int, "uuid": str}
        for key, value in stated.items():
            if key not in types:
                raise ValueError(
                    f"device: unknown key {key!r}; known keys are {', '.join(types)}."
                )
            if value is not None and type(value) is not types[key]:
                raise ValueError(
                    f"device: {key} is {value!r} but must be {types[key].__name__}."
                )
        if (stated.get("memory_capacity_bytes") or 0) < 0:
            raise ValueError(
                f"device: memory_capacity_bytes is {stated['memory_capacity_bytes']} but must "
                f"be at least 0."
            )
        return cls(**stated)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """The specification of one kind of device, and the source of its figures."""

    kind: str
    memory_capacity_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: tuple[tuple[str, float], ...]  # by dtype
    source: str

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in ``dtype``; raises ``ValueError`` if the device does not support it."""
        peaks = dict(self.peak_flops_per_s)
        if not peaks.get(dtype):
            has = ", ".join(name for name, flops in peaks.items() if flops)
            raise ValueError(
                f"cluster: device kind {self.kind!r} has no peak_flops_per_s for {dtype}; it "
                f"has {has}. Plan in one of these, or leave the device out."
            )
        return peaks[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two devices, nodes or regions, in one direction."""

    latency_s: float
    bandwidth_bytes_per_s: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One host: its devices and the link between them."""

    host: str
    devices: tuple[DeviceSpec, ...]
    link: Link | None = None  # between its devices
    region: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All devices and links, in plan order."""

    nodes: tuple[Node, ...]
    kinds: tuple[DeviceKind, ...] = ()  # specifications; not needed if everything is measured
    between_nodes: Link | None = None
    between_regions: Link | None = None
    usable_memory_fraction: float = USABLE_MEMORY_FRACTION

    def __post_init__(self) -> None:
        hosts = [node.host for node in self.nodes]
        repeated = sorted({host for host in hosts if hosts.count(host) > 1})
        if repeated:
            raise ValueError(f"cluster: hosts {repeated} appear twice. Name each once.")
        if not self.devices:
            raise ValueError("cluster: it has no devices. Give at least one node a device.")
        if not 0 < self.usable_memory_fraction <= 1:
            raise ValueError(
                f"cluster: usable_memory_fraction is {self.usable_memory_fraction} but must be "
                "above 0 and at most 1."
            )

    @cached_property
    def devices(self) -> tuple[DeviceSpec, ...]:
        """All devices in plan order."""
        return tuple(device for node in self.nodes for device in node.devices)

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
        return int(device.memory_capacity_bytes * self.usable_memory_fraction)

    def kind(self, name: str | None) -> DeviceKind:
        """The specification of a kind; raises ``ValueError`` listing the known kinds."""
        for kind in self.kinds:
            if kind.kind == name:
                return kind
        raise ValueError(
            f"cluster: device kind {name!r} is not described; there are "
            f"{[kind.kind for kind in self.kinds]}. Describe it in kinds, or measure it."
        )

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The distinct links that a collective over all devices crosses."""
        links = [node.link for node in self.nodes if len(node.devices) > 1]
        links += [self.between_nodes] if len(self.nodes) > 1 else []
        if len({node.region for node in self.nodes}) > 1:
            links += [self.between_regions]
        if None in links:
            raise ValueError(
                "cluster: a link is not stated between the devices of a node, between nodes or "
                "between regions. State it, or measure collectives."
            )
        return tuple(dict.fromkeys(link for link in links if link is not None))

    def to_json(self) -> str:
        """The cluster as versioned JSON text."""
        document = {"version": CLUSTER_VERSION, **_stated(asdict(self))}
        for kind in document["kinds"]:
            kind["peak_flops_per_s"] = dict(kind["peak_flops_per_s"])
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "cluster") -> Self:
        """The inverse of ``to_json``; error messages name ``source`` as the file."""
        return cls.from_document(parse_json(text, source=source), source=source)

    @classmethod
    def from_document(cls, document: Any, *, source: str) -> Self:
        """Build a cluster from a parsed file; raises ``ValueError`` with file and field.

        Hand-written files can use a shorthand: a node with ``count: 4`` stands for four such
        nodes (host "a" becomes "a-0" to "a-3"), and the same holds for a device.
        """
        kinds = Fields(document, source)
        described = {}
        if kinds.has("kinds"):
            described = {
                kind.kind: kind for kind in map(_kind_from, kinds.take_objects("kinds"))
            }
        return cls._from_document(document, source=source, described=described)

    @classmethod
    def _from_document(
        cls, document: Any, *, source: str, described: dict[str, DeviceKind]
    ) -> Self:
        fields = Fields(document, source)
        fields.take_version(CLUSTER_VERSION)
        fields.has("kinds")  # taken by the caller
        capacities = {name: kind.memory_capacity_bytes for name, kind in described.items()}
        nodes = []
        for entry in fields.take_objects("nodes"):
            nodes += _nodes(entry, capacities)
        between_nodes = _optional_link(fields, "between_nodes")
        between_regions = _optional_link(fields, "between_regions")
        usable = USABLE_MEMORY_FRACTION
        if fields.has("usable_memory_fraction"):
            usable = fields.take_number("usable_memory_fraction", above=0.0, maximum=1.0)
        fields.refuse_unknown()
        used = dict.fromkeys(device.kind for node in nodes for device in node.devices)
        try:
            return cls(
                nodes=tuple(nodes),
                kinds=tuple(described[kind] for kind in used if kind in described),
                between_nodes=between_nodes,
                between_regions=between_regions,
                usable_memory_fraction=usable,
            )
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(self.to_json(), encoding="ascii")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote, or a shorter description in YAML.

        In a YAML description, ``kinds`` may name another file, relative to this one, that
        lists kinds for several clusters; only the kinds that this cluster uses are read.
        """
        return cls.from_description(
            read_document(path), source=str(path), folder=Path(path).parent
        )

    @classmethod
    def from_description(cls, document: Any, *, source: str, folder: Path) -> Self:
        """Build a cluster from a parsed description; ``folder`` holds the files it names."""
        if isinstance(document, dict) and isinstance(document.get("kinds"), str):
            listed = folder / document["kinds"]
            if not listed.is_file():
                raise ValueError(
                    f"{source}: kinds names {listed}, which is no file. Fix the path."
                )
            kinds = Fields({"kinds": read_document(listed)}, str(listed)).take_objects("kinds")
            described = {kind.kind: kind for kind in map(_kind_from, kinds)}
            document = {**document, "kinds": []}
            return cls._from_document(document, source=source, described=described)
        return cls.from_document(document, source=source)


def _binary(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _stated(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stated(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_stated(each) for each in value]
    return value


def _kind_from(fields: Fields) -> DeviceKind:
    peaks = fields.take_object("peak_flops_per_s")
    kind = DeviceKind(
        kind=fields.take("kind", str),
        memory_capacity_bytes=fields.take_int("memory_capacity_bytes", minimum=1),
        memory_bandwidth_bytes_per_s=fields.take_number(
            "memory_bandwidth_bytes_per_s", above=0
        ),
        peak_flops_per_s=tuple((dtype, peaks.take_number(dtype)) for dtype in peaks.names),
        source=fields.take("source", str),
    )
    fields.refuse_unknown()
    return kind


def _link_from(fields: Fields) -> Link:
    link = Link(
        latency_s=fields.take_number("latency_s"),
        bandwidth_bytes_per_s=fields.take_number("bandwidth_bytes_per_s", above=0),
        source=fields.take("source", str) if fields.has("source") else "",
    )
    fields.refuse_unknown()
    return link


def _optional_link(fields: Fields, key: str) -> Link | None:
    return _link_from(fields.take_object(key)) if fields.has(key) else None


def _nodes(fields: Fields, capacities: dict[str, int]) -> list[Node]:
    """The node or nodes that an entry describes."""
    host = fields.take("host", str)
    count = fields.take_int("count", minimum=1, maximum=MAX_COUNT) if fields.has("count") else 1
    link = _optional_link(fields, "link")
    region = fields.take("region", str) if fields.has("region") else ""
    entries = [(dict(entry), i) for i, entry in enumerate(fields.take_tuple("devices", dict))]
    fields.refuse_unknown()
    hosts = [host] if count == 1 else [f"{host}-{i}" for i in range(count)]
    nodes = []
    for name in hosts:
        devices = []
        for entry, i in entries:
            where = f"{fields.where}: devices[{i}]"
            stated = {"host": name, **entry}
            number = stated.pop("count", 1)
            if type(number) is not int or not 1 <= number <= MAX_COUNT:
                raise ValueError(
                    f"{where}: count is {number!r} but must be from 1 to {MAX_COUNT}."
                )
            capacity = stated.get("memory_capacity_bytes")
            if isinstance(capacity, int) and capacity > sys.maxsize:
                raise ValueError(f"{where}: memory_capacity_bytes is larger than any memory.")
            if isinstance(stated.get("kind"), str) and stated["kind"] in capacities:
                stated.setdefault("memory_capacity_bytes", capacities[stated["kind"]])
            try:
                devices += [DeviceSpec.from_dict(stated)] * number
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        nodes.append(Node(host=name, devices=tuple(devices), link=link, region=region))
    return nodes
