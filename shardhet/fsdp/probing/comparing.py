"""Compares what a model computes for some samples with what it computes for others."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardhet.fsdp.microbatch.batching import BatchAxis, Join, Rule
from shardhet.fsdp.probing.law import Law
from shardhet.records.layout import Span

MAX_NODES = 2000  # of an object whose fingerprint is taken
HUGE = 1e4  # times the median: a larger value is a mask's, not a result


def are_close(one: Tensor, other: Tensor, eps: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding.

    The tolerance is the square root of the dtype's epsilon: kernels sum in another order for
    other sizes, while a result that mixes samples differs in the first digits.  ``eps`` is that
    of a narrower dtype in which some of it was computed.
    """
    one, other = one.detach(), other.detach()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    if not one.numel():
        return True
    # Models in double precision may compute some parts, such as norms, in single precision.
    eps = max(torch.finfo(one.dtype).eps, eps, 1e-12)
    magnitude = torch.where(other.isfinite(), other, 0).abs()
    some = magnitude[magnitude > 0]
    if not some.numel():
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    # Masks put huge values beside small ones, whose differences must count too.
    usual = magnitude <= HUGE * some.double().median()
    bar = eps**0.5 * float(magnitude[usual].max())
    return torch.allclose(one, other, rtol=eps**0.5, atol=bar, equal_nan=True)


def joined_like(
    whole: Tensor, parts: Sequence[Tensor], spans: Sequence[Span], rule: Rule
) -> Tensor:
    """The parts joined under the rule, in the shape of ``whole`` if they fit."""
    num_samples = spans[-1].stop
    if isinstance(rule, BatchAxis):
        joined = torch.empty_like(whole)
        for part, span in zip(parts, spans, strict=True):
            if part.shape != rule.shape(whole.shape, span.numel):
                return part  # has another shape, so it compares as different
            rule.put(joined, part, span, num_samples)
        return joined
    if any(part.shape != whole.shape for part in parts):
        return parts[0].new_empty(0)
    if rule is Join.SUM:
        return sum(parts[1:], start=parts[0]).to(whole.dtype)
    if rule is Join.MEAN:
        if not whole.is_floating_point():
            return whole.new_empty(0)
        weighted = [p * (s.numel / num_samples) for p, s in zip(parts, spans, strict=True)]
        return sum(weighted[1:], start=weighted[0])
    same = all(are_close(part, parts[0]) for part in parts)
    return parts[0] if same else parts[0].new_empty(0)


class Cut(NamedTuple):
    """A result for some samples together, and those for two parts of them."""

    whole: Tensor
    parts: Sequence[Tensor]
    spans: Sequence[Span]

    def follows(self, rule: Rule, eps: float) -> bool:
        """Whether the result for all is that of the parts, joined under the rule."""
        return are_close(joined_like(self.whole, self.parts, self.spans, rule), self.whole, eps)

    def laws(self, eps: float) -> set[Join]:
        """Which of the sum and the mean of those of the parts it is, without rows."""
        whole, (one, other), num_samples = self.whole, self.parts, self.spans[-1].stop
        if any(part.shape != whole.shape for part in self.parts):
            return set()
        weighted = [
            part * (span.numel / num_samples)
            for part, span in zip(self.parts, self.spans, strict=True)
        ]
        expected = {Join.SUM: one + other, Join.MEAN: weighted[0] + weighted[1]}
        if not whole.isfinite().all():
            return set(expected)  # backward will say so
        # Right for a mean of which all is in the other part.
        for some, rest in ((one, other), (other, one)):
            if not some.isfinite().all():
                expected = dict.fromkeys(expected, rest)
        return {law for law, each in expected.items() if are_numbers_equal(each, whole, eps)}


@dataclass(frozen=True)
class Fingerprint:
    """The content of an object; equal as long as nothing in it was changed or replaced."""

    content: tuple[Any, ...]
    holds_tensors: bool


def fingerprint(value: Any) -> Fingerprint:
    """The fingerprint of an object and what it refers to, up to ``MAX_NODES`` nodes."""
    content: list[Any] = []
    seen: set[int] = set()
    holds_tensors = False
    waiting = [value]
    while waiting and len(content) < MAX_NODES:
        node = waiting.pop()
        if isinstance(node, Tensor):
            holds_tensors = True
            content.append((id(node), node._version, tuple(node.shape)))
            continue
        if node is None or isinstance(node, bool | int | float | str | bytes | type):
            content.append(node)
            continue
        content.append(id(node))
        if id(node) in seen or (callable(node) and not hasattr(node, "__dict__")):
            continue
        seen.add(id(node))
        waiting += _children(node)
    return Fingerprint(tuple(map(repr, content)), holds_tensors)


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, list | tuple | set | frozenset):
        return list(node)
    if isinstance(node, nn.Module):
        return [*node._parameters.values(), *node._buffers.values(), *node._modules.values()]
    held = list(getattr(node, "__dict__", {}).values())
    if is_dataclass(node):  # it may have slots
        held += [getattr(node, field.name, None) for field in fields(node)]
    slots = [name for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ())]
    return held + [getattr(node, name, None) for name in slots if isinstance(name, str)]


def are_numbers_equal(one: Tensor, other: Tensor, eps: float) -> bool:
    """Equality up to rounding; a loss term of one thousandth must not pass as rounding."""
    if one.shape != other.shape:
        return False
    are_finite = bool(one.isfinite().all()), bool(other.isfinite().all())
    if not all(are_finite):
        return not any(are_finite)
    scale = max(float(one.abs().max()), float(other.abs().max()))
    return float((one - other).abs().max()) <= min(64 * eps, 1e-2) * scale


def check_params(module: nn.Module, storages: Set[int]) -> None:
    """Raise ``Refusal`` if a parameter is not in one of the ``storages`` that hold them."""
    for fqn, param in module.named_parameters():
        if param.untyped_storage()._cdata not in storages:
            what = f"{fqn}: the model's forward has replaced it, or its data, by another tensor"
            raise Law.READ.refusal(what, RuntimeError)
