"""Compares what a model computes for some samples with what it computes for others."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import fields, is_dataclass
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


def are_same(parts: Sequence[Tensor]) -> bool:
    """Whether all are equal up to rounding."""
    return all(are_close(part, parts[0]) for part in parts)


class Cut(NamedTuple):
    """A result for some samples together, and those for parts of them."""

    whole: Tensor
    parts: Sequence[Tensor]
    spans: Sequence[Span]

    def joined(self, rule: Rule) -> Tensor | None:
        """The parts joined under the rule, in the shape of the whole; None if they do not fit
        or are not the same under it.
        """
        whole, parts = self.whole, self.parts
        if isinstance(rule, BatchAxis):
            joined, num_samples = torch.empty_like(whole), self.spans[-1].stop
            for part, span in zip(parts, self.spans, strict=True):
                if part.shape != rule.shape(whole.shape, span.numel):
                    return None
                rule.put(joined, part, span, num_samples)
            return joined
        if any(part.shape != whole.shape for part in parts):
            return None
        if rule is Join.SHARED:
            return parts[0] if are_same(parts) else None
        if rule is Join.MEAN and not whole.is_floating_point():
            return None
        return self._total(rule).to(whole.dtype)

    def _total(self, rule: Join) -> Tensor:
        """Their sum, or mean."""
        num_samples = self.spans[-1].stop
        weights = [s.numel / num_samples if rule is Join.MEAN else 1 for s in self.spans]
        first, *rest = [part * w for part, w in zip(self.parts, weights, strict=True)]
        return sum(rest, start=first)

    def follows(self, rule: Rule, eps: float) -> bool:
        """Whether the result for all is that of the parts, joined under the rule."""
        joined = self.joined(rule)
        return joined is not None and are_close(joined, self.whole, eps)

    def laws(self, eps: float) -> set[Join]:
        """Which of the sum and the mean of those of two parts it is, without rows."""
        whole, laws = self.whole, {Join.SUM, Join.MEAN}
        if any(part.shape != whole.shape for part in self.parts):
            return set()
        if not whole.isfinite().all():
            return laws  # backward will say so
        # Right for a mean of which all is in the other part.
        pairs = (self.parts, self.parts[::-1])
        other = next((rest for one, rest in pairs if not one.isfinite().all()), None)
        return {
            law
            for law in laws
            if are_numbers_equal(self._total(law) if other is None else other, whole, eps)
        }


def nodes_in(value: Any) -> Iterator[Any]:
    """An object and what it refers to, up to ``MAX_NODES``; some of them more than once."""
    seen: set[int] = set()
    waiting = [value]
    for _ in range(MAX_NODES):
        if not waiting:
            return
        yield (node := waiting.pop())
        is_leaf = isinstance(node, Tensor | bool | int | float | str | bytes | type | None)
        if is_leaf or id(node) in seen or (callable(node) and not hasattr(node, "__dict__")):
            continue
        seen.add(id(node))
        waiting += _children(node)


def fingerprint(value: Any) -> list[str]:
    """Equal as long as nothing in an object was changed or replaced."""
    return list(map(_mark, nodes_in(value)))


def _mark(node: Any) -> str:
    if isinstance(node, Tensor):
        return f"{id(node)} {node._version} {tuple(node.shape)}"
    is_plain = isinstance(node, bool | int | float | str | bytes | type | None)
    return repr(node) if is_plain else str(id(node))


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
