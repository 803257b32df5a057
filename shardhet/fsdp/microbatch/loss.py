"""What a model has returned, and the loss that is made of it, by ``loss_fn`` or by the program.

``loss_fn`` is applied to the output of the last unit, microbatch by microbatch.  A program's
loss of a rank has to be a sum over its samples.  So it may depend on a sum that the model
returns by a factor that is the same on all ranks, and on a mean by the number of what it is
over.  The factors are the gradients of what is returned.
"""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from itertools import pairwise
from math import isfinite
from types import MappingProxyType
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn

from shardhet.comm.calls import HostCopy
from shardhet.fsdp.microbatch.batching import Join, flatten, named_leaves, unflatten
from shardhet.fsdp.microbatch.layered import tensors_in
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitModule
from shardhet.records.plan import Plan

LARGE_OUTPUT_BYTES = 256 * 2**20  # warn if a model's output is larger: logits, not a loss

# Whether something without samples is a sum or a mean over them, or both; empty for a mean over
# what counts in each; None for anything else.  By its place in an output.
Law = frozenset[Join] | None
Laws = Mapping[str, Law]


class Output:
    """What a model has returned, as long as the program keeps it."""

    def __init__(
        self, leaves: Mapping[str, Any], reductions: Laws = MappingProxyType({})
    ) -> None:
        """``leaves`` are those of ``named_leaves``."""
        self.reductions = reductions
        self._leaves = {
            at: ref(each) if isinstance(each, Tensor) else each for at, each in leaves.items()
        }
        self._eps = 0.0  # of the narrowest dtype of what gets a gradient
        self._scale: Tensor | None = None  # of the loss; None: gradients are not noted
        self._loss_at: str | None = None  # if the loss is one of these as it is
        self._factors: dict[str, HostCopy] = {}

    @classmethod
    def watched(cls, output: Any, reductions: Laws) -> tuple[Any, Self]:
        """What to return in place of the output, and what notes how it is used."""
        leaves = named_leaves(output)
        with_grad = {
            # The model may go on with it; the program's gradient is that of the view.
            place: leaf.view_as(leaf)
            for place, leaf in leaves.items()
            if place in reductions and isinstance(leaf, Tensor) and leaf.grad_fn is not None
        }
        if with_grad:
            leaves |= with_grad
            output = unflatten([*leaves.values()], flatten(output)[1])
        warn_of_large_output(leaves.values())
        found = cls(leaves, reductions)
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
            return [0.0, *(float(place == self._loss_at) for place in self.reductions)]
        copies = (self._factors.get(place) for place in self.reductions)
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
            place
            for place, law in self.reductions.items()
            if law is None or Join.SUM not in law
        ]
        if at in not_sums:
            kind = "no sum or mean" if self.reductions[at] is None else "no sum, but a mean,"
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
        for reductions in rounds:
            num_samples, num_tokens = next(left), next(left)
            eps = max(eps, next(left))
            for each, factor in zip(reductions.items(), left, strict=False):
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


USER_ERRORS = (AttributeError, IndexError, TypeError, ValueError)
OUTSIDE = (
    "Compute the loss from what model(...) returns: model.backward(*loss_fn(output, labels))"
)
INSIDE = (
    "Stages have no model.backward: wrap a module of your own around the model, whose forward "
    "returns (loss_sum, num_tokens), and call model.forward_backward"
)
LossFn = Callable[..., tuple[Tensor, Tensor]]


class LossUsedError(TypeError):
    """The loss is not of the last unit's output, or the model computes with it."""


