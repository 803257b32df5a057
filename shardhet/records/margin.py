"""What plans leave free of the memory of a device, and what takes it.

A predicted peak holds tensors, and what a process holds besides them: measured once NCCL is
connected, or, in derived profiles, the context of CUDA alone.  The margin is for the rest: a
tenth of a device, or more where NCCL's buffers and workspaces take so much that less than
``LEAST_FRAGMENTATION`` would remain for fragmentation.
"""

from dataclasses import replace

from shardhet.records.cluster import Cluster, Node

MIB = 2**20
# A communicator of four A100, with NVLink of 300 GB/s one way, takes 688 MB (NVIDIA/nccl, issue
# 964).  It is linear in the number of channels, and that follows the bandwidth (issue 986).
NCCL_BYTES_PER_BYTES_PER_S = 688 * MIB / 300e9
# Two channels, with two connections of 10 MiB each (the size of a buffer in issue 1685).
LEAST_NCCL_BYTES = 40 * MIB
# cuBLAS and cuBLASLt have 32 MiB each on Hopper, and less elsewhere (pytorch, pull 120925).
WORKSPACE_BYTES = 64 * MIB
ALL_RANKS = 2  # for gathers and for reductions
COMPUTING_RANKS = 2  # the same, where others only store
WITHIN_NODES = 2  # for collectives in two levels
OF_STAGES = 6  # gathers and reductions of a stage; both ways to the stages beside it


def with_libraries(cluster: Cluster, *, has_stages: bool = False) -> Cluster:
    """The cluster with what libraries take of each device at most, under any plan."""
    nodes = [
        replace(node, library_bytes=WORKSPACE_BYTES + _nccl_bytes(cluster, node, has_stages))
        for node in cluster.nodes
    ]
    return replace(cluster, nodes=tuple(nodes))


def with_fraction(cluster: Cluster, fraction: float) -> Cluster:
    """The cluster of which plans may use this part, whatever libraries take."""
    nodes = tuple(replace(node, library_bytes=None) for node in cluster.nodes)
    return replace(cluster, nodes=nodes, usable_memory_fraction=fraction)


def _nccl_bytes(cluster: Cluster, node: Node, has_stages: bool) -> int:
    if cluster.world_size == 1:
        return 0
    slowest = min(link.bandwidth_bytes_per_s for link in cluster.links)
    number = ALL_RANKS + COMPUTING_RANKS + OF_STAGES * has_stages
    total = number * _bytes_of_communicator(slowest)
    if len(cluster.nodes) > 1 and len(node.devices) > 1:
        assert node.link is not None  # it is one of ``links``
        total += WITHIN_NODES * _bytes_of_communicator(node.link.bandwidth_bytes_per_s)
    return total


def _bytes_of_communicator(bandwidth_bytes_per_s: float) -> int:
    return max(LEAST_NCCL_BYTES, int(NCCL_BYTES_PER_BYTES_PER_S * bandwidth_bytes_per_s))
