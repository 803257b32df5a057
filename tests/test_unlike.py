"""What experiments share about unlike processes."""

import resource

import pytest
import torch

from experiments.common.unlike import MIB, MixedCluster, slowness_of
from shardhet.training.emulation import EmulatedDevice
from shardhet.training.peak_memory import memory_of_process
from tests.worlds import on_ranks

CLUSTER = MixedCluster(name="two", cores=(1.0, 0.5), memory_mib=(256, 128))


def test_ranks_of_equal_quota_are_of_one_kind() -> None:
    cluster = MixedCluster(name="three", cores=(0.5, 0.25, 0.25))
    kinds = [cluster.device_spec(rank).kind for rank in range(cluster.world_size)]
    assert kinds[0] != kinds[1] == kinds[2]
    assert cluster.slowest_rank == 1
    assert not cluster.is_capped


def test_without_control_groups_processes_are_emulated() -> None:
    with slowness_of(CLUSTER, has_groups=False) as slownesses:
        assert [each.device for each in slownesses] == [
            EmulatedDevice(speed=1.0, memory_bytes=256 * MIB),
            EmulatedDevice(speed=0.5, memory_bytes=128 * MIB),
        ]
        with slownesses[1].applied():
            pass


@on_ranks(1, fresh_world=True)
def test_a_cap_counts_from_a_level_in_the_past(rank: int) -> None:
    with slowness_of(CLUSTER, has_groups=False) as slownesses:
        level_bytes = memory_of_process("VmData")
        built = torch.ones(100 * MIB, dtype=torch.uint8)
        slownesses[1].cap_memory(level_bytes)
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == level_bytes + 128 * MIB
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.ones(100 * MIB, dtype=torch.uint8)
        assert built[-1] == 1
