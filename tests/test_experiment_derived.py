"""What experiments/derived fits and judges; the bars are checked where the tables are."""

import pytest

from experiments.common.results import read_csv
from experiments.derived.__main__ import HERE, Row
from experiments.derived.blocks import (
    KIND_BY_GPU,
    kinds_by_name,
    read_blocks,
)
from experiments.derived.checks import OWN, SHIPPED, covered, factor, judged, relatives
from experiments.derived.elsewhere import blocks as blocks_elsewhere
from experiments.derived.elsewhere import steps as steps_elsewhere
from experiments.derived.fit import fitted
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.efficiency import (
    FITTED,
    SPREAD_BY_POWER,
    SPREAD_FITTED,
    SPREAD_UNKNOWN,
    efficiency_of,
)
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node
from shardhet.records.plan import Plan
from shardhet.records.workload import Workload
from tests.test_profiles import NEEDS_SHARED_DATA, SHARED_DATA


def test_what_is_known_to_have_run_is_not_refused() -> None:
    """TinyLlama 1.1B, 8 samples of 2,048 tokens on each of 16 cards, nothing recomputed."""
    kind = kinds_by_name()["NVIDIA A100-SXM4-40GB"]
    device = DeviceSpec(kind=kind.kind, memory_capacity_bytes=kind.memory_capacity_bytes)
    link = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e10)
    node = Node(host="a", devices=(device,) * 16, link=link)
    cluster = Cluster(nodes=(node,), kinds=(kind,))
    workload = Workload.transformer(
        num_layers=22,
        width=2048,
        num_heads=32,
        num_kv_heads=4,
        hidden_width=5632,
        vocab_size=32000,
        seq_len=2048,
        param_dtype="bfloat16",
        fuses_norms=True,
    )
    plan = Plan.by_hand(
        microbatch_sizes=[8] * 16, state_shares=[1 / 16] * 16, devices=cluster.devices
    )
    scenario = Scenario(cluster, workload, derive_profile(cluster, workload))
    for rank in CostModel(scenario).predict(plan).ranks:
        assert 30 < rank.memory.total_bytes / 2**30 < 36
        assert rank.memory.total_bytes <= 1.05 * rank.memory_budget_bytes


def test_the_results_hold_what_a_plan_prints() -> None:
    rows = read_csv(HERE / "results.csv", Row)
    for values, spread in (
        ([row.model_left_out for row in rows], SPREAD_FITTED),
        ([row.kind_left_out for row in rows], SPREAD_BY_POWER),
        ([row.power_not_stated for row in rows], SPREAD_UNKNOWN),
    ):
        assert covered(values, spread) >= 0.9
    assert factor([row.model_left_out for row in rows], 0.5) <= 1.25
    assert factor([row.model_left_out for row in rows], 0.9) <= 1.6


@NEEDS_SHARED_DATA
def test_derived_times_are_near_published_ones() -> None:
    blocks = read_blocks(SHARED_DATA / "cephalo")
    assert len(blocks) == 228
    for check in (SHIPPED, OWN):
        rows = [row for row in judged(blocks, (SHIPPED, OWN)) if row.check == check]
        pairs = relatives(rows)
        assert factor([row.total for row in rows], 0.5) <= 1.25
        assert factor([row.total for row in rows], 0.9) <= 1.6
        assert factor([pair.ratio for pair in pairs], 0.5) <= 1.2


@NEEDS_SHARED_DATA
@pytest.mark.parametrize("group", [("Tesla T4", "float16"), ("NVIDIA L40S", "float32")])
def test_the_numbers_are_those_of_the_fit(group: tuple[str, str]) -> None:
    blocks = [each for each in read_blocks(SHARED_DATA / "cephalo") if each.group == group]
    row, shipped = fitted(blocks), FITTED[group[0]][group[1]]
    assert row.forward == pytest.approx(shipped.forward, abs=1e-3)
    assert row.backward == pytest.approx(shipped.backward, abs=1e-3)
    assert row.slowdown_per_s == pytest.approx(shipped.slowdown_per_s, abs=1e-3)


def test_every_gpu_of_the_tables_has_a_specification_and_a_row() -> None:
    for name in KIND_BY_GPU.values():
        kind = kinds_by_name()[name]
        assert kind.board_power_w
        assert any(efficiency_of(kind, dtype) is row for dtype, row in FITTED[name].items())


def test_what_was_timed_elsewhere_is_derived_as_near_as_is_said() -> None:
    """Blocks in small microbatches by the clock, and steps of FSDP on eight cards."""
    for block in blocks_elsewhere():
        assert 1 / SPREAD_BY_POWER < block.derived / block.printed < 1.05
        assert block.of_kernels < block.derived
    for step in steps_elsewhere():
        assert 0.8 < step.derived / step.printed < 1.2
