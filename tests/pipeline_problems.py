"""Drawn clusters of few devices, with a small model and a batch.

A seed draws the same in every process: kinds, hosts, regions, links, memory, batch and layers.
Those below ``FIRST_SLOW`` have one speed inside all hosts.
"""

import random
from dataclasses import dataclass
from itertools import pairwise

from shardhet.planner.stages.groups import Positions
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node, built_in_kinds
from shardhet.records.workload import Workload

CARDS = ("NVIDIA A100-SXM4-40GB", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 3090", "Tesla T4")
IN_HOST = 1.2e10  # bytes per second inside hosts
FIRST_SLOW = 2000  # from this seed on, links inside hosts are drawn too
IN_HOSTS = (1e9, 4e9, 1.2e10)
BANDWIDTHS = (5e7, 2e8, 1e9, 4e9)  # between hosts, and between regions
MEMORY_PARTS = (1.0, 1.0, 0.1, 0.05)  # of the cards'; with the last ones memory binds
BATCHES = (2, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A problem."""

    seed: int
    cluster: Cluster
    workload: Workload
    batch: int

    @property
    def scenario(self) -> Scenario:
        """With prices derived from specifications."""
        return self._derived(self.cluster)

    def part(self, positions: Positions) -> Scenario:
        """The scenario of the devices at some positions."""
        return self._derived(self.cluster.only(positions))

    def _derived(self, cluster: Cluster) -> Scenario:
        return Scenario(cluster, self.workload, derive_profile(cluster, self.workload))

    def __str__(self) -> str:
        return "; ".join(
            f"{node.region or 'here'}: " + ", ".join(str(e.kind) for e in node.devices)
            for node in self.cluster.nodes
        )


def drawn(seed: int, sizes: tuple[int, int] = (2, 6)) -> Instance:
    """The instance of that seed; ``sizes`` are the least and the most devices."""
    draw, known = random.Random(f"pipelines {seed}"), built_in_kinds()
    number = draw.randint(*sizes)
    cards = draw.sample(CARDS, draw.randint(1, min(len(CARDS), number)))
    kinds = [*cards, *draw.choices(cards, k=number - len(cards))]
    draw.shuffle(kinds)
    num_hosts = draw.randint(1, min(number, 4))
    ends = [0, *sorted(draw.sample(range(1, number), num_hosts - 1)), number]
    part = draw.choice(MEMORY_PARTS)
    has_regions = num_hosts > 1 and draw.random() < 0.3
    # Of its own, so that all else is drawn as before.
    draw_in = random.Random(f"links in hosts {seed}")
    nodes = []
    for i, (first, stop) in enumerate(pairwise(ends)):
        devices = tuple(
            DeviceSpec(
                host=f"host-{i}",
                kind=kind,
                memory_capacity_bytes=round(part * known[kind].memory_capacity_bytes),
            )
            for kind in sorted(kinds[first:stop])
        )
        region = f"region-{draw.randrange(2)}" if has_regions else ""
        in_host = draw_in.choice(IN_HOSTS) if seed >= FIRST_SLOW else IN_HOST
        link = Link(latency_s=1e-5, bandwidth_bytes_per_s=in_host)
        nodes.append(Node(host=f"host-{i}", link=link, devices=devices, region=region))
    between, far = (
        Link(latency_s=1e-4, bandwidth_bytes_per_s=draw.choice(BANDWIDTHS)) for _ in range(2)
    )
    cluster = Cluster(
        nodes=tuple(nodes),
        kinds=tuple(known[kind] for kind in dict.fromkeys(kinds)),
        between_nodes=between,
        between_regions=far if has_regions else None,
    )
    workload = Workload.transformer(
        num_layers=draw.randint(2, 3), width=1024, num_heads=8, vocab_size=8000, seq_len=512
    )
    return Instance(seed=seed, cluster=cluster, workload=workload, batch=draw.choice(BATCHES))