class FusedLoss:
    """Makes the last unit return the loss of its output instead of the output.

    Where the model does not return that output as it is (``log_softmax(head(x))``), the loss is
    computed from what it returns, of all samples of the rank: ``is_outside``.  A call without
    ``loss_inputs`` that a ``loss_fn`` needs is for the output itself: ``is_left_out``.
    """

    def __init__(self, loss_fn: LossFn | None) -> None:
        self.loss_fn, self._needs_inputs = loss_fn, loss_fn is not None and _needs_more(loss_fn)
        self.is_left_out = False  # of the forward in progress
        self._inputs: tuple[Any, ...] = ()  # of the forward in progress
        self._head = ""
        self._instead = OUTSIDE
        self.is_outside = self.is_settled = False  # settled by the first probe that ends
        self._loss: Sequence[Tensor] = ()  # what the head has returned in this forward

    def for_plan(self, plan: Plan) -> "FusedLoss":
        """This one, whose advice goes with ``plan`` from now on."""
        self._instead = OUTSIDE if plan.stages is None else INSIDE
        self.is_outside &= plan.stages is None
        return self

    def moves_out(self) -> bool:
        """Compute it from what the model returns from now on; whether that can be."""
        may = self._instead is OUTSIDE and not (self.is_settled or self.is_outside)
        self.is_outside |= may
        return may

    def of_output(self, output: Any) -> Any:
        """The loss of what the model returns, if it is outside; raises ``LossUsedError``."""
        if self.loss_fn is None or self.is_left_out or not self.is_outside:
            return output
        of = f"what the model returns, a {type(output).__name__}"
        return _applied(self.loss_fn, output, self._inputs, of)

    def find_head(self, module: nn.Module, units: Sequence[FSDPUnit]) -> UnitModule | None:
        """The last of the units' modules, in the model's order; None without a ``loss_fn``."""
        if self.loss_fn is None:
            return None
        position_by_fqn = {fqn: i for i, (fqn, _) in enumerate(module.named_modules())}
        modules = [each for unit in units for each in unit.modules]
        head = max(modules, key=lambda each: position_by_fqn[each.fqn], default=None)
        self._head = "" if head is None else head.fqn
        self.is_outside |= head is None  # the model is a single layer
        return head

    def with_loss(self, head: UnitModule) -> UnitModule:
        """``head`` with ``loss_inputs`` as its first argument, and the loss as its output."""
        loss_fn = self.loss_fn
        assert loss_fn is not None

        def forward(loss_inputs: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
            output = head.forward(*args, **kwargs)
            of = f"the output of unit {head.fqn!r}, the last in the order of its modules"
            advice = f"If it is meant for another's, leave loss_fn out. {self._instead}."
            return _applied(loss_fn, output, loss_inputs, of, advice)

        return replace(head, forward=forward)

    @contextmanager
    def of(self, loss_inputs: tuple[Any, ...]) -> Iterator[None]:
        """A context for one forward of the model.  Raises ``LossUsedError``."""
        self._inputs, self._loss = loss_inputs, ()
        self.is_left_out = self.leaves_out(loss_inputs)
        try:
            yield
        except USER_ERRORS as error:
            if not self._loss:
                raise
            raise LossUsedError(
                f"loss_fn: after unit {self._head!r}, to whose output it is applied, the model "
                f"goes on computing ({type(error).__name__}: {error}). Leave loss_fn out. "
                f"{self._instead}."
            ) from error
        finally:
            self._inputs, self.is_left_out = (), False

    def leaves_out(self, loss_inputs: Sequence[Any]) -> bool:
        """Whether a call with these is for the output of the model itself."""
        return self.loss_fn is None or (self._needs_inputs and not loss_inputs)

    def check_given(self, loss_inputs: Sequence[Any] | None) -> None:
        """Raise ``TypeError`` if they lack for a loss; None: there are no samples."""
        if self._needs_inputs and loss_inputs == ():
            raise TypeError(
                "model(...): loss_fn takes more than what the model returns, but no "
                "loss_inputs are given. Pass the targets as loss_inputs=; for predictions, "
                "call model(...) in torch.no_grad()."
            )

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of ``loss_fn`` after the head's output."""
        return self._inputs

    def note(self, output: Any) -> None:
        """Note that the head has returned the loss; later errors come from its use."""
        self._loss = tensors_in(output)

    def check_returned(self, output: Any) -> None:
        """Raise ``LossUsedError`` if the model has not returned the loss."""
        returned = {id(each) for each in tensors_in(output)}
        made, self._loss = self._loss, ()  # its graph keeps the model alive
        if made and not any(id(each) in returned for each in made):
            raise LossUsedError(
                f"loss_fn: the model does not return the output of unit {self._head!r}, the "
                f"last in the order of its modules. Leave loss_fn out. {self._instead}."
            )


def _applied(
    loss_fn: LossFn, output: Any, inputs: Sequence[Any], of: str, advice: str = ""
) -> Any:
    try:
        return loss_fn(output, *inputs)
    except USER_ERRORS as error:
        what = f"it raised {type(error).__name__}: {error} {advice}".rstrip()
        raise LossUsedError(f"loss_fn: applied to {of}, {what}") from error


def _needs_more(loss_fn: LossFn) -> bool:
    """Whether it cannot be called with the output of a model alone."""
    function = inspect.unwrap(loss_fn)
    function = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:  # ValueError: it has no signature
        return isinstance(error, TypeError)
    return False


def loss_pair(output: Any, loss_fn: LossFn | None = None) -> tuple[Any, Any]:
    """The loss and its number of tokens, in what a model returns: the first two of a sequence,
    or what ``loss_fn`` has put into a mapping (transformers' ``ModelOutput``).

    Raises ``TypeError`` if they are not there.
    """
    values = [output[:2]] if isinstance(output, tuple | list) else []
    values += output.values() if isinstance(output, Mapping) else []
    found = next(filter(_is_pair, values), None)
    if found is not None:
        return found[0], found[1]
    kind = type(output).__name__
    if isinstance(output, Tensor):
        kind = f"tensor of shape {tuple(output.shape)}"
    raise TypeError(
        f"{'the model' if loss_fn is None else 'loss_fn'} returns a {kind} without "
        "(loss_sum, num_tokens), by which losses of unlike batches add up. Return both:\n"
        '    loss_sum = F.cross_entropy(logits, targets, reduction="sum")\n'
        "    return loss_sum, targets.numel()\n"
        "or have the mean loss of its predictions computed for you:\n"
        "    HetFSDP(model, plan, loss_fn=shardhet.mean_of_samples(F.cross_entropy))\n"
        "    model.forward_backward(inputs, loss_inputs=targets)"
    )


def _is_pair(value: Any) -> bool:
    is_two = isinstance(value, (tuple, list)) and len(value) == 2
    return is_two and isinstance(value[0], Tensor) and not value[0].dim()


def mean_of_samples(loss_fn: Callable[..., Tensor]) -> LossFn:
    """A ``loss_fn`` for HetFSDP, of one that returns the mean over the samples it is given.

        HetFSDP(model, plan, loss_fn=mean_of_samples(F.mse_loss))

    Samples are those in dim 0 of the model's output; where the first of ``loss_inputs`` holds
    classes, what counts is those that are not ``ignore_index`` (-100).  A mean that weighs them
    unlike, as by class, is refused if the first samples show it: return a sum and its number.
    """
    given = getattr(loss_fn, "keywords", {})  # of a functools.partial
    ignored = given.get("ignore_index", getattr(loss_fn, "ignore_index", -100))

    @wraps(loss_fn, updated=())
    def loss_and_number(output: Tensor, *loss_inputs: Any) -> tuple[Tensor, Tensor]:
        mean = loss_fn(output, *loss_inputs)
        target = loss_inputs[0] if loss_inputs else output
        if target.dtype in (torch.int64, torch.int32):
            number = (target != ignored).sum()
        else:
            number = torch.full((), len(output), dtype=torch.int64, device=output.device)
        wide = torch.promote_types(mean.dtype, torch.float32)
        return torch.where(number > 0, mean.to(wide), 0.0) * number, number

    return loss_and_number


def check_no_tokens(num_tokens: Sequence[float], num_samples: Sequence[float]) -> None:
    """Raise ``ValueError`` if a rank without samples has tokens; both are by position."""
    for i, (tokens, samples) in enumerate(zip(num_tokens, num_samples, strict=True)):
        if tokens and not samples:
            raise ValueError(
                f"model.backward: position {i} of the plan has no samples, so its loss does "
                f"not count, but its number of tokens is {tokens:g}. Give 0, and no count that "
                "is kept above it (clamp(min=1)). For what is divided by another number, the "
                "same on all ranks, give divisor=."
            )
