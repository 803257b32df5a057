"""Knowing the batch: a model is run on two and on three samples before it is trained.

At the first call of every kind all ranks run the model on a few of its real samples, without
a gradient; attributes, buffers and random states are afterwards as they were.

    run    samples    what is learnt
    small  a b        how units are called, what depends on gradients, what leaks out of units
    large  a b c      which dimensions grow with the batch; whether a unit in the microbatches
                      (a b) and (c) gives what it gives whole; whether code outside of units
                      mixes samples
    rest   c          whether losses that are computed outside of units add up

What cannot be shown to be right is refused by name.  Dropout is off and batch norm uses its
running statistics meanwhile, so that equal samples have equal values whatever is beside them.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardhet.fsdp.batch_norm import BatchNorms
from shardhet.fsdp.batching import (
    BatchAxis,
    Join,
    Layout,
    Rule,
    VisitRules,
    flatten,
    named,
    unflatten,
)
from shardhet.fsdp.comparing import fingerprint
from shardhet.fsdp.layered import (
    autocast_as,
    autocast_dtype_now,
    cut,
    tensors_in,
    writes_on_input,
)
from shardhet.fsdp.module_state import (
    BufferWrites,
    Number,
    counters,
    numbers,
    restored_modules,
)
from shardhet.fsdp.root_dropout import DROPOUT_CALLS
from shardhet.fsdp.rules import (
    LARGE,
    PARTS,
    SIZES,
    SMALL,
    RuleFinder,
    join_by_gradients,
    looks_like_mask,
    readings,
)
from shardhet.fsdp.signature import is_plain
from shardhet.fsdp.watch import Refusal, Watcher

MAX_READINGS = 32  # of the shapes of a call's arguments


class CallKey(NamedTuple):
    """One of the calls of a module in a forward."""

    fqn: str
    call: int  # how often it was called before


@dataclass(slots=True)
class Seen:
    """One call of a unit's module in the small run."""

    leaves: list[Any]  # the arguments
    arguments: Layout
    outputs: list[Tensor]
    results: Layout
    is_differentiable: tuple[bool, ...]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


