"""Published layer times in a profile: measured by others, one kind of unit of several.

Only the block is in the tables.  Embedding, head, optimizer and links keep the figures that
were derived from specifications, and the profile's notes say so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardhet.records.profiles import ComputePoint, Profile, Source, Timing, UnitProfile

BLOCK = "block"
KIND_BY_GPU = {  # the tables' names, as the driver spells them
    "l4": "NVIDIA L4",
    "a6000": "NVIDIA RTX A6000",
    "p40": "Tesla P40",
    "p100": "Tesla P100-PCIE-12GB",
}
NOTE = "block: Cephalo's published times; embedding, head and optimizer: derived"

# By GPU: lines (slope, intercept) of forward and backward in milliseconds against the
# microbatch size, then the times themselves at sizes 1, 2, ...
Blocks = Mapping[str, Sequence[Sequence[float]]]


def with_published_blocks(derived: Profile, blocks: Blocks) -> Profile:
    """``derived`` with the published times of the block in place of its own."""
    gpu_by_kind = {kind: gpu for gpu, kind in KIND_BY_GPU.items()}
    devices = []
    for device in derived.devices:
        gpu = gpu_by_kind[device.device_kind]
        published = block_profile(blocks[gpu])
        units = tuple(published if u.unit_kind == BLOCK else u for u in device.units)
        devices.append(replace(device, units=units, source=Source.IMPORTED, note=NOTE))
    return replace(derived, devices=tuple(devices), note=NOTE)


def block_profile(entry: Sequence[Sequence[float]]) -> UnitProfile:
    """One GPU's entry of the table as seconds."""
    if len(entry) != 4:
        raise ValueError(
            f"blocks: an entry has {len(entry)} parts but needs 4: two lines and the times "
            "they were drawn through. Leave this model out."
        )
    return UnitProfile(
        unit_kind=BLOCK,
        points=tuple(
            ComputePoint(
                microbatch_size=i + 1,
                forward=Timing.single(forward_ms / 1000),
                backward=Timing.single(backward_ms / 1000),
            )
            for i, (forward_ms, backward_ms) in enumerate(zip(*entry[2:], strict=True))
        ),
    )


def derived_over_published(derived: Profile, blocks: Blocks) -> dict[str, float]:
    """By GPU: a block's derived seconds over its published ones, at the largest size."""
    found = {}
    for gpu, kind in KIND_BY_GPU.items():
        published = block_profile(blocks[gpu])
        size = published.points[-1].microbatch_size
        guess = derived.unit(kind, BLOCK)
        found[gpu] = (guess.forward_s.at(size) + guess.backward_s.at(size)) / (
            published.forward_s.at(size) + published.backward_s.at(size)
        )
    return found
