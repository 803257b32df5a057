"""Select the predictions in a model's outputs, and join predictions of several batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.trainer_pt_utils import nested_concat

from shardhet.fsdp.probing.comparing import are_close

PADDING = -100  # for predictions and labels of different lengths, as in transformers


def predictions_in(outputs: Any, ignored: Sequence[str], *, has_loss: bool) -> Any:
    """The outputs except the loss and those ``ignored``; a single one is not a tuple."""
    if isinstance(outputs, dict):
        skipped = {*ignored, "loss"}
        found: Any = tuple(value for name, value in outputs.items() if name not in skipped)
    else:
        found = outputs[1:] if has_loss else outputs
    return found[0] if len(found) == 1 else found


def joined(whole: Any, part: Any) -> Any:
    """The predictions of both, padded if their lengths differ."""
    if part is None:
        return whole
    return part if whole is None else nested_concat(whole, part, padding_index=PADDING)


def mixes(whole: Any, *parts: Any) -> bool:
    """Whether what samples have become together is not what they became in ``parts``.

    What has another shape, as texts padded to another length, is not compared.
    """
    for leaves in zip(*map(tree_leaves, (whole, *parts)), strict=False):
        if not all(isinstance(leaf, Tensor | int | float) for leaf in leaves):
            continue
        each, *others = map(torch.as_tensor, leaves)
        if all(o.dim() for o in (each, *others)) and sum(map(len, others)) == len(each):
            others = [torch.cat(others)] if len({o.shape[1:] for o in others}) == 1 else []
        if any(o.shape == each.shape and not are_close(o, each) for o in others):
            return True
    return False
