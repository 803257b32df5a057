"""Loss sums: what a model's own loss says about samples that are dealt out to ranks.

Under a plan a rank computes on some samples, and the loss of all is the sum of the ranks' sums
over the number of what was summed.  transformers' models return either a sum over
``num_items_in_batch`` (language models) or a mean over labels (classifiers, also those that
accept ``num_items_in_batch``).  Which it is, and that it is nothing else (an auxiliary loss
over the batch, a contrastive one), is found out on the first batch rather than believed.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardhet.fsdp import HetFSDP
from shardhet.hf.dealing import num_rows, rows_of
from shardhet.records.layout import Span

IGNORED = -100  # transformers' label for positions without a label

# Relative difference allowed between sums in different order; a mean taken for a sum would
# differ by half.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 3e-2


def num_labels(inputs: Mapping[str, Any], label_names: Sequence[str]) -> int:
    """The number of labels that a mean over this rank's batch is taken over."""
    labels = [inputs[name] for name in label_names if isinstance(inputs.get(name), Tensor)]
    if len(labels) != 1 or labels[0].is_floating_point():
        return num_rows(inputs)
    return int(labels[0].ne(IGNORED).sum())


class LossKind(Enum):
    """How a model's loss combines its samples."""

    SUM = "sum"  # over items, as requested by num_items_in_batch=1
    MEAN = "mean"  # over labels, whatever num_items_in_batch says


def halves(inputs: Mapping[str, Any], label_names: Sequence[str]) -> list[dict[str, Any]]:
    """A rank's batch and its two halves, for ``find_kind``."""
    whole = unevenly_labelled(_at_least_two_rows(inputs), label_names, [0])
    middle = (num_rows(whole) + 1) // 2
    spans = (Span(0, num_rows(whole)), Span(0, middle), Span(middle, num_rows(whole)))
    return [rows_of(whole, span) for span in spans]


def find_kind(
    model: HetFSDP,
    parts: Sequence[dict[str, Any]],
    label_names: Sequence[str],
    loss_of: Callable[[dict[str, Any]], Tensor],
) -> LossKind:
    """Find out how losses combine, given a batch and its two parts.  Collective.

    Raises on every rank if neither kind fits.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        losses = [loss_of(part) for part in parts]
    model.train(was_training)
    tolerance = TOLERANCE.get(losses[0].dtype, LOW_PRECISION_TOLERANCE)
    if torch.is_autocast_enabled(losses[0].device.type):
        tolerance = LOW_PRECISION_TOLERANCE
    sums = [float(loss) for loss in losses]
    counts = [num_labels(part, label_names) for part in parts]
    weighted = [value * n if n else 0.0 for value, n in zip(sums, counts, strict=True)]
    holds = [_adds_up(sums, tolerance), _adds_up(weighted, tolerance)]
    found = model.exchange([*sums, *map(float, holds)])
    for kind, column in ((LossKind.SUM, 3), (LossKind.MEAN, 4)):
        if all(row[column] for row in found):
            return kind
    losses_by_position = [row[:3] for row in found]
    raise ValueError(
        "the loss is neither a sum over samples nor a mean over labels: for the batch and two "
        f"parts of it, positions of the plan have {losses_by_position}. Leave auxiliary losses "
        "out (output_router_logits=False), and let a compute_loss_func divide the sum by "
        "num_items_in_batch."
    )


def _adds_up(values: Sequence[float], tolerance: float) -> bool:
    together, first, second = values
    return abs(together - first - second) <= tolerance * max(abs(together), 1e-12)


def _at_least_two_rows(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same batch, with a single sample repeated, because it could not be split."""
    if num_rows(inputs) != 1:
        return dict(inputs)
    doubled: dict[str, Any] = tree_map_only(
        Tensor, lambda t: torch.cat([t, t]) if t.dim() and len(t) == 1 else t, dict(inputs)
    )
    return doubled


def unevenly_labelled(
    inputs: Mapping[str, Any], label_names: Sequence[str], rows: Sequence[int]
) -> dict[str, Any]:
    """The same batch, with half of the labels of these ``rows`` ignored.

    If all samples had equally many labels, a mean over samples would look like one over labels.
    """
    changed = dict(inputs)
    for name in label_names:
        labels = changed.get(name)
        if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
            continue
        if labels.shape[1] > 3:
            changed[name] = labels.clone()
            for row in (each for each in rows if each < len(labels)):
                changed[name][row, labels.shape[1] // 2 :] = IGNORED
    return changed
