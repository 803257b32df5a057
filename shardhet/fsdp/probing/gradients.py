"""Gradients of what a probe computes: whether those of samples add up, and grow as the loss.

If a forward keeps samples apart, so does its backward, unless that is not torch's own: a tensor
hook may divide a gradient by its norm, and a Function in Python may do anything.

Of a loss gradients tell what it is a mean over.  If it is S/N, a sum over what counts in each
sample, those for all samples are those for two parts, weighted by their shares of N.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from shardhet.fsdp.microbatch.batching import BatchAxis, Join, Rule
from shardhet.fsdp.microbatch.layered import leaves_of, nodes_of
from shardhet.fsdp.probing.comparing import are_close
from shardhet.fsdp.probing.rules import PARTS
from shardhet.records.layout import Span

ATTACHED = "AttachedBackward"
# Checkpoints of torch give no gradient of one tensor; tiles keep a law of their own.
_KNOWN = (ATTACHED, "CheckpointFunctionBackward", "_VisitFunctionBackward")

Gradients = Mapping[Any, Tensor]


def has_own_backward(tensor: Tensor) -> bool:
    """Whether a Function in Python is in the graph of the tensor."""
    return any(
        isinstance(node, BackwardCFunction) and type(node).__name__ not in _KNOWN
        for node in nodes_of(tensor)
    )


def gradients_of(
    outputs: Sequence[Tensor], inputs: Mapping[Any, Any], grads: Sequence[Tensor]
) -> dict[Any, Tensor]:
    """Gradients by key of ``inputs``, and of parameters, where outputs get ``grads``."""
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
            list(grads),
            allow_unused=True,
            retain_graph=True,
        )
    return {key: g for key, g in zip(wanted, found, strict=True) if g is not None}


class Attached(torch.autograd.Function):
    """A copy of a unit's result: it requires a gradient, and discards it.  So gradients can be
    traced back to the result, by its key.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, key: Any) -> Tensor:
        """``anchor`` requires a gradient."""
        ctx.key = key
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Discard it."""
        return None, None, None


def gradients_outside(tensor: Tensor, scale: float = 1.0) -> dict[Any, Tensor]:
    """Gradients of a tensor that is computed outside of units, by the keys of their results and
    by parameters, of which sums with unlike weights are taken.

    Rows get themselves as gradients, each sample its own, and a single number gets 1.
    """
    nodes = [node for node in nodes_of(tensor) if type(node).__name__ == ATTACHED]
    given = tensor.detach() if tensor.dim() else torch.ones_like(tensor)
    found = gradients_of(
        [tensor], {node.key: GradientEdge(node, 0) for node in nodes}, [scale * given]
    )
    return {
        key: _weighted_sum(grad) if isinstance(key, nn.Parameter) else grad
        for key, grad in found.items()
    }


def _weighted_sum(grad: Tensor) -> Tensor:
    """A sum over the first dimension under which no two gradients are likely to be one."""
    weights = torch.arange(1, grad.shape[0] + 1 if grad.dim() else 2, device=grad.device)
    return weights.sqrt().to(grad.dtype) @ grad.reshape(len(weights), -1)


def go_together(shares: Sequence[Any], bar: float) -> bool:
    """Whether four measured shares can come from one weighted mean. ``shares`` are those of {a,
    b} in {a, b, c}, of {a} in {a, b, c}, of {a, b} in {a, b, a}, and of {b} in {b, c}. A share
    is nan if any value would fit.
    """
    of_ab, of_a, of_both, of_b = shares
    return not (
        abs(of_a * of_both - of_ab * (1 - of_both)) > bar * (1 + of_ab + of_a)
        or abs(of_ab - of_a - of_b * (1 - of_a)) > bar * (3 - of_b - of_a)
    )


class GradientCut(NamedTuple):
    """Gradients for some samples together, and those for two parts of them."""

    whole: Gradients
    parts: Sequence[Gradients]
    spans: Sequence[Span]
    rule_of: Callable[[Any], Rule]  # by key; what is shared has the sum of those of parts
    bar: float  # rounding that is allowed, relative to the largest
    noise: float = 1e-6  # beside the largest of all, what is so small is zero but for rounding

    def add_up(self, *, as_mean: bool = False) -> bool:
        """Whether those of the parts make those for all, of a sum or a mean over samples."""
        num_samples = self.spans[-1].stop
        return self.follow(*(s.numel / num_samples if as_mean else 1.0 for s in self.spans))

    def follow(self, *weights: float) -> bool:
        """Whether those of the parts, weighted, make those for all."""
        found = self._residual(weights)
        return not len(found) or float(found.abs().max()) <= self.bar

    def share(self, numbers: Sequence[float], eps: float) -> float | None:
        """If the number is a mean, the weight of the first part in it: the value that fits the
        gradients best. nan if every weight fits, None if the number is no mean.

        ``numbers`` are those of which these are the gradients, and ``eps`` is of their dtype.
        """
        of_other, change = self._residual((0.0, 1.0)), self._residual((1.0, 0.0))
        change -= of_other
        share = -float(change @ of_other) / float(change @ change) if change.any() else nan
        weight = 1.0 if isnan(share) else share
        one, first, other = [0.0 if isnan(each) else each for each in numbers]
        rounding = min(64 * eps, 1e-2) * max(map(abs, (one, first, other)))
        error = abs(other + weight * (first - other) - one)
        is_near = error <= rounding + self.bar * abs(first - other)
        is_share = -self.bar <= weight <= 1 + self.bar
        return share if is_near and is_share and self.follow(weight, 1 - weight) else None

    def _residual(self, weights: Sequence[float]) -> Tensor:
        """What weighted parts have beside the whole, relative to its largest for each key."""
        found = [torch.empty(0).double()]
        # Of a mean over nothing there are none.
        whole, *parts = [
            {key: g.nan_to_num(0.0, 0.0, 0.0) for key, g in each.items()}
            for each in (self.whole, *self.parts)
        ]
        largest = {key: float(g.abs().max()) for key, g in whole.items() if g.numel()}
        noise = self.noise * max(largest.values(), default=0.0)
        for key, grad in whole.items():
            weighted = [
                weight * part[key] if key in part else None
                for weight, part in zip(weights, parts, strict=True)
            ]
            scale = max(largest.get(key, 0.0), noise) or 1.0
            found += [
                (joined - grad).flatten().double().cpu() / scale
                for joined in self._joined(grad, weighted, self.rule_of(key))
            ]
        return torch.cat(found)

    def _joined(
        self, whole: Tensor, parts: Sequence[Tensor | None], rule: Rule
    ) -> Iterator[Tensor]:
        pairs = [(p, s) for p, s in zip(parts, self.spans, strict=True) if p is not None]
        if isinstance(rule, BatchAxis):
            joined = torch.zeros_like(whole)
            for part, span in pairs:
                if part.shape != rule.shape(whole.shape, span.numel):
                    return  # as of the longest of the samples
                rule.put(joined, part, span, self.spans[-1].stop)
            yield joined
        elif rule is Join.SHARED:
            yield sum((part for part, _ in pairs), start=torch.zeros_like(whole))
        else:  # it depends on what is joined, of all samples, by a factor
            for part, span in pairs:
                num_all = self.spans[-1].stop if rule is Join.MEAN else span.numel
                yield part * (num_all / span.numel)


def is_linear(gradients: Callable[[float], Gradients], eps: float) -> bool:
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
    bar = torch.finfo(whole.dtype).eps ** 0.5
    cut = GradientCut(expected, others, PARTS, lambda _: Join.SHARED, bar)
    reductions = {
        Join.SHARED: cut.follow(1.0, 0.0),
        Join.MEAN: cut.add_up(as_mean=True),
        Join.SUM: cut.add_up(),
    }
    fitting = [join for join, fits in reductions.items() if fits]
    return fitting[0] if len(fitting) == 1 else None


# What is found of gradients, and where.
OUTSIDE = ", computed outside of units"
NONLINEAR = ": its gradients do not grow as the gradient that it gets"
MIXED = ": the gradients of two parts of a batch do not add up to those of both"
