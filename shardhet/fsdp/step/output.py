"""What a model has returned, and how the program makes a loss of it.

The loss of a rank has to be a sum over its samples.  So it may depend on a sum that the model
returns by a factor that is the same on all ranks, and on a mean by the number of what it is
over.  The factors are the gradients of what is returned.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import isfinite
from types import MappingProxyType
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor

from shardhet.comm.calls import HostCopy
from shardhet.fsdp.microbatch.batching import Join, flatten, named_leaves, unflatten

LARGE_OUTPUT_BYTES = 256 * 2**20  # warn if a model's output is larger: logits, not a loss

# Whether something without samples is a sum or a mean over them, or both; empty for a mean over
# what counts in each; None for anything else.  By its place in an output.
Law = frozenset[Join] | None
Laws = Mapping[str, Law]


class Output:
    """What a model has returned, as long as the program keeps it."""

    def __init__(self, leaves: Mapping[str, Any], laws: Laws = MappingProxyType({})) -> None:
        """``leaves`` are those of ``named_leaves``."""
        self.laws = laws
        self._leaves = {
            at: ref(each) if isinstance(each, Tensor) else each for at, each in leaves.items()
        }
        self._eps = 0.0  # of the narrowest dtype of what gets a gradient
        self._scale: Tensor | None = None  # of the loss; None: gradients are not noted
        self._loss_at: str | None = None  # if the loss is one of these as it is
        self._factors: dict[str, HostCopy] = {}

    @classmethod
    def watched(cls, output: Any, laws: Laws) -> tuple[Any, Self]:
        """What to return in place of the output, and what notes how it is used."""
        leaves = named_leaves(output)
        with_grad = {
            # The model may go on with it; the program's gradient is that of the view.
            place: leaf.view_as(leaf)
            for place, leaf in leaves.items()
            if place in laws and isinstance(leaf, Tensor) and leaf.grad_fn is not None
        }
        if with_grad:
            leaves |= with_grad
            output = unflatten([*leaves.values()], flatten(output)[1])
        warn_of_large_output(leaves.values())
        found = cls(leaves, laws)
        for place, leaf in with_grad.items():
            leaf.register_hook(partial(found._note, place))
            found._eps = max(found._eps, torch.finfo(leaf.dtype).eps)
        return output, found

    def begin_backward(self, loss_sum: Tensor, scale: Tensor) -> None:
        """Note the gradients of leaves with a law, unless the loss is one as it is."""
        self._loss_at = self._place_of(loss_sum)
        self._scale = scale if self._loss_at is None else None

    def _note(self, place: str, grad: Tensor) -> None:
        if self._scale is not None:
            # Weights under which no two vectors are likely to have one sum.
            weights = torch.arange(1, grad.numel() + 1, dtype=torch.float64, device=grad.device)
            weighted = grad.detach().flatten().double() * weights.sqrt()
            self._factors[place] = HostCopy(weighted.sum() / self._scale)

    def factors(self) -> list[float]:
        """What ``check_factors`` compares of leaves with a law, by which the loss has them."""
        if self._loss_at is not None:
            return [0.0, *(float(place == self._loss_at) for place in self.laws)]
        copies = (self._factors.get(place) for place in self.laws)
        return [self._eps, *(0.0 if each is None else float(each.read()) for each in copies)]

    def _place_of(self, loss_sum: Any) -> str | None:
        return next((place for place, each in self.leaves.items() if each is loss_sum), None)

    @property
    def leaves(self) -> dict[str, Any]:
        """What is left of it, by place."""
        return {at: e() if isinstance(e, ref) else e for at, e in self._leaves.items()}

    def check_adds_up(self, loss_sum: Any, num_tokens: Any, caller: str) -> None:
        """Raise ``ValueError`` if a rank's loss, or its number of tokens, is what the model has
        returned and no sum over samples.
        """
        at = self._place_of(loss_sum)
        if at is None:
            return
        not_sums = [
            place for place, law in self.laws.items() if law is None or Join.SUM not in law
        ]
        if at in not_sums:
            kind = "no sum or mean" if self.laws[at] is None else "no sum, but a mean,"
            raise ValueError(
                f"{caller}: the loss is what the model returns, which is {kind} over samples. "
                "So ranks and rounds do not add up to one process with all samples. Give the "
                "sum (loss * num_tokens of a mean), leave out what mixes samples "
                "(output_router_logits=False), or let one rank compute all samples at once."
            )
        if not not_sums:
            return
        following = dict(pairwise(self._leaves)).get(at)
        if any(
            place in not_sums and _is_it(num_tokens, each, follows_loss=place == following)
            for place, each in self.leaves.items()
        ):
            raise ValueError(
                f"{caller}: the number of tokens is what the model returns, {num_tokens} here, "
                "and does not add up over samples: for those of two ranks, or rounds, it is "
                "not the sum of both. Return the number of what the loss is summed over, which "
                "may be zero."
            )


def warn_of_large_output(leaves: Iterable[Any]) -> None:
    """Warn if the model returns logits of a whole batch."""
    nbytes = sum([each.nbytes for each in leaves if isinstance(each, Tensor)])
    if nbytes > LARGE_OUTPUT_BYTES:
        warnings.warn(
            f"the model returns {nbytes / 2**20:.0f} MiB for the rank's whole batch, and "
            "backward needs as much again. Pass loss_fn to HetFSDP, so that only the output "
            "of one microbatch is alive at a time.",
            stacklevel=5,
        )


def check_factors(rounds: Sequence[Laws], rows: Sequence[Sequence[float]]) -> None:
    """Raise ``ValueError`` unless the losses of all ranks add up to that of one process.

    Args:
        rounds: the laws in each round of a step.
        rows: of each rank: for each round samples, tokens, and ``Output.factors``.
    """
    found = defaultdict[tuple[str, Law], list[Sequence[float]]](list)
    eps = 0.0
    for row in rows:
        left = iter(row)
        for laws in rounds:
            num_samples, num_tokens = next(left), next(left)
            eps = max(eps, next(left))
            for each, factor in zip(laws.items(), left, strict=False):
                if num_samples and (factor or num_tokens):
                    found[each].append((factor, 1.0, num_samples, num_tokens))
    for (place, law), of_all in found.items():
        factors, *numbers = zip(*of_all, strict=True)
        allowed, kind = _ALLOWED[law]
        if any(factors) and not any(_are_level(factors, n, eps) for n in numbers[allowed]):
            shown = ", ".join(f"{each:.4g}" for each in factors)
            name = place[1:].replace("'", "") or 0
            raise ValueError(_BY_OTHER_FACTORS.format(name, kind, shown))


def _are_level(factors: Sequence[float], numbers: Sequence[float], eps: float) -> bool:
    """Whether factors are proportional to these numbers, or backward has overflowed."""
    if not all(map(isfinite, factors)):
        return True
    if not all(numbers):
        return False
    ratios = [factor / number for factor, number in zip(factors, numbers, strict=True)]
    return max(ratios) - min(ratios) <= min(64 * eps, 1e-2) * max(map(abs, ratios))


def _is_it(num_tokens: Any, leaf: Any, *, follows_loss: bool) -> bool:
    """Whether a leaf is the number of tokens: plain numbers are known by value and place."""
    if isinstance(num_tokens, Tensor):
        return num_tokens is leaf
    return follows_loss and type(num_tokens) is type(leaf) and bool(num_tokens == leaf)


_SUM, _MEAN = frozenset([Join.SUM]), frozenset([Join.MEAN])
# Which of 1, the number of samples, and that of tokens factors may be proportional to.
_ALLOWED = {
    _SUM: (slice(0, 1), "a sum over samples"),
    _MEAN: (slice(1, 3), "a mean over samples"),
    _SUM | _MEAN: (slice(0, 3), "a sum or a mean over samples"),
    frozenset[Join](): (slice(2, 3), "a mean over what counts in samples"),
    None: (slice(0, 0), "no sum or mean over samples (a maximum, perhaps)"),
}
_BY_OTHER_FACTORS = (
    "model.backward: the loss depends on output {} of model(...), which is {}, by factors that "
    "make the result depend on the plan ({} by rank and round). Add a sum to the loss as it "
    "is, or times a constant, and a mean times the number of samples, or of tokens, that you "
    "give model.backward; return rows of samples for what is not linear (a square, a product, "
    "a ratio), or let one rank compute all samples at once."
)
CREATES_GRAPH = (
    "gradients of gradients (create_graph=True, as for a gradient penalty) are not computed "
    "through a HetFSDP model, whose backward has no graph. Leave the penalty out, or train "
    "this model with plain PyTorch."
)


def arrived_late(*, of_earlier: bool) -> str:
    return (
        "a gradient arrived for the output of "
        + ("an earlier model(...)" if of_earlier else "model(...)")
        + ". Call model.backward(loss_sum, num_tokens) once after each model(...), before the "
        "next, instead of loss.backward() or one backward for several calls: gradients add up. "
        "For the mean over the tokens of several calls give each model.backward this rank's "
        "number of tokens in all. Does one loss compare two calls, as of a siamese net? Make "
        "both in the forward of one module that HetFSDP wraps. Does it go through two HetFSDP "
        "models? Wrap both in one module, and make an optimizer for the parameters of each."
    )
