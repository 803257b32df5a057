"""Finds the rules of one call, by calling it on the whole batch and on pieces of it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from shardhet.comm.progress import progress
from shardhet.fsdp.microbatch.batching import (
    BatchAxis,
    Join,
    Layout,
    Rule,
    VisitRules,
    flatten,
    unflatten,
)
from shardhet.fsdp.microbatch.layered import cut, tensors_in, writes_on_input
from shardhet.fsdp.probing.apart import (
    bends_gradients,
    gradients_of,
    hook_is_apart,
    hook_is_linear,
    is_linear,
    mixes_backward,
)
from shardhet.fsdp.probing.comparing import are_close, joined_like
from shardhet.fsdp.probing.probed_call import CallRunner, ProbedCall, Seen, copied, filled
from shardhet.fsdp.probing.rules import (
    LARGE,
    OTHER_PARTS,
    PARTS,
    SIZES,
    SMALL,
    RuleFinder,
    is_same,
    join_by_gradients,
    looks_like_mask,
    mixed,
    of_some,
    readings,
)
from shardhet.fsdp.probing.watch import Refusal, Watcher
from shardhet.fsdp.stages.flow import storage_of
from shardhet.records.layout import Span

MAX_READINGS = 32  # combinations of rules that are tried for a call's arguments


class Examiner:
    """Finds rules of calls.

    ``splits`` says whether any rank has several microbatches, ``divides_late`` whether losses
    are divided by their tokens after backward.
    """

    def __init__(
        self,
        runner: CallRunner,
        watcher: Watcher,
        *,
        splits: bool,
        divides_late: bool,
    ) -> None:
        self.is_certain = True  # False if a zero output may be a sum or a mean
        self.aliased: frozenset[int] = frozenset()  # outputs of the last call, see _aliased
        self._divides_late = divides_late
        self._runner, self._watcher = runner, watcher
        self._splits = splits
        self._decide = RuleFinder(splits=splits)

    def rules_of(self, seen: Seen, large: ProbedCall) -> tuple[VisitRules, Any]:
        """The rules of a call that was seen with fewer samples, and the output of ``large``."""
        if self._watcher.made_rows.has_ragged(large.tensors):
            run = partial(self._run_whole, large, seen)
            return _at_once(seen, self._runner, self._watcher, run)
        self._decide.eps = self._watcher.eps
        pairs = zip(large.tensor_by_name.items(), seen.call.tensors, strict=True)
        find = partial(self._decide.of_input, large.fqn)
        inputs = tuple(find(name, small, tensor) for (name, tensor), small in pairs)
        return self._examine(seen, large, inputs)

    def known_from(self, seen: Seen, call: ProbedCall) -> dict[str, Rule]:
        """Rules of those arguments that the call seen before had too."""
        before = seen.call.tensor_by_name
        return {
            name: self._decide.of_input("", name, before[name], tensor)
            for name, tensor in call.tensor_by_name.items()
            if name in before
        }

    def infer(
        self, call: ProbedCall, num_samples: int, known: Mapping[str, Rule]
    ) -> VisitRules:
        """The rules of a call that was not seen before; ``known`` are those of some arguments.

        Tries all rules that the shapes of the other arguments allow; exactly one must fit.  A
        call on one sample is never cut, so that all that fit give the same, for this call.
        """
        tensors = call.tensor_by_name
        options = [readings(t, known.get(name), num_samples) for name, t in tensors.items()]
        fitting: list[VisitRules] = []
        for rules in islice(product(*options), MAX_READINGS):
            small, large = [
                call.on(
                    [
                        rule.select(t, range(size), num_samples)
                        if isinstance(rule, BatchAxis)
                        else t
                        for t, rule in zip(tensors.values(), rules, strict=True)
                    ]
                )
                for size in SIZES
            ]
            try:
                fitting.append(self._examine(self._runner.look(small)[0], large, rules)[0])
            except (Exception, Refusal):
                continue  # these rules do not fit
        if len(fitting) == 1 or (fitting and not self._splits):
            return fitting[0]
        if fitting and num_samples == 1:  # the first splits most arguments
            return replace(fitting[0], is_for_one_sample=True)
        raise Refusal(
            ValueError(
                f"unit {call.fqn!r} is called with other kinds of arguments than when the "
                "model was first called in this way, and it is not clear which of "
                f"{', '.join(name for name in tensors if name not in known)} hold samples. "
                "Pass tensors in the same places at every step (a mask always or never)."
            )
        )

    def _examine(
        self, seen: Seen, large: ProbedCall, inputs: tuple[Rule, ...]
    ) -> tuple[VisitRules, Any]:
        self._decide.is_unpredictable = self._watcher.is_unpredictable = False
        self._decide.undecided.clear()
        self._decide.has_mask = any(
            looks_like_mask(tensor)
            for tensor, rule in zip(large.tensors, inputs, strict=True)
            if isinstance(rule, BatchAxis)
        )
        rules = VisitRules(
            arguments=seen.call.arguments,
            inputs=inputs,
            results=seen.results,
            outputs=(),
            is_differentiable=seen.is_differentiable,
            counts=bool(seen.counted),
        )
        with self._runner.counting_once(seen):
            return self._compare(seen, large, rules)

    def _compare(
        self, seen: Seen, large: ProbedCall, rules: VisitRules
    ) -> tuple[VisitRules, Any]:
        inputs = rules.inputs
        kept = large.on(list(map(copied, large.tensors)))  # the call may write to its inputs
        output = self._run_whole(large, seen, inputs)
        pieces = [
            kept.on(cut(kept.tensors, rules, span, LARGE))
            for span in (PARTS if self._splits and rules.is_batched else ())
        ]
        parts = []
        for piece in pieces:
            of_piece = self._runner.run(piece)
            if _numbers_in(of_piece) != _numbers_in(output):
                rules = replace(rules, returns_numbers_of_samples=True)
            parts.append(list(map(copied, tensors_in(of_piece))))
        self._decide.is_unpredictable = self._watcher.is_unpredictable
        self._decide.eps = self._watcher.eps
        found = [
            self._decide.of_output(
                large.fqn, i, seen.outputs[i], whole, [part[i] for part in parts]
            )
            for i, whole in enumerate(tensors_in(output))
        ]
        for i in self._decide.undecided:
            decided = self._join_of_zeros(i, kept, pieces)
            found[i] = decided or Join.SUM
            self.is_certain &= decided is not None
        if joins := _joins(found, parts):
            _check_joins(self._runner, kept, rules, joins, eps=self._watcher.eps)
        if (pieces or self._divides_late) and seen.has_own_backward and torch.is_grad_enabled():
            self._check_backward(kept, pieces, replace(rules, outputs=tuple(found)))
        if pieces and torch.is_grad_enabled():
            results = [tensors_in(output), *parts]
            calls = [
                (each.tensors, made)
                for each, made in zip((kept, *pieces), results, strict=True)
            ]
            self._check_hooks(kept, calls, inputs, found)
        if pieces:
            _check_other_parts(self._runner, self._decide, kept, output, rules, found)
            output = joined_outputs(output, parts, found)
        return replace(rules, outputs=tuple(found)), output

    def _check_backward(
        self, whole: ProbedCall, pieces: Sequence[ProbedCall], rules: VisitRules
    ) -> None:
        """Raise if gradients of the pieces do not add up to those of the whole."""
        progress.mark(f"backward of unit {whole.fqn!r}")
        expected, *parts = [self._gradients(each, rules) for each in (whole, *pieces)]
        progress.mark(f"forward of unit {whole.fqn!r}")
        for key, grad in expected.items():
            rule = rules.inputs[key] if isinstance(key, int) else Join.SUM
            rule = rule if isinstance(rule, BatchAxis) else Join.SUM
            found = [part[key] for part in parts if key in part]
            if len(found) < len(parts) or not are_close(
                joined_like(grad, found, PARTS, rule), grad, self._watcher.eps
            ):
                raise Refusal(ValueError(mixes_backward(f"unit {whole.fqn!r}")))
        if self._divides_late and not is_linear(
            lambda scale: self._gradients(whole, rules, scale), self._watcher.eps
        ):
            raise Refusal(ValueError(bends_gradients(f"unit {whole.fqn!r}")))

    def _check_hooks(
        self,
        call: ProbedCall,
        calls: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
        inputs: Sequence[Rule],
        outputs: Sequence[Rule],
    ) -> None:
        """Raise if a backward hook of the unit's module itself mixes samples, or clips."""
        module = self._runner.module_of(call)
        made = [((), results) for _, results in calls]
        hooks = [(hook, calls, inputs) for hook in module._backward_hooks.values()]
        hooks += [
            (partial(_of_results, hook), made, outputs)
            for hook in module._backward_pre_hooks.values()
        ]
        for hook, given, rules in hooks:
            if not hook_is_apart(hook, module, given, rules, self._watcher.eps):
                raise Refusal(ValueError(mixes_backward(f"unit {call.fqn!r}")))
            if self._divides_late and not hook_is_linear(
                hook, module, given[0], self._watcher.eps
            ):
                raise Refusal(ValueError(bends_gradients(f"unit {call.fqn!r}")))

    def _gradients(
        self, call: ProbedCall, rules: VisitRules, scale: float = 1.0
    ) -> dict[Any, Tensor]:
        """Gradients of outputs with samples: of floating inputs by index, and of parameters.

        Each output gets ``scale`` times itself as its gradient.
        """
        leaves = [
            t.detach().clone().requires_grad_(t.is_floating_point()) for t in call.tensors
        ]
        output = self._runner.run(call, with_graph=True, leaves=leaves)
        apart = [
            each
            for each, rule in zip(tensors_in(output), rules.outputs, strict=True)
            if isinstance(rule, BatchAxis) and each.requires_grad
        ]
        inputs = {i: leaf for i, leaf in enumerate(leaves) if leaf.requires_grad}
        return gradients_of(apart, inputs, [scale * each.detach() for each in apart])

    def in_parts(self, call: ProbedCall, rules: VisitRules, seen: Seen | None) -> Any:
        """The output of a call with known rules for all samples of the large batch."""
        with self._runner.counting_once(seen):
            output = self._runner.run(call)
            if not (self._splits and rules.is_batched):
                return output
            pieces = [call.on(cut(call.tensors, rules, span, LARGE)) for span in PARTS]
            parts = [list(map(copied, tensors_in(self._runner.run(each)))) for each in pieces]
        return joined_outputs(output, parts, rules.outputs)

    def _run_whole(self, call: ProbedCall, seen: Seen, inputs: tuple[Rule, ...]) -> Any:
        """A copy of the call's output, which may contain its inputs."""
        given = call.tensors
        versions = [each._version for each in given]
        output = self._runner.run(call)
        for each, version, rule in zip(given, versions, inputs, strict=True):
            is_view = isinstance(rule, BatchAxis) and rule.outer == 1
            if self._splits and each._version != version and not is_view:
                raise Refusal(RuntimeError(writes_on_input(call.fqn)))
        self.aliased = _aliased(tensors_in(output), given)
        outputs, spec = flatten(output)
        if Layout.of(outputs, spec) != seen.results:
            raise Refusal(
                ValueError(
                    f"unit {call.fqn!r}: it returns another structure for {LARGE} samples than "
                    f"for {SMALL}. Return the same structure for any number of samples."
                )
            )
        return unflatten(list(map(copied, outputs)), spec)

    def _join_of_zeros(
        self, index: int, whole: ProbedCall, pieces: list[ProbedCall]
    ) -> Join | None:
        """How an output that is zero is joined, by its gradients; None if they do not tell."""
        of_whole, *of_pieces = [
            tensors_in(self._runner.run(each, with_graph=True))[index]
            for each in (whole, *pieces)
        ]
        return join_by_gradients(of_whole, of_pieces) if of_whole.requires_grad else None


