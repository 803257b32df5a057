"""Loss sums: what a model's own loss says about samples that are dealt out to ranks.

Under a plan a rank computes on some samples, and the loss of all is the sum of the ranks' sums
over the number of what was summed.  transformers' models return either a sum over
``num_items_in_batch`` (language models) or a mean over labels (classifiers, also those that
accept ``num_items_in_batch``).  Which it is, and that it is nothing else (an auxiliary loss
over the batch, a contrastive one), is found out on the first batch rather than believed.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from shardhet.fsdp import HetFSDP
from shardhet.records.layout import Span
from shardhet.records.plan import Plan
from shardhet.training.dealing.batches import num_rows, rows_at, rows_of

IGNORED = -100  # transformers' label for positions without a label

# Relative difference allowed between sums in different order; a mean taken for a sum would
# differ by half.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
LOW_PRECISION_TOLERANCE = 3e-2

# Said to be the number of items, so that a small term of the loss that is not divided by it
# shows; a power of two changes no digit of the others, if they stay normal numbers.
MOST = 2.0**20
MANY = {torch.float16: 2.0**10}

MOST_CLASSES = 12  # whose losses are compared
LESS, MORE = 0.2, 0.9  # labels that are numbers, probabilities among them

Parts = Sequence[dict[str, Any]]  # a batch and two parts of it


def num_labels(
    inputs: Mapping[str, Any], label_names: Sequence[str], *, is_shifted: bool = False
) -> int:
    """The number of labels that a mean over this rank's batch is taken over.

    ``is_shifted``: each position predicts the next one, so no loss has the first label.
    """
    labels = [inputs[name] for name in label_names if isinstance(inputs.get(name), Tensor)]
    if len(labels) != 1 or labels[0].is_floating_point():
        return num_rows(inputs)
    counted = labels[0][..., 1:] if is_shifted and labels[0].dim() > 1 else labels[0]
    return int(counted.ne(IGNORED).sum())


def check_positions(inputs: Mapping[str, Any], label_names: Sequence[str]) -> None:
    """Raise if a mean over samples leaves some out: answers outside of their texts."""
    texts = [each for each in inputs.values() if isinstance(each, Tensor) and each.dim() > 1]
    for name in label_names if texts else ():
        labels = inputs.get(name)
        if not name.endswith("_positions") or not isinstance(labels, Tensor):
            continue
        width = texts[0].shape[1]
        if number := int((labels >= width).sum()):
            raise ValueError(
                f"{name}: {number} of {len(labels)} samples have their answer outside of "
                f"{width} tokens. The model's mean leaves them out, but ranks count samples. "
                "Label them with a token, 0 for example, or drop them."
            )


class LossKind(Enum):
    """How a model's loss combines its samples."""

    SUM = "sum"  # over items, as requested by num_items_in_batch=1
    MEAN = "mean"  # over labels, whatever num_items_in_batch says
    SHIFTED_MEAN = "shifted mean"  # the same without the labels of first positions


def probes(
    inputs: Mapping[str, Any], label_names: Sequence[str], num_classes: int
) -> list[Parts]:
    """Batches of a rank, each with its two parts, for ``find_kind``.

    The second one has other labels, and more rows if it takes more to have all classes.  What
    else is one number or flag per sample, which may weigh it, has unlike values there.
    """
    found: list[Parts] = []
    for others in (False, True):
        whole = dict(inputs)
        num, middle = max(2, num_rows(whole)), None
        columns = _columns(whole, label_names)
        if others:
            num = max(num, 4) if columns else num
            more = num_rows_of_classes(whole, label_names, num_classes)
            num = max(num, 1 + more)
            middle = num - more if more else None
        middle = (num + 1) // 2 if middle is None else middle
        whole = _with_rows(whole, num)
        first = range(middle)
        if others:
            whole = relabelled(whole, label_names, first, num_classes)
            weights = [LESS] * middle + [MORE * (i % 2 == 0) for i in range(num - middle)]
            whole |= {name: torch.tensor(weights).to(whole[name]) for name in columns}
        else:
            whole = unevenly_labelled(whole, label_names, [0])
        spans = (Span(0, num), Span(0, middle), Span(middle, num))
        found.append([rows_of(whole, span) for span in spans])
    return found


