"""Compares what a model computes for some samples with others, by the law that makes it exact.

A refusal says who breaks the law, what was found, what is needed and one thing to do.
docs/limits.md lists usual causes.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardhet.fsdp.microbatch.batching import BatchAxis, Join, Rule
from shardhet.records.layout import Span


class Refusal(BaseException):
    """Carries ``error`` past the model's own ``except`` clauses."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Law(Enum):
    """What is needed, and what to do."""

    INDEPENDENT = (
        "needs one row per sample, the same whichever other samples are with it",
        "Mix samples inside a unit, name the dimension that holds them "
        "(HetFSDP(batch_dim=...)), or let one rank compute all samples at once",
    )
    ADDS_UP = (
        "a number without samples must be the sum, or the mean, of those of parts of a batch",
        "Return what belongs to each sample, a sum, or a count as it is, which may be zero, "
        "in a tensor (torch.tensor(len(x), device=x.device) for len(x)); "
        "leave out a load-balancing loss (output_router_logits=False), or let one rank compute "
        "all samples at once",
    )
    GRADIENTS = (
        "gradients must be sums over samples, and grow as the loss does, which rounds and "
        "stages divide at the end",
        "Leave out the hook of a tensor or module, the autograd.Function or the option that "
        "mixes samples or clips (model.clip_grad_norm_ clips after backward), or let one rank "
        "compute all samples at once, in one round without stages",
    )
    REPEATS = (
        "each rank, microbatch and recomputation runs it once more, and must find and leave "
        "everything as in one process",
        "Compute it from each sample, pass it to the unit as an argument, count calls in a "
        "plain number that nothing depends on, and draw by torch inside a unit (nn.Dropout), "
        "or leave that out (layerdrop=0.0)",
    )
    PASSED = (
        "a microbatch sees only what are arguments and results of its unit, and gradients "
        "flow through them alone",
        "Pass it to the unit's forward, read a parameter from its module there "
        "(self.layer.weight), and return what is used outside instead of keeping it in an "
        "attribute, a KV cache or a hook (output_attentions=False, config.use_cache=False)",
    )
    READ = (
        "parameters and results are copies there, which may be read and not written",
        "Make a new tensor (x = x + y for x += y), leave out what writes in forward (max_norm "
        "of an embedding), and write this rank's rows between steps (with torch.no_grad(): "
        "for param in model.parameters(): ...)",
    )

    ALIKE = (
        "all microbatches and steps have to be as when the model was first called in this way",
        "Let it depend on the batch in the same way, call units in the same order and equally "
        "often, return one row for each sample or compute outside of units what is of all, or "
        "let a flag (True or False) among the model's attributes or arguments choose",
    )

    def error(self, found: str, kind: Any = ValueError) -> Exception:
        """What is said of what was ``found``."""
        needed, advice = self.value
        error: Exception = kind(f"{found}, but {needed}. {advice}.")
        return error

    def refusal(self, found: str, kind: Any = ValueError) -> Refusal:
        """To be raised past the model's own ``except`` clauses."""
        return Refusal(self.error(found, kind))


# Sentences of their own.

CACHED = (
    "model(...): with a KV cache (config.use_cache=True) it computes something else than "
    "without, for instance for position_ids that begin anew within a row: without a cache "
    "they mean packed sequences that do not see each other. HetFSDP trains without caches. Say "
    "that you mean it, for plain PyTorch too: model.config.use_cache = False before wrapping; "
    "or leave out the argument that makes the difference."
)
UNFORESEEN = (
    "{} of a kind that no probe can foresee, so it cannot be shown that samples do not mix "
    "({}) Draw them with torch.rand, randn, randint, bernoulli, multinomial or dropout."
)
DRAWS = "model(...): it draws from {}, and what it computes depends on that"
KEPT = (
    "model(...): a forward keeps values of its samples for the next one (attribute {}), and "
    "computes with them"
)


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

    def reductions(self, eps: float) -> set[Join]:
        """Which of the sum and the mean of those of two parts it is, without rows."""
        whole, reductions = self.whole, {Join.SUM, Join.MEAN}
        if any(part.shape != whole.shape for part in self.parts):
            return set()
        if not whole.isfinite().all():
            return reductions  # backward will say so
        # Right for a mean of which all is in the other part.
        pairs = (self.parts, self.parts[::-1])
        other = next((rest for one, rest in pairs if not one.isfinite().all()), None)
        return {
            law
            for law in reductions
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
    with torch._C.DisableTorchFunctionSubclass():  # nn.LSTM lists parameters it had once
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
