"""What a unit has returned for three samples, so that later runs of a probe need not run it.

A unit that has the rules that were found gives each sample the same, whichever others are with
it.  So its result for any of these samples is known, and bit by bit the same in all runs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardhet.fsdp.microbatch.batching import BatchAxis, Join, VisitRules
from shardhet.fsdp.microbatch.layered import cut, tensors_in
from shardhet.fsdp.probing.module_state import marks_of
from shardhet.fsdp.probing.probed_call import ProbedCall, copies
from shardhet.fsdp.probing.rules import LARGE
from shardhet.records.layout import Span


class Recorded(NamedTuple):
    """A call in the large run."""

    call: ProbedCall
    output: Any
    rules: VisitRules
    marks: list[Any]  # of its module's attributes before and after it; none if they differ
    is_cut: bool  # whether rules were tried

    def changed(
        self, call: ProbedCall, samples: Sequence[int], module: nn.Module
    ) -> list[int] | None:
        """The places among ``samples`` that have other values in ``call`` than in this one;
        None if the calls differ in anything else.
        """
        if not call.is_like(self.call) or self.marks != marks_of(module):
            return None
        found: set[int] = set()
        inputs = zip(call.tensors, self.call.tensors, self.rules.inputs, strict=True)
        for tensor, whole, rule in inputs:
            expected = rule.select(whole, samples, LARGE)
            if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
                return None
            if torch.equal(tensor, expected):
                continue
            if isinstance(rule, Join):
                return None
            for i in range(len(samples)):
                span = Span(i, i + 1)
                one, other = (rule.narrow(t, span, len(samples)) for t in (tensor, expected))
                found |= set() if torch.equal(one, other) else {i}
        return sorted(found)

    def has_to_run(self, changed: Sequence[int] | None) -> bool:
        """Whether such a call has results that are not those of samples, each by itself."""
        are_numbers = not self.is_cut or self.rules.returns_numbers_of_samples
        joins = [rule for rule in self.rules.outputs if isinstance(rule, Join)]
        is_others = any(rule is not Join.SHARED or changed for rule in joins)
        return changed is None or are_numbers or is_others

    def results(
        self,
        call: ProbedCall,
        samples: Sequence[int],
        changed: Sequence[int],
        run: Callable[[ProbedCall], Any],
    ) -> tuple[Any, list[Tensor]]:
        """The output of ``call`` and its tensors; changed samples are ``run``."""
        output = run(call) if self.has_to_run(changed) else self.output
        found, of_large = copies(output), tensors_in(self.output)
        rules = enumerate(self.rules.outputs)
        axes = [(i, rule) for i, rule in rules if isinstance(rule, BatchAxis)]
        for i, axis in axes:
            found[i] = axis.select(of_large[i], samples, LARGE)
        for place in changed:
            span = Span(place, place + 1)
            made = tensors_in(run(call.on(cut(call.tensors, self.rules, span, len(samples)))))
            for i, axis in axes:
                axis.put(found[i], made[i], span, len(samples))
        return output, found
