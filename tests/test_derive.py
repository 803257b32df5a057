"""Seconds from specifications: rooflines, efficiencies, rings; small numbers of their own."""

from dataclasses import replace
from math import log

import pytest

from shardhet.pricing.derive import (
    FRAMES,
    HOST_BYTES_PER_S,
    STRAGGLING,
    derive_profile,
    slowest_of,
    summing_in_float16,
)
from shardhet.pricing.efficiency import (
    FITTED,
    MOST,
    POWER_LAWS,
    SAME_CHIP,
    SPREAD_BY_POWER,
    SPREAD_FITTED,
    SPREAD_UNKNOWN,
    Arithmetic,
    arithmetic_of,
    efficiency_of,
)
from shardhet.pricing.roofline import (
    MEMORY_FRACTION,
)
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node
from shardhet.records.kinds import DeviceKind, built_in_kinds
from shardhet.records.workload import Workload

KIND = DeviceKind(
    kind="made up",
    memory_capacity_bytes=2**30,
    memory_bandwidth_bytes_per_s=1e9 / MEMORY_FRACTION,
    peak_flops_per_s=(("float32", 1e9), ("float16", 1e10)),
    source="nowhere",
)
LINK = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e9)


def test_efficiency_follows_from_the_kind_its_chip_or_its_power() -> None:
    assert (
        efficiency_of(replace(KIND, kind="Tesla T4"), "float16")
        is FITTED["Tesla T4"]["float16"]
    )
    with_bf16 = replace(
        KIND,
        kind="NVIDIA A100-SXM4-80GB",
        peak_flops_per_s=(("float32", 1e13), ("bfloat16", 1e14)),
    )
    row = FITTED["NVIDIA A100-SXM4-80GB"]["float16"]
    assert efficiency_of(with_bf16, "bfloat16") is row
    row = FITTED[SAME_CHIP["NVIDIA A100-SXM4-80GB"]]["float32"]
    assert efficiency_of(with_bf16, "float32") is row
    unknown = efficiency_of(KIND, "float32")
    assert unknown.spread == SPREAD_UNKNOWN > SPREAD_BY_POWER > SPREAD_FITTED
    scale, exponent = POWER_LAWS[Arithmetic.PLAIN].forward
    weak = efficiency_of(replace(KIND, board_power_w=2e-3), "float32")  # 2 W per TFLOP/s
    assert weak.forward == pytest.approx(scale * 2**exponent)
    assert weak.spread == SPREAD_BY_POWER
    assert efficiency_of(replace(KIND, board_power_w=9e3), "float32").forward == MOST


def test_only_cards_with_units_for_16_bits_have_tensor_arithmetic() -> None:
    assert arithmetic_of(KIND, "float16") is Arithmetic.TENSOR
    assert arithmetic_of(KIND, "float32") is Arithmetic.PLAIN
    old = replace(KIND, peak_flops_per_s=(("float32", 1e9), ("float16", 1e9)))
    assert arithmetic_of(old, "float16") is Arithmetic.PLAIN
    least = replace(KIND, peak_flops_per_s=(("float32", 2e9), ("float16", 3e9)))
    assert arithmetic_of(least, "float16") is Arithmetic.TENSOR


def cluster(*counts: int, regions: tuple[str, ...] = (), kind: str = KIND.kind) -> Cluster:
    device = DeviceSpec(kind=kind, memory_capacity_bytes=2**30)
    names = regions or ("",) * len(counts)
    return Cluster(
        nodes=tuple(
            Node(host=f"n{i}", devices=(device,) * count, link=LINK, region=names[i])
            for i, count in enumerate(counts)
        ),
        kinds=(replace(KIND, kind=kind),),
        between_nodes=replace(LINK, latency_s=1e-2),
        between_regions=replace(LINK, latency_s=1.0),
    )


WORKLOAD = Workload.transformer(num_layers=2, width=64, num_heads=2, vocab_size=100, seq_len=16)


