"""Runs one call of a unit's module in a probe, and checks that it does not change its inputs.

A unit runs once for each microbatch and again in a recomputation, so a call that changes a
cache, a list, a counter or its own inputs would change them more often than in one process.
Each of these is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from shardhet.fsdp.microbatch.batching import (
    BatchAxis,
    BatchingRules,
    Join,
    Layout,
    Rule,
    flatten,
    named,
    unflatten,
)
from shardhet.fsdp.microbatch.layered import (
    autocast_as,
    autocast_dtype_now,
    cut,
    tensors_in,
    writes_on_input,
)
from shardhet.fsdp.microbatch.signature import is_plain
from shardhet.fsdp.microbatch.surroundings import DROPOUT_CALLS
from shardhet.fsdp.probing.comparing import Law, Refusal, are_close, fingerprint, nodes_in
from shardhet.fsdp.probing.gradients import has_own_backward
from shardhet.fsdp.probing.module_state import (
    AsItWas,
    Number,
    counters,
    marks_of,
    numbers,
    set_numbers,
)
from shardhet.fsdp.probing.rules import LARGE
from shardhet.fsdp.probing.watch import Watcher
from shardhet.fsdp.sharding.build import changes_arguments
from shardhet.fsdp.stages.flow import Reads
from shardhet.records.layout import Span


@dataclass(frozen=True, slots=True)
class ProbedCall:
    """A function of a unit and the arguments that it is called with."""

    fqn: str  # of the module
    function: Callable[..., Any]
    leaves: list[Any]  # the arguments, flattened
    arguments: Layout

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def tensor_by_name(self) -> dict[str, Tensor]:
        """The tensors among the arguments, by the arguments' names."""
        pairs = named(self.leaves, self.arguments)
        return {name: leaf for name, leaf in pairs if isinstance(leaf, Tensor)}

    def is_like(self, other: "ProbedCall") -> bool:
        """Whether it differs from another call of the module in values of tensors at most."""
        return self.arguments == other.arguments and all(
            isinstance(one, Tensor) or (is_plain(one) and one == each)
            for one, each in zip(self.leaves, other.leaves, strict=True)
        )

    def on(self, tensors: Sequence[Tensor]) -> "ProbedCall":
        """The same call with ``tensors`` instead of its own."""
        return replace(self, leaves=filled(self.leaves, tensors))

    def copy(self) -> "ProbedCall":
        """The same call with copies of its tensors."""
        return self.on(copies(self.leaves))

    @classmethod
    def of(cls, fqn: str, function: Callable[..., Any], arguments: Any) -> Self:
        """The call of a function with (args, kwargs)."""
        leaves, spec = flatten(arguments)
        return cls(fqn, function, leaves, Layout.of(leaves, spec))


@dataclass(slots=True)
class Seen:
    """A call with few samples, and its result."""

    call: ProbedCall
    outputs: list[Tensor]
    numbers: list[int | float]  # the plain ones among its results
    results: Layout
    is_differentiable: tuple[bool, ...]
    counted: Mapping[Number, Any]  # numbers that every call changes, after this one
    has_own_backward: bool  # a hook on a tensor or a Function in Python
    as_it_was: AsItWas  # its module's attributes before this call
    autocast_dtype: torch.dtype | None

    def rules(self, inputs: Sequence[Rule]) -> BatchingRules:
        """Rules of the call, without those of its results."""
        return BatchingRules(
            arguments=self.call.arguments,
            inputs=tuple(inputs),
            results=self.results,
            outputs=(),
            is_differentiable=self.is_differentiable,
            counts=bool(self.counted),
        )


