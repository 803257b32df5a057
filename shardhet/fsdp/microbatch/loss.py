"""Applies ``loss_fn`` to the output of the last unit, microbatch by microbatch."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.fsdp.microbatch.layered import tensors_in
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitModule
from shardhet.records.plan import Plan

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
        if self._loss and not any(id(each) in returned for each in self._loss):
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
    ignored = getattr(loss_fn, "ignore_index", -100)

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


class Unmade:
    """In place of a result that a rank without samples cannot make: to look into it raises."""

    _kind = ""  # the name of its class

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"model(...): this rank has no samples, and the model returns a {self._kind}, "
            f"which cannot be made without (its {name!r} is asked for). Return tensors, in "
            "tuples, dicts or dataclasses of a module, and make the object after model(...)."
        )

    def _refuse(self, *_args: Any) -> Any:
        return self.entries

    __iter__ = __len__ = __getitem__ = __call__ = _refuse


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
