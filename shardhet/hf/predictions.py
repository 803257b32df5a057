"""Select the predictions in a model's outputs, and join predictions of several batches."""

from collections.abc import Sequence
from typing import Any

from transformers.trainer_pt_utils import nested_concat

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