def filled(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """``leaves`` with their tensors replaced by ``tensors``, in order."""
    remaining = iter(tensors)
    return [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@dataclass(eq=False, kw_only=True)
class CallRunner:
    """Runs calls under the watcher and refuses those that cannot be repeated."""

    module: nn.Module
    watcher: Watcher
    device: torch.device
    has_gradients: bool

    def run(
        self,
        call: ProbedCall,
        *,
        with_graph: bool = False,
        leaves: Sequence[Tensor] = (),
        again: Seen | None = None,
    ) -> Any:
        """The output of the call; raises ``Refusal`` if it changes its arguments.

        ``leaves`` are used instead of the call's tensors, as they are.  It begins with the
        attributes of a call ``again``, and has to count as that did.
        """
        given = list(leaves) or [
            t.detach().requires_grad_(with_graph and t.requires_grad) for t in call.tensors
        ]
        values = filled(call.leaves, given)
        objects = [x for x in values if not isinstance(x, Tensor) and not is_plain(x)]
        before = [fingerprint(each) for each in objects]
        versions = [t._version for t in given]
        args, kwargs = unflatten(values, call.arguments.spec)
        grad_mode = torch.enable_grad() if with_graph else torch.no_grad()
        as_it_was = again.as_it_was.in_function(0, is_repeated=True) if again else nullcontext()
        try:
            # Without autocast's cache, which would keep casts of parameters between calls.
            autocast = autocast_as(self.device.type, autocast_dtype_now(self.device.type))
            with self.watcher.call(call.fqn, given), grad_mode, autocast, as_it_was:
                output = call.function(*args, **kwargs)
                now = numbers(self.module_of(call)) if again else {}
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise Refusal(RuntimeError(writes_on_input(call.fqn))) from error
            raise
        if self.has_gradients and [t._version for t in given] != versions:
            raise Refusal(RuntimeError(writes_on_input(call.fqn)))
        for key, value in again.counted.items() if again else ():
            if now.get(key) != value:
                raise _counts(call.fqn, key[1])
        for each, known in zip(objects, before, strict=True):
            if fingerprint(each) != known:
                raise Refusal(
                    ValueError(changes_arguments(call.fqn, f"a {type(each).__name__}"))
                )
        after, spec = flatten((args, kwargs))
        if spec != call.arguments.spec or any(
            a is not b for a, b in zip(after, values, strict=True)
        ):
            raise Refusal(ValueError(changes_arguments(call.fqn, "a list or dict")))
        _check_plain(call.fqn, output)
        return output

    def module_of(self, call: ProbedCall) -> nn.Module:
        """The module that is called."""
        # A function is no module of the model and has no attributes that count.
        is_function = call.fqn == DROPOUT_CALLS
        return nn.Module() if is_function else self.module.get_submodule(call.fqn)

    def look(self, call: ProbedCall) -> tuple[Seen, Any]:
        """The call's result, as a record of copies and as it is.

        Raises ``Refusal`` if the call counts in a tensor, or computes with what it counts.
        """
        module = self.module_of(call)
        before, as_it_was = counters(module), AsItWas(module)
        with_graph = self.has_gradients and torch.is_grad_enabled()
        hooked: set[int] = set()
        with Reads(lambda tensor: hooked.add(id(tensor))):
            output = self.run(call, with_graph=with_graph)
        once = counters(module)
        counted: dict[Number, Any] = {}
        if once != before:
            pairs = zip(tensors_in(self.run(call)), tensors_in(output), strict=False)
            is_used = not all(are_close(*pair, self.watcher.eps) for pair in pairs)
            twice = counters(module)
            counted = {key: once[key] for key in once if twice.get(key) != once[key]}
            for _, name in counted if is_used else counted.keys() - numbers(module).keys():
                raise _counts(call.fqn, name)
            set_numbers(module, counted)
        outputs, spec = flatten(output)
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        seen = Seen(
            call=call.copy(),
            outputs=copies(tensors),
            numbers=numbers_in(output),
            results=Layout.of(outputs, spec),
            is_differentiable=tuple(each.requires_grad for each in tensors),
            counted=counted,
            has_own_backward=bool(hooked) or any(map(has_own_backward, tensors)),
            as_it_was=as_it_was,
            autocast_dtype=autocast_dtype_now(self.device.type),
        )
        return seen, output

    def check_repeated(self, seen: Seen) -> None:
        """Raise ``Refusal`` if the call, as backward repeats it, gives something else now."""
        autocast = autocast_as(self.device.type, seen.autocast_dtype)
        self.watcher.is_unpredictable = False
        try:
            with autocast:
                again = tensors_in(self.run(seen.call, with_graph=True, again=seen))
        except Exception as error:
            raise _differs(seen.call.fqn, f"raises {error!r}") from error
        pairs = zip(again, seen.outputs, strict=False)
        is_same = all(are_close(*pair, self.watcher.eps) for pair in pairs)
        if not (is_same or self.watcher.is_unpredictable):
            raise _differs(seen.call.fqn, "gives something else")


class Recorded(NamedTuple):
    """A call in the large run, and what it has returned, so that later runs need not run it.

    A unit that has the rules that were found gives each sample the same, whichever others are
    with it.  So its result for any of these samples is known, and bit by bit the same in all
    runs.
    """

    call: ProbedCall
    output: Any
    rules: BatchingRules
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


def numbers_in(output: Any) -> list[int | float]:
    """The plain numbers among a call's results."""
    return [each for each in flatten(output)[0] if type(each) in (int, float)]


def copies(tree: Any) -> list[Tensor]:
    """Detached copies of the tensors in a tree."""
    return [each.detach().clone() for each in tensors_in(tree)]


def _counts(fqn: str, name: str) -> Refusal:
    return Law.REPEATS.refusal(
        f"unit {fqn!r} changes its attribute {name!r} at every call, and computes with it, "
        "adds up samples, or keeps it in a tensor"
    )


def _differs(fqn: str, what: str) -> Refusal:
    return Law.REPEATS.refusal(
        f"unit {fqn!r} {what} when it is run again after the model's forward, as in a "
        "recomputation: it reads what the model sets around its call (a global variable, a "
        "context, a configuration)"
    )


def _check_plain(fqn: str, output: Any) -> None:
    for leaf in flatten(output)[0]:
        if isinstance(leaf, Tensor) or is_plain(leaf):
            continue
        if any(isinstance(node, Tensor) for node in nodes_in(leaf)):
            raise Law.PASSED.refusal(
                f"unit {fqn!r} returns a {type(leaf).__name__}, whose tensors HetFSDP cannot "
                "see, unlike those of tuples, dicts and torch.export.register_dataclass",
                TypeError,
            )
