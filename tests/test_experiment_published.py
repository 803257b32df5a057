"""What experiments/published makes of published tables and of its own rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.common.results import read_csv, write_csv
from experiments.published.blocks import (
    BLOCK,
    KIND_BY_GPU,
    derived_over_published,
    with_published_blocks,
)
from experiments.published.forms import EVEN, FORMS, FULL, MEMORY_ONLY, Row, predict
from experiments.published.inputs import (
    DERIVED,
    PUBLISHED_CLUSTER,
    Case,
    described,
    inputs_of,
    on_fewer_nodes,
)
from experiments.published.summary import bars, by_case, gap, in_rounds
from shardhet.records.profiles import Source

HERE = Path(__file__).parent.parent / "experiments" / "published"
ENTRY = ([10.0, 1.0], [20.0, 2.0], [11.0, 21.0], [22.0, 42.0])  # milliseconds
CASE = Case(part=DERIVED, cluster="rtx4090_2x3090", model="llama_1b", global_batch_size=32)


def test_published_times_replace_those_of_the_block_alone() -> None:
    derived = described(PUBLISHED_CLUSTER, "model=llama_1b").setting.profile
    blocks = dict.fromkeys(KIND_BY_GPU, ENTRY)
    profile = with_published_blocks(derived, blocks)
    for device, before in zip(profile.devices, derived.devices, strict=True):
        assert device.source is Source.IMPORTED
        assert device.unit_by_kind[BLOCK].forward_s.at(2) == pytest.approx(0.021)
        assert device.unit_by_kind[BLOCK].backward_s.at(1) == pytest.approx(0.022)
        assert device.unit_by_kind["head"] == before.unit_by_kind["head"]
    assert profile.collectives == derived.collectives
    guess = derived.unit("NVIDIA L4", BLOCK)
    seconds = guess.forward_s.at(2) + guess.backward_s.at(2)
    assert derived_over_published(derived, blocks)["l4"] == pytest.approx(seconds / 0.063)


def test_an_entry_without_times_is_refused() -> None:
    derived = described(PUBLISHED_CLUSTER, "model=llama_1b").setting.profile
    with pytest.raises(ValueError, match="Leave this model out"):
        with_published_blocks(derived, dict.fromkeys(KIND_BY_GPU, ENTRY[:2]))


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return predict(CASE, inputs_of(CASE, HERE))


@pytest.mark.campaign  # of an experiment alone
def test_no_form_is_faster_than_the_full_plan(rows: list[Row], tmp_path: Path) -> None:
    assert [row.form for row in rows] == list(FORMS)
    assert all(bar.holds for bar in bars(rows))
    write_csv(tmp_path / "rows.csv", rows)
    assert read_csv(tmp_path / "rows.csv", Row) == rows
    assert predict(CASE, inputs_of(CASE, HERE)) == rows


def test_ratios_are_of_plans_that_fit(rows: list[Row]) -> None:
    refused = [
        replace(row, predicted_step_time_s=0.0, why_not="none") if row.form == EVEN else row
        for row in rows
    ]
    (case,) = by_case(refused)
    assert case.full_over(EVEN) is None
    assert case.full_over(MEMORY_ONLY) == pytest.approx(
        case.row(FULL).predicted_samples_per_s / case.row(MEMORY_ONLY).predicted_samples_per_s
    )
    assert gap(case.row(EVEN)) == 0
    assert case.cells[1] == "no"


def test_rounds_of_a_smaller_batch_are_told_where_they_are_faster(rows: list[Row]) -> None:
    slower = [replace(row, global_batch_size=64, predicted_samples_per_s=0.5) for row in rows]
    told = in_rounds(by_case([*rows, *slower]))
    assert told[2:5] == ["64", "0.5", "2 of 32"]
    assert not in_rounds(by_case(rows))


def test_nodes_are_left_out_by_type_and_the_dtype_follows() -> None:
    case = replace(CASE, cluster="a10g_v100_t4_64")
    found = dict(on_fewer_nodes(case))
    assert list(found) == ["g5", "p3", "g4dn", "g5 + p3", "g5 + g4dn", "p3 + g4dn"]
    assert found["g5"].setting.cluster.world_size == 16
    assert found["g5"].setting.workload.param_dtype == "bfloat16"
    assert found["p3"].setting.workload.param_dtype == "float32"
