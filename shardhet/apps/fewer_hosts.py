"""Predict whether a cluster is faster without some of its nodes.

A ring over all devices crosses the slowest link, and one kind of device without bfloat16 forces
all to float32, whatever the plan gives them to do.  So types of nodes and whole regions are
left out one after the other, starting with the one whose removal helps most, as long as the
step becomes shorter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardhet.config.planning import Inputs
from shardhet.planner import PlanError, solve
from shardhet.planner.search import Effort
from shardhet.records.cluster import Cluster, Node

LEAST_GAIN = 1.02  # smaller gains are within the error of derived times


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerHosts:
    """A part of the cluster on which the step is faster."""

    hosts: tuple[str, ...]  # patterns of those that stay
    left_out: tuple[str, ...]  # types of nodes, or regions
    step_time_s: float


def faster_on_fewer(
    inputs: Inputs,
    derived: Callable[[Cluster, str], Inputs],
    step_time_s: float,
    *,
    global_batch_size: int,
    effort: Effort,
) -> FewerHosts | None:
    """The fastest part of the cluster that was found; None if no part beats the whole.

    ``derived`` creates workload and profile for a cluster; ``step_time_s`` is the step time on
    all nodes.
    """
    best_s, left = step_time_s / LEAST_GAIN, inputs.setting.cluster
    left_out: tuple[str, ...] = ()
    while True:
        found = [
            (seconds, name, rest)
            for name, rest in _smaller(left)
            if (seconds := _seconds(derived(rest, inputs.name), global_batch_size, effort))
        ]
        fastest = min(found, key=lambda each: each[0], default=None)
        if fastest is None or fastest[0] >= best_s:
            break
        best_s, left, left_out = fastest[0], fastest[2], (*left_out, fastest[1])
    if not left_out:
        return None
    return FewerHosts(hosts=_patterns(left.nodes), left_out=left_out, step_time_s=best_s)


def _smaller(cluster: Cluster) -> list[tuple[str, Cluster]]:
    """The clusters without one type of node or one region each, with what is left out."""
    names: dict[str, set[str]] = {}
    for node in cluster.nodes:
        names.setdefault(node_type(node), set()).add(node.host)
        if node.region:
            names.setdefault(f"region {node.region}", set()).add(node.host)
    found = []
    for name, hosts in names.items():
        rest = tuple(node for node in cluster.nodes if node.host not in hosts)
        if rest:
            found.append((name, replace(cluster, nodes=rest)))
    return found


def _seconds(inputs: Inputs, global_batch_size: int, effort: Effort) -> float | None:
    """The step time of the best plan; None if no plan fits."""
    try:
        found = solve(
            inputs.setting, global_batch_size=global_batch_size, effort=effort, num_rescored=1
        )
    except PlanError:
        return None
    return found.predicted.step_time_s


def node_type(node: Node) -> str:
    """The name that counted nodes of a description share: "a" for "a-0" and "a-1"."""
    name, _, number = node.host.rpartition("-")
    return name if name and number.isdecimal() else node.host


def _patterns(nodes: Sequence[Node]) -> tuple[str, ...]:
    patterns = (
        node.host if node_type(node) == node.host else f"{node_type(node)}-*" for node in nodes
    )
    return tuple(dict.fromkeys(patterns))
