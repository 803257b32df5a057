"""What replicas of the state take: memory of the nodes, and time of the steps.

With P seconds until every rank has copied its rows to host memory, W until they are written,
C until copies are on other nodes as well, and n steps of T seconds between two replicas:

    a step waits (P + max(0, W + C - n T)) / n    the next replica waits for the last one
    and loses C / n more at most                  if links have no room for copies

P and W are those of the rank that stores most, C that of the node that sends or receives
longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Link, Node
from shardhet.records.layout import stored_numels
from shardhet.records.nodes import Nodes, keepers
from shardhet.records.plan import Plan

NUM_VERSIONS = 2  # that a node holds: the last complete one, and the one on its way
# Of one rank: from its device to memory that it has not used before; digested and written.
COPY_BYTES_PER_S = 2e9
WRITE_BYTES_PER_S = 0.5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPrice:
    """What one replica of a plan takes."""

    bytes_by_node: tuple[int, ...]  # of all versions
    pause_s: float  # until every rank has copied its rows to host memory
    write_s: float  # until they are written, besides
    send_s: float | None  # until they are on another node, besides; None: links are not known

    @property
    def num_nodes(self) -> int:
        """The number of nodes; one node's replicas survive its processes only."""
        return len(self.bytes_by_node)

    def wait_s(self, step_s: float, every: int) -> float:
        """Seconds that a step loses on average, if links have room for copies."""
        late_s = self.write_s + (self.send_s or 0.0) - every * step_s
        return (self.pause_s + max(0.0, late_s)) / every

    def most_s(self, step_s: float, every: int) -> float:
        """The same if copies delay collectives by all their time."""
        return self.wait_s(step_s, every) + (self.send_s or 0.0) / every

    def least_every(self, step_s: float, fraction: float) -> int:
        """Steps between replicas with which steps lose at most ``fraction`` of their time."""
        paid_s = self.pause_s + (self.send_s or 0.0)
        all_s = paid_s + self.write_s + (self.send_s or 0.0)
        return max(
            1, ceil(paid_s / (fraction * step_s)), ceil(all_s / ((1 + fraction) * step_s))
        )


def replica_price(
    plan: Plan,
    setting: Setting,
    *,
    link_fraction: float = 1.0,
    write_bytes_per_s: float = WRITE_BYTES_PER_S,
) -> ReplicaPrice:
    """The price of one replica under ``plan``, if all nodes have the same room for them.

    ``link_fraction`` is what copies get of the bandwidth that the cluster states.
    """
    plan.refuse_stages("replica_price")
    members = setting.cluster.node_of
    nodes = Nodes.of([node.host for node in members])
    workload = setting.workload
    bytes_per_numel = workload.state_bytes_per_element - workload.grad_bytes_per_element
    numels = stored_numels(workload.layouts(), plan.state_shares)
    num_bytes = [int(numel * bytes_per_numel) for numel in numels]
    keeper_of = keepers(nodes, num_bytes, [1] * len(num_bytes))
    held = [0] * len(nodes)
    for i, keeper in enumerate(keeper_of):
        for position in {i} if keeper is None else {i, keeper}:
            held[nodes.node_by_position[position]] += NUM_VERSIONS * num_bytes[i]
    send_s = _send_s(setting, members, num_bytes, keeper_of)
    return ReplicaPrice(
        bytes_by_node=tuple(held),
        pause_s=max(num_bytes) / COPY_BYTES_PER_S,
        write_s=max(num_bytes) / write_bytes_per_s,
        send_s=None if send_s is None else send_s / link_fraction,
    )


def _send_s(
    setting: Setting,
    members: Sequence[Node],
    num_bytes: Sequence[int],
    keeper_of: Sequence[int | None],
) -> float | None:
    sent_s: dict[str, float] = {}
    received_s: dict[str, float] = {}
    for i, keeper in enumerate(keeper_of):
        if keeper is None:
            continue
        link = _link(setting, members[i], members[keeper])
        if link is None:
            return None
        seconds = num_bytes[i] / link.bandwidth_bytes_per_s
        here, there = members[i].host, members[keeper].host
        sent_s[here] = sent_s.get(here, 0.0) + seconds
        received_s[there] = received_s.get(there, 0.0) + seconds
    return max([0.0, *sent_s.values(), *received_s.values()])


def _link(setting: Setting, one: Node, other: Node) -> Link | None:
    is_far = one.region != other.region
    return setting.cluster.between_regions if is_far else setting.cluster.between_nodes