def probes_in_stages(
    model: HetFSDP, inputs: dict[str, Any], label_names: Sequence[str], num_classes: int
) -> list[Parts]:
    """As ``probes``, of samples that all stages have.  Collective."""
    plan, position = model.plan, model.position
    counts = [int(n) for (n,) in model.exchange([num_rows(inputs)])]
    num_samples = min(sum(counts[i] for i in plan.groups[-1]), plan.global_batch_size)
    first, second, uneven = halves_of_last_stage(plan, num_samples)
    own = plan.sample_indices(position, num_samples)

    def rows(part: Collection[int]) -> list[int]:
        return [row for row, sample in enumerate(own) if sample in part]

    return [
        [rows_at(changed, rows(part)) for part in (first | second, first, second)]
        for changed in (
            unevenly_labelled(inputs, label_names, rows(uneven)),
            relabelled(inputs, label_names, rows(first), num_classes),
        )
    ]


def halves_of_last_stage(plan: Plan, num_samples: int) -> tuple[set[int], set[int], set[int]]:
    """Two parts of a step's samples for ``find_kind``, and those whose labels become fewer.

    Each part is of one round, so that all stages have it in one order; a rank of the last stage
    has samples of both, or losses of parts would add up whatever their kind is.  Raises
    ``ValueError`` if none has two samples.
    """
    rounds = [
        [plan.round_samples(i, number, num_samples) for i in plan.groups[-1]]
        for number in range(min(2, plan.num_rounds))
    ]
    uneven = {own[0] for own in rounds[0] if own}
    if any(len(own) > 1 for own in rounds[0]):
        first = {i for own in rounds[0] for i in own[: (len(own) + 1) // 2]}
        return first, {i for own in rounds[0] for i in own} - first, uneven
    if len(rounds) > 1 and any(rounds[1]):
        first, second = ({i for own in each for i in own} for each in rounds)
        return first, second, uneven
    raise ValueError(
        "HetTrainer: no rank of the last stage has two samples of the first batch, which show "
        "whether the loss is a sum or a mean. Give one of them two, or the plan a round more."
    )


def _columns(inputs: Mapping[str, Any], label_names: Sequence[str]) -> list[str]:
    """What has one number with a fraction, or one flag, for each sample, and is no label."""
    return [
        name
        for name, each in inputs.items()
        if isinstance(each, Tensor)
        and each.dim() == 1
        and len(each)
        and name not in label_names
        if each.is_floating_point() or each.dtype == torch.bool
    ]


def find_kind(
    model: HetFSDP,
    probes: Sequence[Parts],
    label_names: Sequence[str],
    loss_of: Callable[[dict[str, Any], float], Tensor],
    *,
    between: dict[str, Any] | None = None,
    predicts_next: bool,
) -> LossKind:
    """Find out how losses combine, given batches and two parts of each.  Collective.

    ``between``: other samples, run before the first batch is run again, so that state that a
    loss keeps between calls shows as a difference.  ``loss_of`` takes a batch and what is said
    to be the number of items in it.  A
    mean is over all labels unless those without first positions fit much better, or, where the
    model's own loss is of next tokens (``predicts_next``), better.  Raises on every rank if no
    kind fits.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        losses = [[loss_of(part, 1.0) for part in parts] for parts in probes]
        number = MANY.get(losses[0][0].dtype, MOST)
        of_many = float(loss_of(probes[0][0], number))
        if between is not None:
            loss_of(between, 1.0)
        again = float(loss_of(probes[0][0], 1.0))
    model.train(was_training)
    dtype, device = losses[0][0].dtype, losses[0][0].device.type
    tolerance = TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE)
    if torch.is_autocast_enabled(device):
        tolerance = LOW_PRECISION_TOLERANCE
    values = [[float(loss) for loss in each] for each in losses]
    errors = []
    for kind in LossKind:
        weights = [_weights(kind, parts, label_names) for parts in probes]
        errors.append(max(map(_error, values, weights)) / tolerance)
    undivided = _error([values[0][0], of_many, 0.0], [1.0, number, 1.0]) / tolerance
    repeated = _error([values[0][0], again, 0.0], [1.0, 1.0, 1.0]) / tolerance
    found = model.exchange([*values[0], *values[1], *errors, undivided, repeated])
    sum_off, mean_off, shifted_off, undivided, repeated = (
        max(row[i] for row in found) for i in (6, 7, 8, 9, 10)
    )
    if repeated > 1:
        raise ValueError(
            "the loss of the same samples is another when it is computed again, because it "
            "depends on what compute_loss keeps from call to call, or draws. Ranks call it for "
            "unlike samples, and not equally often. Compute it from the inputs, the model's "
            "outputs and trainer.state.global_step."
        )
    if sum_off <= 1 < undivided:
        raise ValueError(
            "the loss is a sum over samples, but not all of it is divided by "
            f"num_items_in_batch: said to be {number:g} instead of 1, that number times the "
            f"loss is another by {undivided * tolerance:.2g} of it. Divide all terms, and "
            "leave auxiliary losses out (output_router_logits=False)."
        )
    if sum_off <= 1:
        return LossKind.SUM
    if shifted_off <= 1 and (
        shifted_off < mean_off if predicts_next else max(10 * shifted_off, 0.1) < mean_off
    ):
        return LossKind.SHIFTED_MEAN
    if mean_off <= 1:
        return LossKind.MEAN
    of_first = [row[:3] for row in found]
    of_second = [row[3:6] for row in found]
    raise ValueError(
        "the loss is neither a sum over samples nor a mean over labels: for the batch and two "
        f"parts of it, positions of the plan have {of_first}, and with other labels "
        f"{of_second}. Leave auxiliary losses out (output_router_logits=False); weigh classes "
        "in a compute_loss_func that divides the weighted sum by num_items_in_batch."
    )


def _weights(kind: LossKind, parts: Parts, label_names: Sequence[str]) -> list[float]:
    """What the losses of a batch and its parts are multiplied by to add up."""
    if kind is LossKind.SUM:
        return [1.0] * len(parts)
    is_shifted = kind is LossKind.SHIFTED_MEAN
    return [float(num_labels(part, label_names, is_shifted=is_shifted)) for part in parts]


def _error(losses: Sequence[float], weights: Sequence[float]) -> float:
    """By how much parts do not add up, relative; 0 where a loss of theirs has no value."""
    pairs = zip(losses, weights, strict=True)
    together, first, second = (loss * n if n else 0.0 for loss, n in pairs)
    error = abs(together - first - second) / max(abs(together), 1e-12)
    return error if math.isfinite(error) else 0.0


def _with_rows(inputs: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The same batch with so many rows, the first ones once more; none if it has none."""
    whole = num_rows(inputs)
    if not whole or number == whole:
        return dict(inputs)
    more: dict[str, Any] = rows_at(inputs, [row % whole for row in range(number)])
    return more


def num_rows_of_classes(
    inputs: Mapping[str, Any], label_names: Sequence[str], num_classes: int
) -> int:
    """The rows that ``relabelled`` needs for all classes but the first; 0 if rows have none."""
    labels = [inputs.get(name) for name in label_names]
    numbers = [
        _num_classes(each, num_classes)
        for each in labels
        if isinstance(each, Tensor) and each.dim() == 1 and len(each)
    ]
    return max((n - 1 + n // 2 for n in numbers if n > 1), default=0)


def _num_classes(labels: Tensor, num_classes: int) -> int:
    """The number of classes that labels are surely among, as far as is looked at; 0: none."""
    if labels.is_floating_point():
        return 0
    return min(MOST_CLASSES, max(num_classes, int(labels.max()) + 1))


def relabelled(
    inputs: Mapping[str, Any],
    label_names: Sequence[str],
    first: Sequence[int],
    num_classes: int,
) -> dict[str, Any]:
    """The same batch with other labels, which are unlike in the rows ``first`` and the others.

    Weights of classes, ratios and roots then show, though a batch has only one class or one
    sample; and in texts the labels of first positions.  Labels without a value have none.
    """
    changed = dict(inputs)
    for name in label_names:
        labels = changed.get(name)
        if isinstance(labels, Tensor) and labels.dim() and len(labels):
            is_first = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
            is_first[list(first)] = True
            changed[name] = _other_labels(labels, is_first, num_classes)
    return changed


def _other_labels(labels: Tensor, is_first: Tensor, num_classes: int) -> Tensor:
    other = labels.clone()
    if labels.is_floating_point():
        other[is_first], other[~is_first] = LESS, MORE
        return torch.where(labels.isfinite(), other, labels)
    are_classes = labels.dim() == 1 or int(labels.max()) < num_classes
    number = _num_classes(labels, num_classes)
    if are_classes and number > 1:
        rest = other[~is_first]
        others = 1 + torch.arange(rest.numel(), device=labels.device) % (number - 1)
        other[is_first], other[~is_first] = 0, others.view(rest.shape).to(rest)
        return torch.where(labels == IGNORED, labels, other)
    if labels.dim() == 2 and labels.shape[1] > 3:
        first_labelled = (~is_first).long()[:, None]  # positions 0 and 1, or 1 and 2
        at = torch.arange(labels.shape[1], device=labels.device) - first_labelled
        some = labels.amax(dim=1, keepdim=True)
        other = torch.where(labels == IGNORED, some, labels)
        return torch.where((at == 0) | (at == 1), other, IGNORED)
    return labels


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
