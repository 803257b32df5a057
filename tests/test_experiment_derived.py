"""What experiments/derived fits and judges; the bars are checked where the tables are."""

from dataclasses import replace

import pytest

from experiments.common.results import read_csv
from experiments.derived.__main__ import HERE, Row
from experiments.derived.blocks import (
    GPT,
    IMAGE_TOKENS,
    KIND_BY_GPU,
    SHAPES,
    Timed,
    kinds_by_name,
    read_blocks,
    unit_of,
)
from experiments.derived.checks import OWN, SHIPPED, covered, factor, judged, relatives
from experiments.derived.elsewhere import blocks as blocks_elsewhere
from experiments.derived.elsewhere import steps as steps_elsewhere
from experiments.derived.fit import (
    USUAL_SLOWDOWN,
    fitted,
    middle,
    power_law,
    watts_per_tflop_per_s,
)
from experiments.derived.memory import demands
from shardhet.pricing.efficiency import (
    FITTED,
    SPREAD_BY_POWER,
    SPREAD_FITTED,
    SPREAD_UNKNOWN,
    Efficiency,
    efficiency_of,
)
from shardhet.pricing.roofline import Roofline
from tests.selection import one_in
from tests.test_profiles import NEEDS_SHARED_DATA, SHARED_DATA

TRUE = Efficiency(forward=0.7, backward=0.5, slowdown_per_s=USUAL_SLOWDOWN)
SIZES = (1, 2, 3, 8, 12)


def block_of(model: str, gpu: str = "t4", dtype: str = "float16", faster: float = 1.0) -> Timed:
    """A block with the times that the roofline gives a device of known efficiency."""
    empty = Timed(model=model, gpu=gpu, seq_len=512, dtype=dtype, seconds_by_size={})
    roofline = Roofline.of(kinds_by_name()[KIND_BY_GPU[gpu]], dtype)
    return replace(
        empty,
        seconds_by_size={
            size: (
                roofline.forward_s(empty.unit, size, TRUE) / faster,
                roofline.backward_s(empty.unit, size, TRUE) / faster,
            )
            for size in SIZES
        },
    )


def test_a_fit_finds_the_efficiency_that_made_the_times() -> None:
    found = fitted([block_of("llama_33b"), block_of("llama_tiny"), block_of("gpt_2.7b")])
    assert found.forward == pytest.approx(TRUE.forward, rel=0.03)
    assert found.backward == pytest.approx(TRUE.backward, rel=0.03)
    assert found.slowdown_per_s == pytest.approx(TRUE.slowdown_per_s, rel=0.2)


def test_the_line_of_power_goes_through_kinds_on_it() -> None:
    groups = [("Tesla T4", "float16"), ("NVIDIA A10G", "float16"), ("NVIDIA L4", "float16")]
    on_line = {
        group: Efficiency(
            forward=0.5 * watts_per_tflop_per_s(group) ** 0.2,
            backward=0.4 * watts_per_tflop_per_s(group) ** 0.3,
        )
        for group in groups
    }
    law = power_law(on_line)
    assert law.forward == pytest.approx((0.5, 0.2))
    assert law.backward == pytest.approx((0.4, 0.3))
    assert middle(on_line).forward == pytest.approx(
        sorted(on_line.values(), key=_of)[1].forward
    )


def _of(efficiency: Efficiency) -> float:
    return efficiency.forward


def test_blocks_hold_the_parameters_and_the_kernels_of_their_source() -> None:
    gpt = SHAPES["gpt_2.7b"]
    unit = unit_of(gpt, num_tokens=512, dtype="float32", keeps_scores=True)
    assert gpt.family == GPT
    assert unit.numel == 12 * 2560**2
    fused = unit_of(gpt, num_tokens=512, dtype="float32", keeps_scores=False)
    scores = 80 * 512**2 * 4  # bytes; ten passes in forward and twelve in backward
    moved = 2 * (unit.activation_bytes - fused.activation_bytes)
    assert 3 * moved == pytest.approx((10 + 12) * scores, rel=1e-6)
    assert not block_of("llama_7b", "t4").keeps_scores
    assert block_of("llama_7b", "p40").keeps_scores
    assert block_of("vit_g").num_tokens == IMAGE_TOKENS


def test_factors_and_order_of_kinds() -> None:
    assert factor([0.5, 1.0, 2.0, 1.0], 1.0) == pytest.approx(2.0)
    assert covered([0.5, 1.0, 1.2], 1.3) == pytest.approx(2 / 3)
    right = [block_of("llama_7b", gpu) for gpu in ("t4", "a10g")]
    rows = [row for row in judged(right, (SHIPPED, OWN)) if row.check == SHIPPED]
    assert not any(pair.is_reversed for pair in relatives(rows))
    slow = [right[0], block_of("llama_7b", "a10g", faster=0.01)]
    rows = [row for row in judged(slow, (SHIPPED, OWN)) if row.check == SHIPPED]
    assert all(pair.is_reversed for pair in relatives(rows))


def test_what_is_known_to_have_run_is_not_refused() -> None:
    found = {(need.configuration.split(",")[0], need.device): need for need in demands([])}
    tiny = found["TinyLlama 1.1B", "NVIDIA A100-SXM4-40GB"]
    assert not tiny.recomputes
    assert 30 < tiny.needs_gib < 36
    assert all(need.part <= 1.05 for need in found.values())


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
    assert max(need.part for need in demands(blocks)) <= 1.05


@NEEDS_SHARED_DATA
@pytest.mark.parametrize("group", [("Tesla T4", "float16"), ("NVIDIA L40S", "float32")])
def test_the_numbers_are_those_of_the_fit(group: tuple[str, str]) -> None:
    blocks = [each for each in read_blocks(SHARED_DATA / "cephalo") if each.group == group]
    row, shipped = fitted(blocks), FITTED[group[0]][group[1]]
    assert row.forward == pytest.approx(shipped.forward, abs=1e-3)
    assert row.backward == pytest.approx(shipped.backward, abs=1e-3)
    assert row.slowdown_per_s == pytest.approx(shipped.slowdown_per_s, abs=1e-3)


@pytest.mark.campaign  # of an experiment alone
@NEEDS_SHARED_DATA
@pytest.mark.parametrize("model", one_in(2, ["deepspeedllama_3b", "deepspeedgpt_2.7b"]))
def test_a_model_that_is_left_out_is_predicted(model: str) -> None:
    blocks = read_blocks(SHARED_DATA / "cephalo")
    ratios = []
    for block in (each for each in blocks if each.model == model):
        rest = [each for each in blocks if each.group == block.group and each.model != model]
        efficiency = fitted(rest)
        roofline = Roofline.of(kinds_by_name()[block.group[0]], block.dtype)
        for size, published in block.seconds_by_size.items():
            forward_s = roofline.forward_s(block.unit, size, efficiency)
            backward_s = roofline.backward_s(block.unit, size, efficiency)
            ratios.append((forward_s + backward_s) / sum(published))
    assert factor(ratios, 0.5) <= 1.25
    assert factor(ratios, 0.9) <= 1.6


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