def _at_once(
    seen: Seen,
    runner: CallRunner,
    watcher: Watcher,
    run: Callable[[tuple[Rule, ...]], Any],
) -> tuple[VisitRules, Any]:
    """As ``rules_of``, for a call that is never cut: its rows are ragged."""
    rules = VisitRules(
        arguments=seen.call.arguments,
        inputs=(Join.SHARED,) * len(seen.call.tensors),
        results=seen.results,
        outputs=(Join.SHARED,) * len(seen.outputs),
        is_differentiable=seen.is_differentiable,
        counts=bool(seen.counted),
    )
    watcher.draws = False
    with runner.counting_once(seen):
        output = run(rules.inputs)
    if watcher.draws or seen.has_own_backward:
        raise Refusal(ValueError(_ONLY_AT_ONCE.format(seen.call.fqn)))
    return rules, output


_ONLY_AT_ONCE = (
    "unit {!r}: it computes rows of a ragged argument (HetFSDP(ragged=...)), those of all "
    "samples of a rank at once, and has dropout, draws random numbers or has a backward of its "
    "own, so the result would depend on the plan. Leave that out (attention_dropout=0.0)."
)


def _check_other_parts(
    runner: CallRunner,
    decide: RuleFinder,
    call: ProbedCall,
    output: Any,
    rules: VisitRules,
    found: Sequence[Rule],
) -> None:
    """Raise if the first sample, and the second with the third, give other results."""
    pieces = [call.on(cut(call.tensors, rules, span, LARGE)) for span in OTHER_PARTS]
    parts = [list(map(copied, tensors_in(runner.run(each)))) for each in pieces]
    decide.check_outputs(call.fqn, tensors_in(output), parts, found)