class Probe:
    """The runs of a model on a few samples, on one rank."""

    def __init__(
        self,
        module: nn.Module,
        norms: BatchNorms,
        *,
        has_gradients: bool,
        splits: bool,
        anchor: Tensor,
        rows: Mapping[int, str] | None = None,
    ) -> None:
        self.rules: dict[CallKey, VisitRules] = {}
        self.is_certain = True  # else something was zero, and may be a sum or a mean
        self.counted: set[Number] = set()  # attributes that a forward has changed
        self._seen: dict[CallKey, Seen] = {}
        self._module = module
        self._norms = norms
        self._has_gradients = has_gradients
        self._splits = splits  # whether any rank has several microbatches
        self._decide = RuleFinder(splits=splits)
        self._anchor = anchor
        self._watcher = Watcher()
        self._watcher.rows = rows or {}
        self._watcher.on_random_outside = _refuse_random if splits else _accept
        self._run: Callable[..., Any] = self._run_small
        self._num_calls: Counter[str] = Counter()  # by module, in the present run

    @contextmanager
    def running(self, name: str, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Around one forward of the model on ``inputs``: "small", "large" or "rest"."""
        self._run = getattr(self, f"_run_{name}")
        self._num_calls.clear()
        with self._isolated():
            writes, before = BufferWrites(self._module), numbers(self._module)
            self._watcher.give(inputs)
            with self._watcher:
                yield
            changed = dict(numbers(self._module).items() - before.items())
            self.counted |= changed.keys()
            self._check_buffers(writes)

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(restored_modules(self._module))
            stack.enter_context(self._norms.frozen())
            if "torch._dynamo" in sys.modules:  # else nothing is compiled, and it takes seconds
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._isolated(), self._watcher, self._watcher.paused():
            yield

    def check_output(self, output: Any) -> None:
        """Raise if the model returns what a unit has made but not returned."""
        self._watcher.check_returned(tensors_in(output))

    def call(
        self, fqn: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """What a call of one of a unit's modules gives in the present run."""
        leaves, spec = flatten((args, kwargs))
        self._watcher.check_arguments(fqn, tensors_in(leaves))
        key = CallKey(fqn, self._num_calls[fqn])
        self._num_calls[fqn] += 1
        with self._watcher.paused():
            return self._run(key, function, leaves, Layout.of(leaves, spec))

    # One call in each run

    def _run_small(
        self, key: CallKey, function: Callable[..., Any], leaves: list[Any], arguments: Layout
    ) -> Any:
        seen, output = self._look(key.fqn, function, leaves, arguments)
        self._seen[key] = seen
        _, spec = flatten(output)
        return self._returned(flatten(output)[0], spec, seen.outputs, seen.is_differentiable)

    def _run_rest(
        self, key: CallKey, function: Callable[..., Any], leaves: list[Any], arguments: Layout
    ) -> Any:
        output = self._apply(key.fqn, function, leaves, arguments, with_graph=False)
        outputs, spec = flatten(output)
        copies = [each.detach().clone() for each in outputs if isinstance(each, Tensor)]
        if key not in self.rules:
            raise Refusal(ValueError(_calls_others(key.fqn)))
        return self._returned(outputs, spec, copies, self.rules[key].is_differentiable)

    def _run_large(
        self, key: CallKey, function: Callable[..., Any], leaves: list[Any], arguments: Layout
    ) -> Any:
        fqn, seen = key.fqn, self._seen.get(key)
        if seen is None:
            raise Refusal(ValueError(_calls_others(fqn)))
        if seen.arguments != arguments:  # a mask that only one of the samples needs, perhaps
            known = self._known(seen, leaves, arguments)
            rules = self._infer(fqn, function, leaves, arguments, LARGE, known)
            self.rules[key] = rules
            output = self._apply(fqn, function, leaves, arguments, with_graph=False)
            outputs, spec = flatten(output)
            tensors = [_copy(each) for each in outputs if isinstance(each, Tensor)]
            return self._returned(outputs, spec, tensors, rules.is_differentiable)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        names = [name for name, leaf in named(leaves, arguments) if isinstance(leaf, Tensor)]
        decide = partial(self._decide.of_input, fqn)
        input_rules = tuple(map(decide, names, seen.inputs, inputs))
        self.rules[key], output = self._examine(fqn, function, seen, leaves, input_rules)
        outputs, spec = flatten(output)
        return self._returned(outputs, spec, tensors_in(output), seen.is_differentiable)

    def _look(
        self, fqn: str, function: Callable[..., Any], leaves: list[Any], arguments: Layout
    ) -> tuple[Seen, Any]:
        """What the call gives for two samples."""
        graph = self._has_gradients and torch.is_grad_enabled()
        # A function is none of the model's modules, and counts nothing.
        module = nn.Module() if fqn == DROPOUT_CALLS else self._module.get_submodule(fqn)
        before = counters(module)
        output = self._apply(fqn, function, leaves, arguments, with_graph=graph)
        once = counters(module)
        if once != before:
            self._apply(fqn, function, leaves, arguments, with_graph=False)
            self._check_counters(fqn, once, counters(module))
        outputs, spec = flatten(output)
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        flags = tuple(each.requires_grad for each in tensors)
        saved = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        copies = [each.detach().clone() for each in tensors]
        return Seen(saved, arguments, copies, Layout.of(outputs, spec), flags), output

    def _examine(
        self,
        fqn: str,
        function: Callable[..., Any],
        seen: Seen,
        leaves: list[Any],
        inputs: tuple[Rule, ...],
    ) -> tuple[VisitRules, Any]:
        """The rules of a call, and what it gives for three samples whole."""
        self._decide.is_unpredictable = self._watcher.is_unpredictable = False
        self._decide.undecided.clear()
        self._decide.has_mask = any(
            looks_like_mask(leaf)
            for leaf, rule in zip(
                (leaf for leaf in leaves if isinstance(leaf, Tensor)), inputs, strict=True
            )
            if isinstance(rule, BatchAxis)
        )
        rules = VisitRules(
            arguments=seen.arguments,
            inputs=inputs,
            results=seen.results,
            outputs=(),
            is_differentiable=seen.is_differentiable,
        )
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        copies = [each.detach().clone() for each in given]  # the call may write on its inputs
        versions = [each._version for each in given]
        output = self._apply(fqn, function, leaves, seen.arguments, with_graph=False)
        for each, version, rule in zip(given, versions, inputs, strict=True):
            is_view = isinstance(rule, BatchAxis) and rule.outer == 1
            if self._splits and each._version != version and not is_view:
                raise Refusal(RuntimeError(writes_on_input(fqn)))
        outputs, spec = flatten(output)
        if Layout.of(outputs, spec) != seen.results:
            raise Refusal(ValueError(_returns_others(fqn)))
        output = unflatten([_copy(each) for each in outputs], spec)
        pieces = [
            self._with(leaves, cut(copies, rules, span, LARGE))
            for span in (PARTS if self._splits and rules.is_batched else ())
        ]
        parts = [
            list(map(_copy, tensors_in(
                self._apply(fqn, function, piece, seen.arguments, with_graph=False))))
            for piece in pieces
        ]  # fmt: skip
        self._decide.is_unpredictable = self._watcher.is_unpredictable
        found = [
            self._decide.of_output(fqn, i, seen.outputs[i], whole, [part[i] for part in parts])
            for i, whole in enumerate(tensors_in(output))
        ]
        for i in self._decide.undecided:
            wholes, *others = [
                tensors_in(self._apply(fqn, function, each, seen.arguments, with_graph=True))[i]
                for each in (self._with(leaves, copies), *pieces)
            ]
            decided = join_by_gradients(wholes, others) if wholes.requires_grad else None
            found[i] = decided or Join.SUM
            self.is_certain &= decided is not None
        return replace(rules, outputs=tuple(found)), output

    # Calls that are unlike those of the small run, or of the first step

    def infer(
        self,
        fqn: str,
        function: Callable[..., Any],
        leaves: list[Any],
        arguments: Layout,
        num_samples: int,
        known: Mapping[str, Rule],
    ) -> VisitRules:
        """The rules of a call in the middle of a step, from itself alone.

        ``known`` are rules of some of its arguments, by name.
        """
        with self._alone():
            return self._infer(fqn, function, leaves, arguments, num_samples, known)

    def _infer(
        self,
        fqn: str,
        function: Callable[..., Any],
        leaves: list[Any],
        arguments: Layout,
        num_samples: int,
        known: Mapping[str, Rule],
    ) -> VisitRules:
        """All readings of the other arguments' shapes are tried; one of them must fit."""
        tensors = [
            (n, leaf) for n, leaf in named(leaves, arguments) if isinstance(leaf, Tensor)
        ]
        options = [readings(t, known.get(name), num_samples) for name, t in tensors]
        fitting: list[VisitRules] = []
        for rules in islice(product(*options), MAX_READINGS):
            small, large = [
                self._with(
                    leaves,
                    [
                        rule.select(t, range(size), num_samples)
                        if isinstance(rule, BatchAxis)
                        else t
                        for (_, t), rule in zip(tensors, rules, strict=True)
                    ],
                )
                for size in SIZES
            ]
            try:
                seen, _ = self._look(fqn, function, small, arguments)
                fitting.append(self._examine(fqn, function, seen, large, rules)[0])
            except (Exception, Refusal):
                continue  # not this reading
        if len(fitting) == 1 or (fitting and not self._splits):
            return fitting[0]
        raise Refusal(ValueError(_cannot_tell(fqn, [n for n, _ in tensors if n not in known])))

    def _known(self, seen: Seen, leaves: list[Any], arguments: Layout) -> dict[str, Rule]:
        """Rules of arguments that were passed in the small run too."""
        before = dict(named(seen.leaves, seen.arguments))
        return {
            name: self._decide.of_input("", name, before[name], leaf)
            for name, leaf in named(leaves, arguments)
            if isinstance(leaf, Tensor) and isinstance(before.get(name), Tensor)
        }

    # Running

    def _apply(
        self,
        fqn: str,
        function: Callable[..., Any],
        leaves: list[Any],
        arguments: Layout,
        *,
        with_graph: bool,
    ) -> Any:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        given = [t.detach().requires_grad_(with_graph and t.requires_grad) for t in tensors]
        objects = [
            leaf for leaf in leaves if not isinstance(leaf, Tensor) and not is_plain(leaf)
        ]
        before = [fingerprint(each) for each in objects]
        versions = [t._version for t in given]
        args, kwargs = unflatten(self._with(leaves, given), arguments.spec)
        grad_mode = torch.enable_grad() if with_graph else torch.no_grad()
        try:
            # Without autocast's cache, which would carry casts of parameters from call to call.
            kind = self._anchor.device.type
            autocast = autocast_as(kind, autocast_dtype_now(kind))
            with self._watcher.call(fqn, given), grad_mode, autocast:
                output = function(*args, **kwargs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise Refusal(RuntimeError(writes_on_input(fqn))) from error
            raise
        if self._has_gradients and [t._version for t in given] != versions:
            raise Refusal(RuntimeError(writes_on_input(fqn)))
        self._check_unchanged(fqn, objects, before)
        after, spec = flatten((args, kwargs))
        if spec != arguments.spec or any(
            a is not b for a, b in zip(after, self._with(leaves, given), strict=True)
        ):
            raise Refusal(ValueError(_changes(fqn, "a list or dict")))
        self._check_plain(fqn, output)
        return output

    def _returned(
        self,
        outputs: Sequence[Any],
        spec: Any,
        tensors: Sequence[Tensor],
        flags: Sequence[bool],
    ) -> Any:
        """The output as the model gets it: belonging to the outside, and asking for "
        "gradients.
        """
        given = [
            _Attached.apply(self._anchor, t) if flag and self._has_gradients else t  # type: ignore[no-untyped-call]
            for t, flag in zip(tensors, flags, strict=True)
        ]
        self._watcher.give(given)
        return unflatten(self._with(outputs, given), spec)

    def _with(self, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
        remaining = iter(tensors)
        return [next(remaining) if isinstance(x, Tensor) else x for x in leaves]

    # Refusing

    def _check_unchanged(self, fqn: str, objects: Sequence[Any], before: Sequence[Any]) -> None:
        for each, known in zip(objects, before, strict=True):
            if fingerprint(each) != known:
                raise Refusal(ValueError(_changes(fqn, f"a {type(each).__name__}")))

    def _check_counters(self, fqn: str, once: dict[Any, Any], twice: dict[Any, Any]) -> None:
        counting = [name for (_, name), value in once.items() if twice.get((_, name)) != value]
        if counting:
            raise Refusal(
                ValueError(
                    f"unit {fqn!r} changes its attribute {counting[0]!r} at every call, so "
                    "once for each microbatch and each recomputation. Count outside of "
                    "units, once for each forward."
                )
            )

    def _check_plain(self, fqn: str, output: Any) -> None:
        for leaf in flatten(output)[0]:
            if isinstance(leaf, Tensor) or is_plain(leaf):
                continue
            if fingerprint(leaf).holds_tensors:
                raise Refusal(
                    TypeError(
                        f"unit {fqn!r} returns a {type(leaf).__name__}, whose tensors HetFSDP "
                        "cannot see. Use tuples or dicts, or register the class with "
                        "torch.export.register_dataclass."
                    )
                )

    def _check_buffers(self, writes: BufferWrites) -> None:
        if not self._module.training:
            return
        persistent = set(self._module.state_dict(keep_vars=True))
        for fqn, buffer in writes.written().items():
            if fqn in persistent or buffer._version:
                raise Refusal(
                    ValueError(
                        f"buffer {fqn!r} is written in forward, once for each microbatch of "
                        "each rank, so ranks would come to differ. Keep it out of the "
                        "training forward, or compute it from what all ranks have (only "
                        "batch norm's running statistics are kept equal)."
                    )
                )


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


class _Attached(torch.autograd.Function):
    """A tensor that asks for a gradient and sends it nowhere."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None


def _refuse_random(operation: str) -> None:
    raise Refusal(
        ValueError(
            f"the model draws random numbers outside of units ({operation}), once for the "
            "rank's whole batch, so that the result depends on the plan. Draw them inside of "
            "a unit, by nn.Dropout or torch.nn.functional.dropout, or leave that out "
            "(layerdrop=0.0)."
        )
    )


def _accept(_operation: str) -> None:
    """With one microbatch per rank the root draws as one process would."""


def _calls_others(fqn: str) -> str:
    return (
        f"unit {fqn!r}: it is called in another order, or with other kinds of arguments, for "
        f"{LARGE} samples than for {SMALL}. Call the units in the same way whatever the "
        "number of samples."
    )


def _returns_others(fqn: str) -> str:
    return (
        f"unit {fqn!r}: it returns other things for {LARGE} samples than for {SMALL}. Return "
        "the same whatever the number of samples."
    )


def _changes(fqn: str, what: str) -> str:
    return (
        f"unit {fqn!r} changes {what} that it is passed, which every microbatch and every "
        "recomputation would change again. Switch that off (use_cache=False for a KV cache), "
        "or return what is new instead."
    )


def _cannot_tell(fqn: str, names: Sequence[str]) -> str:
    return (
        f"unit {fqn!r} is called with other kinds of arguments than when the model was first "
        f"called in this way, and it cannot be told which of {', '.join(names)} hold samples. "
        "Pass tensors in the same places at every step (a mask always or never)."
    )
