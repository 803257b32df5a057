"""Which arithmetic a card has, and what is said of seconds from specifications.

Seconds themselves are recorded (``tests.recorded_prices``).
"""

from dataclasses import replace

from shardhet.pricing.derive import derive_profile
from shardhet.pricing.efficiency import (
    SPREAD_FITTED,
    SPREAD_UNKNOWN,
    Arithmetic,
    arithmetic_of,
)
from shardhet.pricing.roofline import MEMORY_FRACTION
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node
from shardhet.records.kinds import DeviceKind
from shardhet.records.workload import Workload

KIND = DeviceKind(
    kind="made up",
    memory_capacity_bytes=2**30,
    memory_bandwidth_bytes_per_s=1e9 / MEMORY_FRACTION,
    peak_flops_per_s=(("float32", 1e9), ("float16", 1e10)),
    source="nowhere",
)
LINK = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e9)


def test_only_cards_with_units_for_16_bits_have_tensor_arithmetic() -> None:
    assert arithmetic_of(KIND, "float16") is Arithmetic.TENSOR
    assert arithmetic_of(KIND, "float32") is Arithmetic.PLAIN
    old = replace(KIND, peak_flops_per_s=(("float32", 1e9), ("float16", 1e9)))
    assert arithmetic_of(old, "float16") is Arithmetic.PLAIN
    least = replace(KIND, peak_flops_per_s=(("float32", 2e9), ("float16", 3e9)))
    assert arithmetic_of(least, "float16") is Arithmetic.TENSOR


def cluster(kind: str = KIND.kind) -> Cluster:
    device = DeviceSpec(kind=kind, memory_capacity_bytes=2**30)
    return Cluster(
        nodes=(Node(host="n", devices=(device, device), link=LINK),),
        kinds=(replace(KIND, kind=kind),),
    )


WORKLOAD = Workload.transformer(num_layers=2, width=64, num_heads=2, vocab_size=100, seq_len=16)


def test_the_note_says_how_far_the_times_were_off() -> None:
    assert derive_profile(cluster(), WORKLOAD).note == (
        f"derived: within a factor of {SPREAD_UNKNOWN:g} for nine of ten blocks, links at 0.37 "
        "of their bandwidth"
    )
    known = derive_profile(cluster("NVIDIA L4"), WORKLOAD)
    assert f"a factor of {SPREAD_FITTED:g} for nine" in known.note
    # The fit has not seen how long the host takes to launch kernels as short as these.
    short = derive_profile(Cluster.of_cards("H100 PCIe"), WORKLOAD)
    assert "blocks (not in microbatches of up to 16 samples, which take as" in short.note
    stated = derive_profile(cluster(), WORKLOAD, compute_fraction=0.5)
    assert stated.note == "derived: 0.50 of peak FLOP/s, links at 0.37 of their bandwidth"
