"""Inputs that have no row for each sample, though each of their rows belongs to one of them.

The patches of all images of a batch are one tensor, for instance.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Given a call's arguments by name: how many rows each sample has, in order.
CountRows = Callable[[Mapping[str, Any]], Sequence[int] | Tensor]

Rows = tuple[int, ...]  # by sample

_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# Of the token that stands for a patch: inputs with rows for patches, and for what they form.
_INPUTS = {
    "image_token_id": (("pixel_values",), ("image_grid_thw",)),
    "video_token_id": (
        ("pixel_values_videos",),
        ("video_grid_thw", "second_per_grid_ts"),
    ),
}


def known_ragged(
    module: nn.Module, given: Mapping[str, CountRows] | None
) -> Mapping[str, CountRows]:
    """Those ``given``, or else those of a model of transformers, of families that have them."""
    if given is not None:
        return given
    config: Any = getattr(module, "config", None)
    found: dict[str, CountRows] = {}
    if getattr(config, "model_type", None) in _FAMILIES:
        area = config.vision_config.spatial_merge_size**2
        for token, (of_patches, of_grids) in _INPUTS.items():
            of = partial(_tokens, token_id=getattr(config, token))
            grids = partial(_grids, of=of, grid=of_grids[0], area=area)
            found |= {name: partial(_patches, of=of, area=area) for name in of_patches}
            found |= dict.fromkeys(of_grids, grids)
    return found


def _tokens(batch: Mapping[str, Any], token_id: int) -> Tensor:
    """By sample: how many of its tokens stand for patches."""
    if not isinstance(batch.get("input_ids"), Tensor):
        raise ValueError(
            "model(...): there is no input_ids, which says whose images pixel_values are. "
            "Pass it, or HetFSDP(ragged={'pixel_values': ..., 'image_grid_thw': ...})."
        )
    counts: Tensor = (batch["input_ids"] == token_id).sum(1)
    return counts


def _patches(batch: Mapping[str, Any], of: Callable[..., Tensor], area: int) -> Tensor:
    return of(batch) * area


def _grids(batch: Mapping[str, Any], of: Callable[..., Tensor], grid: str, area: int) -> Tensor:
    stops = (batch[grid].prod(1) // area).cumsum(0)  # in tokens, as they follow each other
    before = torch.searchsorted(stops, of(batch).cumsum(0).to(stops.device), right=True)
    return before.diff(prepend=before.new_zeros(1))


def rows_by_leaf(
    ragged: Mapping[str, CountRows],
    names: Sequence[str],
    leaves: Sequence[Any],
    num_samples: int,
) -> list[Rows | None]:
    """How many rows of each leaf belong to each sample; None for one that is not ragged.

    Raises ``ValueError`` if they are not as many as there are.
    """
    batch = dict(zip(names, leaves, strict=True))
    found: list[Rows | None] = []
    for name, leaf in zip(names, leaves, strict=True):
        if name not in ragged or not isinstance(leaf, Tensor) or not num_samples:
            found.append(None)
            continue
        rows = tuple(int(each) for each in ragged[name](batch))
        if len(rows) != num_samples or sum(rows) != len(leaf):
            raise ValueError(
                f"model(...): argument {name!r} has {len(leaf)} rows for {num_samples} samples "
                f"but these have {list(rows)} of them, as HetFSDP(ragged={{{name!r}: ...}}) or "
                "the tokens that stand for them say. Pass a sample's rows with the sample."
            )
        found.append(rows)
    return found