def _joins(rules: Sequence[Rule], parts: Sequence[Sequence[Tensor]]) -> dict[int, Join]:
    """By index, how outputs are joined that are sums or means, and not always the same."""
    return {
        i: rule
        for i, rule in enumerate(rules)
        if rule in (Join.SUM, Join.MEAN) and not is_same([part[i] for part in parts])
    }


def _check_joins(
    runner: CallRunner,
    whole: ProbedCall,
    rules: VisitRules,
    joins: Mapping[int, Join],
    eps: float,
) -> None:
    """Raise if a mean leaves out what arguments mark by their values, as zero or NaN, or if a
    sum, or a mean, depends on how often the batch has a value.
    """
    for marked in _marked(whole, rules):
        pieces = [marked.on(cut(marked.tensors, rules, span, LARGE)) for span in PARTS]
        try:
            found = [tensors_in(runner.run(each)) for each in (marked, *pieces)]
        except Exception:
            continue  # it does not take such values
        for i, join in joins.items():
            if not _fits(*(each[i] for each in found), join=join, eps=eps):
                what = f"unit {whole.fqn!r}: output {i}"
                is_mean = join is Join.MEAN
                raise Refusal(
                    ValueError(of_some(what) if is_mean else mixed(what, found[0][i]))
                )


def _fits(whole: Tensor, *parts: Tensor, join: Join, eps: float) -> bool:
    """Whether it is that of its parts, if it has values."""
    joined = joined_like(whole, parts, PARTS, join)
    has_values = whole.isfinite().all() and joined.isfinite().all()
    return not has_values or are_close(joined, whole, eps)


