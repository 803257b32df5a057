"""Finds samples that are not apart: in outputs of a model, or only in its backward.

If samples are apart in forward, they are apart in backward, unless that is not torch's own: a
tensor hook may divide a gradient by its norm, and a Function in Python may do anything.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from shardhet.fsdp.microbatch.batching import BatchAxis, Rule, find_axis
from shardhet.fsdp.microbatch.layered import leaves_of, nodes_of, tensors_in
from shardhet.fsdp.microbatch.modes import FunctionMode
from shardhet.fsdp.probing.comparing import are_close, joined_like
from shardhet.fsdp.probing.rules import LARGE, PARTS, SIZES, SMALL
from shardhet.records.layout import Span

ATTACHED = "AttachedBackward"
_KNOWN = (ATTACHED, "CheckpointFunctionBackward")  # torch's gives no gradient of one tensor
Apart = Sequence[tuple[int, Sequence[BatchAxis]]]  # indices, and where samples may be


def outputs_apart(small: Any, large: Any) -> list[tuple[int, list[BatchAxis]]]:
    """Outputs that have a gradient, and rows for each sample."""
    found = []
    pairs = zip(tensors_in(small), tensors_in(large), strict=False)
    for i, (one, other) in enumerate(pairs):
        if one.requires_grad and len(_growing(one, other)) == 1:
            with suppress(ValueError):  # its length depends on which samples there are
                found.append((i, find_axis(one, other, SIZES)))
    return found


def _growing(small: Tensor, large: Tensor) -> list[tuple[int, int]]:
    return [
        sizes
        for sizes in zip(small.shape, large.shape, strict=False)
        if sizes[0] * LARGE == sizes[1] * SMALL and all(sizes)
    ]


def problem_of_outputs(
    small: Any, large: Any, apart: Apart, eps: float, *, is_alone: bool
) -> str | None:
    """What is wrong with outputs for two and for three samples, of which two are the same."""
    ones, others = tensors_in(small), tensors_in(large)
    for i, (one, other) in enumerate(zip(ones, others, strict=False)):
        if len(_growing(one, other)) > 1 and not is_alone:
            return _pairs(i, one, other)
    return problem_of_some(small, large, apart, PARTS[0], eps)


def problem_of_order(small: Any, swapped: Any, apart: Apart, eps: float) -> str | None:
    """What is wrong with outputs for two samples and for the same in the other order."""
    ones, others = tensors_in(small), tensors_in(swapped)
    for i, axes in apart:
        if i >= len(others) or others[i].shape != ones[i].shape:
            return _mixed(i, ones[i])
        ordered = [axis.select(others[i], (1, 0), SMALL) for axis in axes]
        if not any(are_close(each, ones[i], eps) for each in ordered):
            return _mixed(i, ones[i])
    return None


def problem_of_others(large: Any, changed: Any, apart: Apart, eps: float) -> str | None:
    """What is wrong with outputs if only the first of three samples has been changed."""
    ones, others = tensors_in(large), tensors_in(changed)
    for i, axes in apart:
        pairs = [
            [axis.narrow(each[i], Span(1, LARGE), LARGE) for each in (others, ones)]
            for axis in axes
        ]
        if not any(are_close(one, other, eps) for one, other in pairs):
            return _mixed(i, ones[i])
    return None


def problem_of_some(some: Any, large: Any, apart: Apart, span: Span, eps: float) -> str | None:
    """What is wrong with outputs for three samples, and for those of ``span`` alone."""
    ones, others = tensors_in(some), tensors_in(large)
    for i, axes in apart:
        pieces = [axis.narrow(others[i], span, LARGE) for axis in axes]
        if not any(are_close(each, ones[i], eps) for each in pieces):
            return _mixed(i, others[i])
    return None


def _pairs(index: int, small: Tensor, large: Tensor) -> str:
    return (
        f"model(...): output {index} of shape {tuple(small.shape)} for {SMALL} samples and "
        f"{tuple(large.shape)} for {LARGE} compares the samples of a rank's batch with each "
        "other, as contrastive losses do, so it would depend on the plan. Return the features "
        "of each sample, and compute the loss from those of all ranks: "
        "shardhet.gather_features(features)."
    )


def _mixed(index: int, large: Tensor) -> str:
    return (
        f"model(...): output {index} of shape {tuple(large.shape)}, computed outside of units, "
        "depends for one sample on the other samples of the rank's batch, so it would depend "
        "on the plan. Mix samples inside a unit, or let one rank compute all samples at once."
    )


# Backwards of a model's own


class TensorHooks(FunctionMode):
    """Notes whether tensors get hooks while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.are_found = False

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function."""
        self.are_found |= func is Tensor.register_hook
        return func(*args, **kwargs)


def has_own_backward(tensor: Tensor) -> bool:
    """Whether a Function in Python is in the graph of the tensor."""
    return any(
        isinstance(node, BackwardCFunction) and type(node).__name__ not in _KNOWN
        for node in nodes_of(tensor)
    )


def gradients_of(
    outputs: Sequence[Tensor], inputs: Mapping[Any, Any], grads: Sequence[Tensor] = ()
) -> dict[Any, Tensor]:
    """Gradients by key of ``inputs``, and of parameters, where outputs get ``grads``, or
    themselves, as gradients.
    """
    params = {
        each: each
        for output in outputs
        for each in leaves_of(output)
        if isinstance(each, nn.Parameter)
    }
    wanted = {**inputs, **params}
    if not wanted:
        return {}
    with torch.enable_grad():
        found = torch.autograd.grad(
            list(outputs),
            list(wanted.values()),
            list(grads) or [each.detach() for each in outputs],
            allow_unused=True,
            retain_graph=True,
        )
    return {key: g for key, g in zip(wanted, found, strict=True) if g is not None}


class Attached(torch.autograd.Function):
    """A copy of a unit's result: it requires a gradient, and discards it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, rule: Rule | None) -> Tensor:
        """``anchor`` requires a gradient."""
        ctx.rule = rule
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Discard it."""
        return None, None, None


def attached(anchor: Tensor, result: Tensor, rule: Rule | None) -> Tensor:
    """A unit's result, attached to ``anchor`` so that gradients can be traced back to it."""
    return Attached.apply(anchor, result, rule)  # type: ignore[no-untyped-call]


