"""How a profile is read, interpolated and continued, and how far the published one misleads."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardhet.records.profiles import (
    Collectives,
    ComputePoint,
    Curve,
    DeviceProfile,
    Profile,
    Source,
    Timing,
    UnitProfile,
)

ROOT = Path(__file__).parent.parent
SHARED_DATA = Path(os.environ.get("SHARDHET_SHARED_DATA", ROOT.parent / "shared" / "data"))
NEEDS_SHARED_DATA = pytest.mark.skipif(
    not SHARED_DATA.exists(), reason=f"published profiles are not at {SHARED_DATA}"
)


def by_hand(device_kind: str, *units: tuple[float, float, int | None]) -> DeviceProfile:
    """A device's forward seconds, backward seconds and peak bytes by microbatch size."""
    points = tuple(
        ComputePoint(
            microbatch_size=i,
            forward=Timing.single(forward_s),
            backward=Timing.single(backward_s),
            peak_bytes=peak_bytes,
        )
        for i, (forward_s, backward_s, peak_bytes) in enumerate(units, 1)
    )
    return DeviceProfile(
        device_kind=device_kind,
        source=Source.IMPORTED,
        units=(UnitProfile(unit_kind="block", points=points),),
        overlap_slowdown=0.0,
        note="by hand",
    )


SMALL = Profile(
    devices=(
        by_hand("fast", (0.1, 0.2, 10), (0.2, 0.4, 20), (0.3, 0.6, 30)),
        by_hand("slow", (1.0, 2.0, 10)),
    ),
    collectives=Collectives(source=Source.IMPORTED, points=(), note="by hand"),
    note="by hand",
)


def test_a_profile_is_read_as_it_was_written() -> None:
    measured = replace(SMALL, unit_overhead_s=1e-4)
    assert Profile.from_json(measured.to_json()) == measured
    again = Profile.from_json(SMALL.to_json())
    assert again == SMALL
    assert again.devices[0].source is Source.IMPORTED
    assert again.collectives.source is Source.IMPORTED


def test_a_missing_device_or_unit_is_named_beside_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'slower'.*fast, slow"):
        SMALL.unit("slower", "block")
    with pytest.raises(ValueError, match=r"'head'.*block"):
        SMALL.unit("fast", "head")


@pytest.mark.parametrize(
    "path, value, words",
    [
        (("version",), 7, "version 7"),
        (("devices", 0, "overlap_slowdown"), -0.5, "overlap_slowdown"),
        (("devices", 0, "overlap_slowdown"), float("nan"), "overlap_slowdown"),
        (("devices",), [], "0 device kinds"),
        (("devices", 0, "source"), "guessed", "source"),
        (("devices", 0, "units", 0, "points"), [], "microbatch sizes"),
        (("devices", 0, "units", 0, "points", 1, "microbatch_size"), 0, "microbatch_size"),
        (("devices", 0, "units", 0, "points", 1, "forward", "median_s"), -1, "median_s"),
        (("devices", 0, "units", 0, "points", 1, "forward", "median_s"), 9, "p10"),
        (("devices", 0, "units", 0, "points", 1, "forward", "mean_s"), -1, "mean_s"),
        (("collectives", "gather_unevenness_weight"), 2, "gather_unevenness_weight"),
        (("collectives", "speed"), 2, "speed"),
    ],
)
def test_a_spoiled_profile_is_refused_by_field(
    path: tuple[str | int, ...], value: object, words: str
) -> None:
    document = json.loads(SMALL.to_json())
    entry = document
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value
    with pytest.raises(ValueError, match=words) as raised:
        Profile.from_document(document, source="p.json")
    assert str(raised.value).startswith("p.json")


def test_percentiles_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="p90"):
        Timing(mean_s=1.0, median_s=1.0, p10_s=0.5, p90_s=0.9, num_samples=3)


@NEEDS_SHARED_DATA
def test_small_sizes_predict_the_largest_of_every_published_curve() -> None:
    table = json.loads((SHARED_DATA / "cephalo" / "model_latencies.json").read_text())
    curves = [
        values
        for by_device in table.values()
        for by_length in by_device.values()
        for by_dtype in by_length.values()
        for entry in by_dtype.values()
        if isinstance(entry, list) and len(entry) == 4
        for values in entry[2:]
        if len(values) > 5
    ]
    errors = sorted(
        abs(Curve((1.0, 2.0, 3.0, 4.0, 5.0), tuple(v[:5])).at(len(v)) / v[-1] - 1)
        for v in curves
    )
    assert len(errors) > 400
    assert errors[len(errors) // 2] <= 0.04
    assert errors[int(0.9 * len(errors))] <= 0.15
