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

from shardhet.fsdp.microbatch.batching import BatchAxis, Join, Rule, find_axis, named_leaves
from shardhet.fsdp.microbatch.layered import leaves_of, nodes_of, tensors_in
from shardhet.fsdp.microbatch.modes import FunctionMode
from shardhet.fsdp.probing.comparing import Cut, are_close
from shardhet.fsdp.probing.law import Law
from shardhet.fsdp.probing.rules import LARGE, PARTS, SIZES, SMALL

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


def without_samples(outputs: Sequence[Any]) -> list[str]:
    """Where outputs have numbers, or what has a gradient and no row for each sample."""
    first, *others = map(named_leaves, outputs)
    columns = {
        place: [leaf, *(each.get(place) for each in others)] for place, leaf in first.items()
    }
    return [place for place, c in columns.items() if all(map(_is_number, c)) or _are_alike(c)]


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (int, float) or (isinstance(leaf, Tensor) and not leaf.dim())


def _are_alike(column: Sequence[Any]) -> bool:
    """Whether all are tensors of one shape that have a gradient."""
    return all(
        isinstance(each, Tensor)
        and each.requires_grad
        and each.is_floating_point()
        and each.numel()
        and each.shape == column[0].shape
        for each in column
    )


def _growing(small: Tensor, large: Tensor) -> list[tuple[int, int]]:
    return [
        sizes
        for sizes in zip(small.shape, large.shape, strict=False)
        if sizes[0] * LARGE == sizes[1] * SMALL and all(sizes)
    ]


def problem_of_pairs(small: Any, large: Any) -> str | None:
    """What is wrong with outputs that have two dimensions for samples."""
    pairs = zip(tensors_in(small), tensors_in(large), strict=False)
    for i, (one, other) in enumerate(pairs):
        if len(_growing(one, other)) > 1:
            return Law.APART.says(
                f"model(...): output {i} of shape {tuple(one.shape)} for {SMALL} samples and "
                f"{tuple(other.shape)} for {LARGE} compares the samples of a rank's batch with "
                "each other, as contrastive losses do, which take features of all ranks "
                "(shardhet.gather_features)"
            )
    return None


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
    if not wanted or not outputs:
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


def join_by_gradients(whole: Tensor, parts: Sequence[Tensor]) -> Join | None:
    """The only join under which the parameters' gradients agree; None if it is not unique."""
    expected, *others = [
        gradients_of([each], {}, [torch.ones_like(each)]) for each in (whole, *parts)
    ]
    fitting = [
        join
        for join in (Join.SHARED, Join.MEAN, Join.SUM)
        if all(
            Cut(grad, [each[param] for each in others], PARTS).follows(join, 0.0)
            for param, grad in expected.items()
            if all(param in each for each in others)
        )
    ]
    return fitting[0] if len(fitting) == 1 else None


# What is found of gradients.
BENT = ": its gradients do not grow as the gradient that it gets"
MIXED = ": the gradients of two parts of a batch do not add up to those of both"