def is_linear_outside(output: Tensor, eps: float) -> bool:
    """Whether gradients of a tensor that is computed outside of units grow as its own."""
    nodes = [node for node in nodes_of(output) if type(node).__name__ == ATTACHED]
    starts = {i: GradientEdge(node, 0) for i, node in enumerate(nodes)}
    return is_linear(
        lambda scale: gradients_of([output], starts, [scale * output.detach()]), eps
    )


def is_apart(output: Tensor, axis: BatchAxis, eps: float) -> bool:
    """Whether gradients of a tensor that is computed outside of units, from three samples, are
    apart: the sum of those of two and of the third, where each sample gets its own.
    """
    nodes = [node for node in nodes_of(output) if type(node).__name__ == ATTACHED]
    starts = {i: GradientEdge(node, 0) for i, node in enumerate(nodes)}
    parts = []
    for span in PARTS:
        grad = torch.zeros_like(output)
        axis.put(grad, axis.narrow(output.detach(), span, LARGE), span, LARGE)
        parts.append(gradients_of([output], starts, [grad]))
    for key, whole in gradients_of([output], starts).items():
        found = [part[key] for part in parts if key in part]
        if not found or not are_close(sum(found[1:], start=found[0]), whole, eps):
            return False
        rule = nodes[key].rule if isinstance(key, int) else None
        if isinstance(rule, BatchAxis):
            first, other = (rule.narrow(each, PARTS[0], LARGE) for each in (found[0], whole))
            if not are_close(first, other, eps):
                return False
    return True


def is_linear(gradients: Callable[[float], Mapping[Any, Tensor]], eps: float) -> bool:
    """Whether gradients grow as what is given: ``gradients`` has them for a scale of it."""
    once = gradients(1.0)
    large = 2.0 ** (6 if eps > torch.finfo(torch.float32).eps else 20)  # float16 ends early
    for scale in (large, 1 / large):
        scaled = gradients(scale)
        if scaled.keys() != once.keys() or not all(
            are_close(scaled[key] / scale, grad, eps) for key, grad in once.items()
        ):
            return False
    return True


def hook_is_apart(
    hook: Callable[..., Any],
    module: nn.Module,
    calls: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
    rules: Sequence[Rule],
    eps: float,
) -> bool:
    """Whether a backward hook of a unit's module keeps samples apart.  ``calls`` are arguments
    and results of the whole batch and of its parts, which stand for their gradients.
    """
    whole, *parts = [hook(module, tuple(given), tuple(made)) for given, made in calls]
    if whole is None:
        return True
    whole, *parts = [[each] if isinstance(each, Tensor) else each for each in (whole, *parts)]
    for i, (grad, rule) in enumerate(zip(whole, rules, strict=False)):
        if isinstance(grad, Tensor) and isinstance(rule, BatchAxis):
            found = joined_like(grad, [part[i] for part in parts], PARTS, rule)
            if not are_close(found, grad, eps):
                return False
    return True


def hook_is_linear(
    hook: Callable[..., Any],
    module: nn.Module,
    call: tuple[Sequence[Tensor], Sequence[Tensor]],
    eps: float,
) -> bool:
    """Whether what a backward hook of a unit's module returns grows as what it is given:
    arguments and results of a ``call``, which stand for their gradients.
    """

    def returned(scale: float) -> dict[int, Tensor]:
        scaled = (
            tuple(scale * each if each.is_floating_point() else None for each in tensors)
            for tensors in call
        )
        found = hook(module, *scaled)
        found = (found,) if isinstance(found, Tensor) else found or ()
        return {i: each for i, each in enumerate(found) if isinstance(each, Tensor)}

    return is_linear(returned, eps)


def bends_gradients(where: str) -> str:
    """The message of a refusal."""
    return (
        f"{where}: its gradients do not grow as the gradient that it gets. A hook of a tensor "
        "or module, or an autograd.Function of the model's, clips gradients, perhaps. In a "
        "step of several rounds, or of stages, losses are divided by the number of all tokens "
        "at the end only, so it would meet other numbers than in one process. Clip after "
        "backward (model.clip_grad_norm_), or give a plan of one round without stages."
    )


def mixes_backward(where: str) -> str:
    """The message of a refusal."""
    return (
        f"{where}: the gradients of two parts of a batch do not add up to those of both. A "
        "hook of a tensor or module, or an autograd.Function of the model's, mixes samples in "
        "backward (it divides gradients by their norm, perhaps), so the result would depend on "
        "the plan. Leave it out, or let one rank compute all samples at once."
    )