@pytest.mark.parametrize(
    ("gbit_per_s", "part"), [(1, 0.92), (10, 0.74), (25, 0.57), (100, 0.37)]
)
def test_a_slow_cable_is_nearly_filled(gbit_per_s: float, part: float) -> None:
    """Others measured rings that nearly fill 1 Gbit/s (experiments/pipelines/printed)."""
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=gbit_per_s / 8 * 1e9)
    joined = replace(cluster(1, 1), between_nodes=link)
    collectives = derive_profile(joined, WORKLOAD).collectives
    assert collectives.gather_s is not None
    reached = 2**24 / 2 / collectives.gather_s.at(2**24)
    assert reached / link.bandwidth_bytes_per_s == pytest.approx(part, rel=0.01)


def test_a_unit_takes_as_long_as_on_the_slowest_device() -> None:
    assert slowest_of(1) == 1.0
    assert slowest_of(128) / slowest_of(8) == pytest.approx(5762 / 5605, rel=0.01)
    alone, many = (
        derive_profile(cluster(number), WORKLOAD).unit(KIND.kind, "block").forward_s.at(16)
        for number in (1, 100)
    )
    assert many / alone == pytest.approx(1 + STRAGGLING * (2 * log(100)) ** 0.5)


def test_the_note_says_how_far_the_times_were_off() -> None:
    assert derive_profile(cluster(2), WORKLOAD).note == (
        f"derived: within a factor of {SPREAD_UNKNOWN:g} for nine of ten blocks, links at 0.37 "
        "of their bandwidth"
    )
    known = derive_profile(cluster(2, kind="NVIDIA L4"), WORKLOAD)
    assert f"a factor of {SPREAD_FITTED:g} for nine" in known.note
    # The fit has not seen how long the host takes to launch kernels as short as these.
    short = derive_profile(Cluster.of_cards("H100 PCIe"), WORKLOAD)
    assert "blocks (not in microbatches of up to 16 samples, which take as" in short.note
    stated = derive_profile(cluster(2), WORKLOAD, compute_fraction=0.5)
    assert stated.note == "derived: 0.50 of peak FLOP/s, links at 0.37 of their bandwidth"


def test_sums_in_float16_double_the_peak_of_kinds_that_list_it() -> None:
    kind = built_in_kinds()["NVIDIA GeForce RTX 3090"]
    fast = summing_in_float16(kind)
    assert fast.peak("float16") == 2 * kind.peak("float16")
    assert fast.peak("bfloat16") == kind.peak("bfloat16")
    assert summing_in_float16(KIND) == KIND
    large = Workload.transformer(
        num_layers=1,
        width=4096,
        num_heads=32,
        vocab_size=99,
        seq_len=512,
        param_dtype="float16",
    )
    described = replace(cluster(1, kind=kind.kind), kinds=(kind,))
    slow_s, fast_s = [
        derive_profile(described, large, fp16_accumulation=sums)
        .unit(kind.kind, "block")
        .forward_s.at(8)
        for sums in (False, True)
    ]
    assert 1.3 < slow_s / fast_s < 2


def test_cards_of_two_makers_send_each_row_to_each_device_over_the_cable() -> None:
    """By messages over gloo, in one level, and within a host through its memory."""

    def seconds_per_byte(cards: str) -> float:
        cluster = Cluster.of_cards(cards, network="1 GbE")
        profile = derive_profile(
            cluster,
            Workload.transformer(
                num_layers=1, width=64, num_heads=1, seq_len=8, vocab_size=100
            ),
        )
        assert (profile.two_levels is None) == ("XTX" in cards)
        first, *_, last = profile.collectives.points
        taken_s = last.gather.median_s - first.gather.median_s
        return taken_s / (last.nbytes - first.nbytes)

    cable = 1 / (1 / FRAMES + 125e6 / HOST_BYTES_PER_S) * 125e6
    of_two = 2 * (2 / cable + 1 / HOST_BYTES_PER_S) / 4
    assert seconds_per_byte("7900 XTXx2 | 3090x2") == pytest.approx(of_two)
    assert seconds_per_byte("3090 Ti x2 | 3090x2") == pytest.approx(3 / 4 / cable)
    in_one_host = 4 * 3 / 4 / HOST_BYTES_PER_S
    assert seconds_per_byte("7900 XTXx2 + 3090x2") == pytest.approx(in_one_host)
