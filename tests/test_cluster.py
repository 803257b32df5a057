"""Which found device may play which planned one, and how a device is written down."""

from typing import Any

import pytest

from shardhet.records.cluster import MEMORY_TOLERANCE, DeviceSpec
from shardhet.records.codec import from_document, to_document

GIB = 2**30
FOUND = DeviceSpec(host="node3", kind="NVIDIA T4", memory_capacity_bytes=15 * GIB, uuid="GPU-1")


@pytest.mark.parametrize(
    "planned",
    [
        DeviceSpec(),
        DeviceSpec(host="node3"),
        DeviceSpec(kind="NVIDIA T4"),
        DeviceSpec(uuid="GPU-1"),
        DeviceSpec(memory_capacity_bytes=15 * GIB),
        DeviceSpec(memory_capacity_bytes=8 * GIB),
        DeviceSpec(memory_capacity_bytes=int(15 * GIB * (1 + MEMORY_TOLERANCE / 2))),
        FOUND,
    ],
    ids=str,
)
def test_what_is_not_stated_fits_anything_and_more_memory_is_no_fault(
    planned: DeviceSpec,
) -> None:
    assert planned.accepts(FOUND)


@pytest.mark.parametrize(
    "planned",
    [
        DeviceSpec(host="node4"),
        DeviceSpec(kind="NVIDIA L4"),
        DeviceSpec(uuid="GPU-2"),
        DeviceSpec(memory_capacity_bytes=16 * GIB),
        DeviceSpec(host="node3", kind="NVIDIA T4", memory_capacity_bytes=24 * GIB),
    ],
    ids=str,
)
def test_one_stated_thing_that_differs_is_enough_to_refuse(planned: DeviceSpec) -> None:
    assert not planned.accepts(FOUND)


def test_a_device_that_does_not_tell_its_memory_fits_only_where_none_is_wanted() -> None:
    silent = DeviceSpec(kind="cpu")
    assert DeviceSpec(kind="cpu").accepts(silent)
    assert not DeviceSpec(kind="cpu", memory_capacity_bytes=1).accepts(silent)


def test_a_device_reads_like_a_phrase() -> None:
    assert str(FOUND) == "NVIDIA T4 15.0 GiB on node3 (GPU-1)"
    assert str(DeviceSpec()) == "any device"


@pytest.mark.parametrize("spec", [FOUND, DeviceSpec(), DeviceSpec(host="a")], ids=str)
def test_a_device_survives_the_way_to_json_and_back(spec: DeviceSpec) -> None:
    assert from_document(DeviceSpec, to_document(spec), source="device") == spec
    assert None not in to_document(spec).values()


@pytest.mark.parametrize(
    "stated, key",
    [
        ({"hots": "a"}, "hots"),
        ({"host": 3}, "host"),
        ({"kind": ["T4"]}, "kind"),
        ({"uuid": True}, "uuid"),
        ({"memory_capacity_bytes": "15 GiB"}, "memory_capacity_bytes"),
        ({"memory_capacity_bytes": 1.5e9}, "memory_capacity_bytes"),
        ({"memory_capacity_bytes": True}, "memory_capacity_bytes"),
        ({"memory_capacity_bytes": False}, "memory_capacity_bytes"),
        ({"memory_capacity_bytes": -1}, "memory_capacity_bytes"),
    ],
)
def test_an_unknown_or_ill_typed_key_is_refused_by_name(
    stated: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=rf"device: .*{key}"):
        from_document(DeviceSpec, stated, source="device")
