"""Loss sums: what a model's own loss says about samples that are dealt out to ranks.

Under a plan a rank computes on some samples, and the loss of all is the sum of the ranks' sums
over the number of what was summed.  transformers' models return either a sum over
``num_items_in_batch`` (language models) or a mean over labels (classifiers).  Which it is, and
that it is nothing else (an auxiliary loss over the batch, a contrastive one), is checked on the
first batch rather than believed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardhet.fsdp import HetFSDP
from shardhet.hf.dealing import num_rows, rows_of
from shardhet.layout import Span

IGNORED = -100  # transformers' label of what has none

# Sums of the same terms in another order differ by this much of their size; a mean that was
# taken for a sum differs by half.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 3e-2


def num_labels(inputs: Mapping[str, Any], label_names: Sequence[str]) -> int:
    """How many labels a mean over this rank's batch is taken over."""
    labels = [inputs[name] for name in label_names if isinstance(inputs.get(name), Tensor)]
    if len(labels) != 1 or labels[0].is_floating_point():
        return num_rows(inputs)
    return int(labels[0].ne(IGNORED).sum())


def check_adds_up(
    model: HetFSDP,
    inputs: Mapping[str, Any],
    label_names: Sequence[str],
    loss_sum: Callable[[dict[str, Any]], Tensor],
) -> None:
    """Raise on every rank unless the loss of a batch is the sum of its parts'.  Collective."""
    was_training = model.training
    model.eval()
    whole = _unevenly_labelled(inputs, label_names)
    middle = (num_rows(whole) + 1) // 2
    spans = (Span(0, num_rows(whole)), Span(0, middle), Span(middle, num_rows(whole)))
    with torch.no_grad():
        sums = [loss_sum(rows_of(whole, span)) for span in spans]
    model.train(was_training)
    tolerance = TOLERANCE.get(sums[0].dtype, LOW_PRECISION_TOLERANCE)
    if torch.is_autocast_enabled(sums[0].device.type):
        tolerance = LOW_PRECISION_TOLERANCE
    together, first, second = (float(each) for each in sums)
    differs = abs(together - first - second) > tolerance * max(abs(together), 1e-12)
    found = model.exchange([together, first, second, differs])
    for position, (a, b, c, is_bad) in enumerate(found):
        if is_bad:
            raise ValueError(
                f"the loss at position {position} of the plan is {a} for its batch but {b} and "
                f"{c} for the two parts of it, so it is no sum over samples. Leave auxiliary "
                "losses out (output_router_logits=False), and let a compute_loss_func divide "
                "the sum by num_items_in_batch."
            )


def _unevenly_labelled(inputs: Mapping[str, Any], label_names: Sequence[str]) -> dict[str, Any]:
    """The same batch, of whose first sample half of the labels are ignored.

    Where all samples have equally many labels a mean over samples looks like one over labels.
    """
    changed = dict(inputs)
    for name in label_names:
        labels = changed.get(name)
        if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
            continue
        if labels.shape[1] > 3 and len(labels):
            changed[name] = labels.clone()
            changed[name][0, labels.shape[1] // 2 :] = IGNORED
    return changed