def _marked(call: ProbedCall, rules: VisitRules) -> Iterator[ProbedCall]:
    """The call with its first sample once more in place of the third, and with values in the
    first that may say what does not count.
    """
    tensors, pairs = call.tensors, list(zip(call.tensors, rules.inputs, strict=True))
    yield call.on(
        [r.select(t, (0, 1, 0), LARGE) if isinstance(r, BatchAxis) else t for t, r in pairs]
    )
    for i, (tensor, rule) in enumerate(pairs):
        if not (isinstance(rule, BatchAxis) and tensor.is_floating_point()):
            continue
        for value, is_half in product((0.0, math.nan, -1.0), (True, False)):
            first = rule.narrow(tensor, Span(0, 1), LARGE).clone()
            lengths = [1 if dim == rule.dim else n for dim, n in enumerate(first.shape)]
            if is_half and max(lengths) > 1:
                inner = next(dim for dim, n in enumerate(lengths) if n > 1)
                first.narrow(inner, 0, lengths[inner] // 2).fill_(value)
            else:
                first.fill_(value)
            marked = copied(tensor)
            rule.put(marked, first, Span(0, 1), LARGE)
            yield call.on([*tensors[:i], marked, *tensors[i + 1 :]])


def _aliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> frozenset[int]:
    """Outputs that share memory with an input or another output; joined from microbatches, they
    are tensors of their own.
    """
    places = Counter(map(storage_of, (*outputs, *{id(each): each for each in inputs}.values())))
    return frozenset(i for i, each in enumerate(outputs) if places[storage_of(each)] > 1)


def _numbers_in(output: Any) -> list[int | float]:
    """The plain numbers among a call's results."""
    return [each for each in flatten(output)[0] if type(each) in (int, float)]


def _of_results(hook: Callable[..., Any], module: Any, _: Any, grads: Any) -> Any:
    return hook(module, grads)


def joined_outputs(
    output: Any, parts: Sequence[Sequence[Tensor]], rules: Sequence[Rule]
) -> Any:
    """``output`` with what its parts have computed, which is equal up to rounding.

    So a sample has the same values in every run of a probe, bit by bit, whichever other samples
    are in it.  What follows can be compared as strictly as its own precision allows.
    """
    leaves, spec = flatten(output)
    whole = tensors_in(output)
    joined = [
        joined_like(each, [part[i] for part in parts], PARTS, rule)
        if isinstance(rule, BatchAxis)
        else each
        for i, (each, rule) in enumerate(zip(whole, rules, strict=True))
    ]
    return unflatten(filled(leaves, joined), spec)
