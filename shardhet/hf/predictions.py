"""What of a model's outputs is predicted, and how predictions are put together."""

from collections.abc import Sequence
from typing import Any

from transformers.trainer_pt_utils import nested_concat

PADDING = -100  # of predictions and labels of unlike length, as in transformers


def predictions_in(outputs: Any, ignored: Sequence[str], *, has_loss: bool) -> Any:
    """The outputs but for the loss and what is ``ignored``; one alone is no tuple."""
    if isinstance(outputs, dict):
        skipped = {*ignored, "loss"}
        found: Any = tuple(value for name, value in outputs.items() if name not in skipped)
    else:
        found = outputs[1:] if has_loss else outputs
    return found[0] if len(found) == 1 else found


def joined(whole: Any, part: Any) -> Any:
    """Predictions of more samples, padded where they are of unlike length."""
    if part is None:
        return whole
    return part if whole is None else nested_concat(whole, part, padding_index=PADDING)
