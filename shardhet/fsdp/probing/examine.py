"""Finds the rules of one call, by calling it on the whole batch and on pieces of it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from shardhet.comm.channel import progress
from shardhet.fsdp.microbatch.batching import (
    BatchAxis,
    BatchingRules,
    Join,
    Layout,
    Rule,
    flatten,
    storage_of,
    unflatten,
)
from shardhet.fsdp.microbatch.chosen import Fewer
from shardhet.fsdp.microbatch.layered import cut, tensors_in, writes_on_input
from shardhet.fsdp.probing.comparing import Cut, Law, Refusal, are_same
from shardhet.fsdp.probing.gradients import (
    MIXED,
    NONLINEAR,
    GradientCut,
    gradients_of,
    is_linear,
    join_by_gradients,
)
from shardhet.fsdp.probing.probed_call import (
    CallRunner,
    ProbedCall,
    Seen,
    copies,
    filled,
    numbers_in,
)
from shardhet.fsdp.probing.rules import (
    LARGE,
    OF_SOME,
    OTHER_PARTS,
    PARTS,
    SIZES,
    SMALL,
    RuleFinder,
    looks_like_mask,
    mixed,
    readings,
)
from shardhet.fsdp.probing.watch import Watcher
from shardhet.records.layout import Span

MAX_READINGS = 32  # combinations of rules that are tried for a call's arguments


@dataclass(eq=False, kw_only=True)
class Examiner:
    """Finds rules of calls."""

    runner: CallRunner
    watcher: Watcher
    splits: bool  # whether any rank has several microbatches
    divides_late: bool  # whether losses are divided by their tokens after backward
    is_certain: bool = True  # False if other values may tell more
    aliased: frozenset[int] = frozenset()  # outputs of the last call, see _aliased

    def __post_init__(self) -> None:
        self._decide = RuleFinder(self.watcher, splits=self.splits)

    def rules_of(self, seen: Seen, large: ProbedCall) -> tuple[BatchingRules, Any]:
        """The rules of a call that was seen with fewer samples, and the output of ``large``."""
        if self.watcher.made_rows.has_ragged(large.tensors):
            return self._at_once(seen, large)
        pairs = zip(large.tensor_by_name.items(), seen.call.tensors, strict=True)
        find = partial(self._decide.of_input, large.fqn)
        inputs = [find(name, small, tensor) for (name, tensor), small in pairs]
        return self._examine(seen, large, inputs)

    def _at_once(self, seen: Seen, large: ProbedCall) -> tuple[BatchingRules, Any]:
        """As ``rules_of``, for a call that is never cut: its rows are ragged."""
        rules = seen.rules([Join.SHARED] * len(large.tensors))
        self.watcher.draws = False
        output = self._run_whole(large, seen, rules.inputs)
        if self.watcher.draws or seen.has_own_backward:
            raise Refusal(ValueError(_ONLY_AT_ONCE.format(large.fqn)))
        return replace(rules, outputs=(Join.SHARED,) * len(seen.outputs)), output

    def known_from(self, seen: Seen, call: ProbedCall) -> dict[str, Rule]:
        """Rules of those arguments that the call seen before had too."""
        before = seen.call.tensor_by_name
        return {
            name: self._decide.of_input("", name, before[name], tensor)
            for name, tensor in call.tensor_by_name.items()
            if name in before
        }

    def infer(
        self,
        call: ProbedCall,
        num_samples: int,
        known: Mapping[str, Rule],
        fewer: Fewer | None = None,
    ) -> tuple[BatchingRules, Any]:
        """As ``rules_of``, of a call that was not seen; ``known`` are rules of some arguments.

        Tries all rules that the shapes of the other arguments allow; exactly one must fit.  A
        call on one sample is never cut, so that all that fit give the same, for this call.
        Of samples with many tokens ``fewer`` are tried first, and all if no rules fit.
        """
        tensors = call.tensor_by_name
        options = [
            readings(t, known.get(name), num_samples, known.values())
            for name, t in tensors.items()
        ]
        fitting: list[tuple[BatchingRules, Any]] = []
        for rules in islice(product(*options), MAX_READINGS):
            small, large = [
                call.on(
                    [
                        rule.select(
                            fewer.of(t, but=rule.dim) if fewer else t, range(size), num_samples
                        )
                        for t, rule in zip(tensors.values(), rules, strict=True)
                    ]
                )
                for size in SIZES
            ]
            try:
                fitting.append(self._examine(self.runner.look(small)[0], large, rules))
            except (Exception, Refusal):
                continue  # these rules do not fit
        if len(fitting) == 1 or (fitting and not self.splits):
            return fitting[0]
        if fewer is not None and not fitting:
            return self.infer(call, num_samples, known)
        if fitting and num_samples == 1:  # the first splits most arguments
            return replace(fitting[0][0], is_for_one_sample=True), fitting[0][1]
        raise Refusal(
            ValueError(
                f"unit {call.fqn!r} is called with other kinds of arguments than when the "
                "model was first called in this way, and it is not clear which of "
                f"{', '.join(name for name in tensors if name not in known)} hold samples. "
                "Pass tensors in the same places at every step (a mask always or never)."
            )
        )

    def _examine(
        self, seen: Seen, large: ProbedCall, inputs: Sequence[Rule]
    ) -> tuple[BatchingRules, Any]:
        self.watcher.is_unpredictable = False
        self._decide.undecided.clear()
        self.is_certain &= not any(
            isinstance(rule, BatchAxis) and rule.is_alike for rule in inputs
        )
        rules, kept = seen.rules(inputs), large.copy()  # the call may write to its inputs
        output = self._run_whole(large, seen, inputs)
        run = self._run
        is_cut = self.splits and rules.is_batched
        pieces = _pieces(kept, rules, (*PARTS, *OTHER_PARTS)) if is_cut else []
        parts = []
        for i, piece in enumerate(pieces):
            if i == 0 and kept.is_like(seen.call):
                found, numbers = seen.outputs, seen.numbers
            else:
                of_piece = run(piece)
                found, numbers = copies(of_piece), numbers_in(of_piece)
            if numbers != numbers_in(output):
                rules = replace(rules, returns_numbers_of_samples=True)
            parts.append(found)
        rules = replace(rules, outputs=self._outputs(seen, kept, output, parts, pieces))
        if joins := _joins(rules.outputs, parts):
            _check_joins(run, kept, rules, joins, eps=self.watcher.eps)
        module = self.runner.module_of(kept)
        has_own = seen.has_own_backward or module._backward_hooks or module._backward_pre_hooks
        if has_own and (pieces or self.divides_late) and torch.is_grad_enabled():
            self._check_backward(kept, pieces[: len(PARTS)], rules)
        if pieces:
            output = joined_outputs(output, parts[: len(PARTS)], rules.outputs)
        return rules, output

    def _outputs(
        self,
        seen: Seen,
        call: ProbedCall,
        output: Any,
        parts: Sequence[Sequence[Tensor]],
        pieces: Sequence[ProbedCall],
    ) -> tuple[Rule, ...]:
        """The rules of the results of a call, given those of its parts, cut in both ways."""
        found = []
        for i, whole in enumerate(tensors_in(output)):
            of_parts = [part[i] for part in parts]
            ways = ((of_parts[:2], PARTS), (of_parts[2:], OTHER_PARTS)) if parts else ()
            cuts = [Cut(whole, some, spans) for some, spans in ways]
            found.append(self._decide.of_output(call.fqn, i, seen.outputs[i], whole, cuts))
        for i in self._decide.undecided:
            runs = (call, *pieces[: len(PARTS)])
            results = [tensors_in(self._run(each, with_graph=True))[i] for each in runs]
            is_told = results[0].requires_grad
            decided = join_by_gradients(results[0], results[1:]) if is_told else None
            found[i] = decided or Join.SUM
            self.is_certain &= decided is not None
        return tuple(found)

    def _check_backward(
        self, whole: ProbedCall, pieces: Sequence[ProbedCall], rules: BatchingRules
    ) -> None:
        """Raise if gradients of the pieces do not add up to those of the whole."""
        progress.mark(f"backward of unit {whole.fqn!r}")
        expected, *parts = [self._gradients(each, rules) for each in (whole, *pieces)]
        progress.mark(f"forward of unit {whole.fqn!r}")

        def rule_of(key: Any) -> Rule:
            rule = rules.inputs[key] if isinstance(key, int) else Join.SHARED
            return rule if isinstance(rule, BatchAxis) else Join.SHARED

        cut = GradientCut(expected, parts, PARTS, rule_of, max(self.watcher.eps, 1e-12) ** 0.5)
        if pieces and not cut.add_up():
            raise Law.GRADIENTS.refusal(f"unit {whole.fqn!r}{MIXED}")
        if self.divides_late and not is_linear(
            lambda scale: self._gradients(whole, rules, scale), self.watcher.eps
        ):
            raise Law.GRADIENTS.refusal(f"unit {whole.fqn!r}{NONLINEAR}")

    def _gradients(
        self, call: ProbedCall, rules: BatchingRules, scale: float = 1.0
    ) -> dict[Any, Tensor]:
        """Gradients of outputs with samples: of floating inputs by index, and of parameters.

        Each output gets ``scale`` times itself as its gradient.  Backward hooks of the module
        see and change them, as they do around a visit of it.
        """
        leaves = [
            t.detach().clone().requires_grad_(t.is_floating_point()) for t in call.tensors
        ]
        output = self._run(call, with_graph=True, leaves=leaves)
        module = self.runner.module_of(call)
        outputs = tensors_in(output)
        grads: Any = tuple(
            scale * each.detach()
            if isinstance(rule, BatchAxis) and each.requires_grad
            else None
            for each, rule in zip(outputs, rules.outputs, strict=True)
        )
        for hook in module._backward_pre_hooks.values():
            grads = _as_tuple(hook(module, grads)) or grads
        pairs = [
            (each, grad) for each, grad in zip(outputs, grads, strict=True) if grad is not None
        ]
        inputs = {i: leaf for i, leaf in enumerate(leaves) if leaf.requires_grad}
        found = gradients_of([t for t, _ in pairs], inputs, [grad for _, grad in pairs])
        for hook in module._backward_hooks.values():
            given = tuple(found.get(i) for i in range(len(leaves)))
            changed = _as_tuple(hook(module, given, grads)) or given
            found |= {i: grad for i, grad in enumerate(changed) if grad is not None}
        return found

    def _run_whole(self, call: ProbedCall, seen: Seen, inputs: Sequence[Rule]) -> Any:
        """A copy of the call's output, which may contain its inputs.  What is run after it
        begins and counts as it does.
        """
        given = call.tensors
        versions = [each._version for each in given]
        self._run = partial(self.runner.run, again=seen if seen.counted else None)
        output = self._run(call)
        for each, version, rule in zip(given, versions, inputs, strict=True):
            is_view = isinstance(rule, BatchAxis) and rule.outer == 1
            if self.splits and each._version != version and not is_view:
                raise Refusal(RuntimeError(writes_on_input(call.fqn)))
        self.aliased = _aliased(tensors_in(output), given)
        outputs, spec = flatten(output)
        if Layout.of(outputs, spec) != seen.results:
            raise Law.INDEPENDENT.refusal(
                f"unit {call.fqn!r} returns another structure for {LARGE} samples than for "
                f"{SMALL}"
            )
        return unflatten(filled(outputs, copies(outputs)), spec)


_ONLY_AT_ONCE = (
    "unit {!r}: it computes rows of a ragged argument (HetFSDP(ragged=...)), those of all "
    "samples of a rank at once, and has dropout, draws random numbers or has a backward of its "
    "own, so the result would depend on the plan. Leave that out (attention_dropout=0.0)."
)


def _pieces(call: ProbedCall, rules: BatchingRules, spans: Sequence[Span]) -> list[ProbedCall]:
    """The call cut to the samples of each of ``spans``."""
    return [call.on(cut(call.tensors, rules, span, LARGE)) for span in spans]


def _joins(rules: Sequence[Rule], parts: Sequence[Sequence[Tensor]]) -> dict[int, Join]:
    """By index, how outputs are joined that are sums or means, and not always the same."""
    return {
        i: rule
        for i, rule in enumerate(rules)
        if rule in (Join.SUM, Join.MEAN) and not are_same([part[i] for part in parts])
    }


def _check_joins(
    run: Callable[[ProbedCall], Any],
    whole: ProbedCall,
    rules: BatchingRules,
    joins: Mapping[int, Join],
    eps: float,
) -> None:
    """Raise if a mean leaves out what arguments mark by their values, as zero or NaN, or if a
    sum, or a mean, depends on how often the batch has a value.
    """
    masks = {i for i, t in _with_samples(whole, rules) if looks_like_mask(t)}
    for place, marked in _marked(whole, rules):
        try:
            runs = (marked, *_pieces(marked, rules, PARTS))
            found = [tensors_in(run(each)) for each in runs]
        except Exception:
            continue  # it does not take such values
        if all(each[i].isfinite().all() for each in found for i in joins):
            masks -= {place}
        for i, join in joins.items():
            one, *parts = [each[i] for each in found]
            has_values = all(each.isfinite().all() for each in (one, *parts))
            if has_values and not Cut(one, parts, PARTS).follows(join, eps):
                what = f"unit {whole.fqn!r}: output {i}"
                is_mean = join is Join.MEAN
                raise Law.ADDS_UP.refusal(what + OF_SOME if is_mean else mixed(what, one))
    for i, join in joins.items() if masks else ():
        if join is Join.MEAN:  # of which nobody knows what it is over
            raise Law.ADDS_UP.refusal(f"unit {whole.fqn!r}: output {i}{OF_SOME}")


def _with_samples(call: ProbedCall, rules: BatchingRules) -> list[tuple[int, Tensor]]:
    pairs = enumerate(zip(call.tensors, rules.inputs, strict=True))
    return [(i, tensor) for i, (tensor, rule) in pairs if isinstance(rule, BatchAxis)]


def _marked(call: ProbedCall, rules: BatchingRules) -> Iterator[tuple[int | None, ProbedCall]]:
    """The call with its first sample once more in place of the third, and with values in the
    first that may say what does not count, in the tensor of an index.
    """
    tensors, pairs = call.tensors, list(zip(call.tensors, rules.inputs, strict=True))
    yield (
        None,
        call.on([rule.select(tensor, (0, 1, 0), LARGE) for tensor, rule in pairs]),
    )
    for i, (tensor, rule) in enumerate(pairs):
        is_index = not tensor.is_floating_point() and tensor.dtype != torch.bool
        if is_index or not (isinstance(rule, BatchAxis) and tensor.numel()):
            continue
        own = (float(tensor.min()), float(tensor.max())) if looks_like_mask(tensor) else ()
        for value, is_half in product({0.0, math.nan, -1.0, *own}, (True, False)):
            first = rule.narrow(tensor, Span(0, 1), LARGE).clone()
            lengths = [1 if dim == rule.dim else n for dim, n in enumerate(first.shape)]
            if is_half and max(lengths) > 1:
                inner = next(dim for dim, n in enumerate(lengths) if n > 1)
                first.narrow(inner, 0, lengths[inner] // 2).fill_(value)
            else:
                first.fill_(value)
            marked = tensor.clone()
            rule.put(marked, first, Span(0, 1), LARGE)
            if not torch.equal(marked, tensor):
                yield i, call.on([*tensors[:i], marked, *tensors[i + 1 :]])


def _aliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> frozenset[int]:
    """Outputs that share memory with an input or another output; joined from microbatches, they
    are tensors of their own.
    """
    places = Counter(map(storage_of, (*outputs, *{id(each): each for each in inputs}.values())))
    return frozenset(i for i, each in enumerate(outputs) if places[storage_of(each)] > 1)


def _as_tuple(grads: Any) -> tuple[Any, ...] | None:
    return (grads,) if isinstance(grads, Tensor) else grads


def joined_outputs(
    output: Any, parts: Sequence[Sequence[Tensor]], rules: Sequence[Rule]
) -> Any:
    """``output`` with what its parts have computed, which is equal up to rounding.

    So a sample has the same values in every run of a probe, bit by bit, whichever other samples
    are in it.  What follows can be compared as strictly as its own precision allows.
    """
    leaves, spec = flatten(output)
    whole, made = tensors_in(output), list[Tensor]()
    for each, of_parts, rule in zip(whole, zip(*parts, strict=True), rules, strict=True):
        cut = Cut(each, of_parts, PARTS)
        joined = cut.joined(rule) if isinstance(rule, BatchAxis) else None
        made.append(each if joined is None else joined)
    return unflatten(filled(leaves, made), spec)
