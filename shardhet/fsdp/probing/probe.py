"""Runs a model on two and on three samples before it is trained, to find where the batch is.

At the first call of every kind all ranks run the model on a few of its real samples, without
a backward.  Attributes, buffers and random states are restored afterwards.
Generators of the host draw what ``host_draws`` says.

    run    samples    what is found
    small  a b        how units are called, what needs gradients, what leaks out of units
    large  a b c      which dimensions grow with the batch; whether a unit gives the same in the
                      microbatches (a b) and (c), and (a) and (b c), as whole; after it, whether
                      units that are recomputed give for (a b) what they gave in the small run
    rest   c, a, ...  whether what the model returns is, for (a b c) and for (a b a), that of
                      its parts; units return what they have for these samples in the large run

What cannot be shown to be right is refused by name.  During a probe dropout is off and batch
norm uses its running statistics, so that a sample's values do not depend on the other samples.
"""

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn

from shardhet.comm.channel import Channel
from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.batching import (
    BatchAxis,
    Layout,
    Rule,
    VisitRules,
    flatten,
    unflatten,
)
from shardhet.fsdp.microbatch.caches import CacheSwitch
from shardhet.fsdp.microbatch.layered import tensors_in
from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.probing.apart import (
    BENT,
    MIXED,
    TensorHooks,
    attached,
    has_own_backward,
    is_apart,
    is_linear_outside,
)
from shardhet.fsdp.probing.comparing import check_params
from shardhet.fsdp.probing.examine import Examiner
from shardhet.fsdp.probing.law import Law
from shardhet.fsdp.probing.module_state import (
    Number,
    Writes,
    marks_of,
    numbers,
    restored_modules,
    set_numbers,
    values_of,
)
from shardhet.fsdp.probing.probed_call import CallRunner, ProbedCall, Seen, copied, filled
from shardhet.fsdp.probing.recorded import Recorded
from shardhet.fsdp.probing.rules import LARGE, SMALL
from shardhet.fsdp.probing.watch import Watcher
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.stages.flow import Flow, Reads, storage_of
from shardhet.records.plan import Plan


class CallKey(NamedTuple):
    """One of the calls of a module in a forward."""

    fqn: str
    call: int  # number of earlier calls


class SeenInput(NamedTuple):
    """A tensor with samples that needs a gradient, as an input of a unit."""

    fqn: str  # of the unit's module
    tensor: int  # the same number if the same tensor is an input of several units
    bytes_per_sample: float


class ParamStorages(Container[int]):
    """The storages that hold parameters now: rows of frozen ones move (``residence``)."""

    def __init__(self, flats: Sequence[FlatTensor]) -> None:
        self._flats = flats
        self._ever = frozenset(self._held())

    def _held(self) -> Iterator[int]:
        for flat in self._flats:
            for each in (flat.flat_shard, *flat.unsharded_params[:1]):
                yield each.untyped_storage()._cdata

    def __contains__(self, storage: object) -> bool:
        return storage in self._ever and storage in self._held()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """A model as its probes see it."""

    module: nn.Module
    root: FSDPUnit
    norms: BatchNorms
    caches: CacheSwitch
    loss: FusedLoss
    control: Channel
    device: torch.device
    anchor: Tensor  # requires a gradient
    params: frozenset[int]  # ids of unsharded parameters
    rows: Mapping[int, int]  # indices of units, by id of a sharded parameter
    gathered: Mapping[int, int]  # the same, by id of an unsharded parameter
    storages: Container[int]  # those that hold parameters
    is_followed: bool  # whether results of units are followed to where they are used
    divides_late: bool  # whether losses are divided by their tokens after backward
    recomputed: frozenset[str]  # fqns of units' modules that any rank recomputes

    @classmethod
    def of(
        cls,
        module: nn.Module,
        units: Sequence[FSDPUnit],
        root: FSDPUnit,
        norms: BatchNorms,
        caches: CacheSwitch,
        loss: FusedLoss,
        *,
        control: Channel,
        device: torch.device,
        plan: Plan,
    ) -> Self:
        """The model with its units, and the root for all other parameters."""
        of_units = [(i, flat) for i, unit in enumerate(units) for flat in unit.flats]
        flats = [*(flat for _, flat in of_units), *root.flats]
        return cls(
            module=module,
            root=root,
            norms=norms,
            caches=caches,
            loss=loss,
            control=control,
            device=device,
            anchor=torch.zeros((), device=device, requires_grad=True),
            params=frozenset(id(each) for flat in flats for each in flat.unsharded_params),
            rows={id(each): i for i, flat in of_units for each in flat.sharded_params},
            gathered={id(each): i for i, flat in of_units for each in flat.unsharded_params},
            storages=ParamStorages(flats),
            is_followed=plan.stages is not None,
            divides_late=plan.stages is not None or plan.num_rounds > 1,
            recomputed=frozenset(
                each.fqn
                for unit in units
                for each in unit.modules
                if any(rank.recomputes(each.fqn) for rank in plan.ranks)
            ),
        )


class Probe:
    """The runs of a model on a few samples, on one rank."""

    def __init__(self, model: ProbedModel, *, has_gradients: bool, splits: bool) -> None:
        self.rules: dict[CallKey, VisitRules] = {}
        self.inputs: list[SeenInput] = []
        self._refs: list[ref[Tensor]] = []  # of their tensors
        self.counted: set[Number] = set()  # attributes that a forward has changed
        self.rewritten: set[str] = set()  # buffers and numbers
        self.values: dict[str, Mapping[Number, Any]] = {}  # of attributes, after each run
        self.begins_with: Mapping[Number, Any] = {}  # attributes' values before the next run
        self._seen: dict[CallKey, Seen] = {}
        self._recorded: dict[CallKey, Recorded] = {}
        self._model, self.is_behind = model, False  # for the second see ``ModelCall``
        self.is_unlike = False  # a call of the present run has arguments of other kinds
        self.flow: Flow | None = None  # of the large run
        self._has_gradients = has_gradients
        self._splits = splits
        self._hooks = TensorHooks()
        self.watcher = Watcher(is_cut=has_gradients and splits)
        self.watcher.rows, self.watcher.params = model.rows, model.params
        self.watcher.storages, self.watcher.gathered = model.storages, model.gathered
        self.watcher.on_random_outside = _refuse_random if splits else _accept
        self._runner = CallRunner(
            model.module, self.watcher, device=model.device, has_gradients=has_gradients
        )
        self._examiner = Examiner(
            self._runner,
            self.watcher,
            splits=splits,
            divides_late=model.divides_late,
        )
        # Not bound: a cycle would keep all that has been seen until cycles are collected.
        self._run: Callable[[Probe, CallKey, ProbedCall], Any] = Probe._run_small
        self._num_calls: Counter[str] = Counter()  # by module, in the present run
        self._samples: Sequence[int] = ()  # of the present run

    @property
    def is_certain(self) -> bool:
        """Whether no output was zero and might therefore be a sum or a mean."""
        return self._examiner.is_certain

    @property
    def eps(self) -> float:
        """Epsilon of the narrowest dtype in which anything was computed."""
        return self.watcher.eps

    @contextmanager
    def running(
        self, name: str, inputs: Sequence[tuple[Tensor, bool | None]], samples: Sequence[int]
    ) -> Iterator[None]:
        """A context for one forward on ``inputs`` (``rows_in``); ``name`` is that of a row of
        the table above, or "plain".
        """
        self._run = getattr(Probe, f"_run_{name}")
        self._samples, self.is_unlike = samples, False
        self._num_calls.clear()
        with _isolated(self._model):
            set_numbers(self._model.module, self.begins_with)
            writes, before = Writes(self._model.module), numbers(self._model.module)
            given = [tensor for tensor, _ in inputs]
            self.watcher.give(given)
            self.watcher.made_rows.begin(inputs)
            follows = self._model.is_followed and name == "large"
            self.watcher.flow = Flow(given) if follows else None
            self.flow = self.watcher.flow or self.flow
            reads = Reads(self.watcher.read, self.watcher.hook) if follows else nullcontext()
            self.watcher.aliased.clear()
            with self._hooks if name == "large" else nullcontext(), reads, self.watcher:
                yield
            changed = dict(numbers(self._model.module).items() - before.items())
            self.counted |= changed.keys()
            self.values[name] = values_of(self._model.module)
            writes.check()
            self.rewritten |= writes.take()
            check_params(self._model.module, self.watcher.storages)

    def check_output(self, output: Any) -> None:
        """Raise if the model returns a tensor that a unit has made but not returned."""
        self.watcher.check_returned(tensors_in(output))
        if self.watcher.flow is not None:
            self.watcher.flow.reach(tensors_in(output))

    def repeat(self) -> None:
        """Raise if a unit that is recomputed gives something else after the forward than in
        it.
        """
        self._run, self.watcher.flow = Probe._run_again, None
        self._num_calls.clear()
        for (fqn, _), seen in self._seen.items():
            if fqn in self._model.recomputed:
                args, kwargs = unflatten(seen.call.leaves, seen.call.arguments.spec)
                self._model.module.get_submodule(fqn).forward(*args, **kwargs)

    def call(
        self,
        fqn: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        *,
        is_piece: bool = False,
    ) -> Any:
        """The output of a call of a unit's module, or a piece of the root, in this run."""
        leaves, spec = flatten((args, kwargs))
        self.watcher.check_arguments(tensors_in(leaves))
        key = CallKey(fqn, self._num_calls[fqn])
        self._num_calls[fqn] += 1
        known = self._seen if self._run is Probe._run_large else self._recorded
        if key not in known and self._run not in (Probe._run_small, Probe._run_plain):
            raise Law.APART.refusal(f"unit {fqn!r}{_CALLED_OTHERWISE}")
        flow = self.watcher.flow
        if flow is not None and not is_piece:
            flow.reach(tensors_in(leaves))
        with self.watcher.paused():
            call = ProbedCall(fqn, function, leaves, Layout.of(leaves, spec))
            output = self._run(self, key, call)
        self.watcher.made_rows.pass_through(tensors_in(leaves), tensors_in(output))
        if flow is not None and is_piece:
            flow.drop(tensors_in(leaves), tensors_in(output))
        elif flow is not None:
            flow.give(output, self.rules[key])
        return output

    def infer(
        self, call: ProbedCall, num_samples: int, known: Mapping[str, Rule]
    ) -> VisitRules:
        """The rules of a call within a step, of a kind that no probe has seen.

        ``known`` are rules of some of its arguments, by name.
        """
        with (
            _isolated(self._model),
            self.watcher,
            self.watcher.paused(),
        ):
            return self._examiner.infer(call, num_samples, known)[0]

    # One call in each run

    def _run_small(self, key: CallKey, call: ProbedCall) -> Any:
        seen, output = self._runner.look(call)
        self.watcher.check_counts(f"unit {call.fqn!r}", tensors_in(output))
        self._seen[key] = seen
        return self._returned(output, list(map(copied, seen.outputs)), seen.is_differentiable)

    def _run_large(self, key: CallKey, call: ProbedCall) -> Any:
        seen = self._seen[key]
        module = self._runner.module_of(call)
        marks, kept = marks_of(module), call.on(list(map(copied, call.tensors)))
        if seen.call.arguments == call.arguments:
            rules, output = self._examiner.rules_of(seen, call)
        else:  # perhaps a mask that only one sample needs
            known = self._examiner.known_from(seen, call)
            rules, output = self._examiner.infer(call, LARGE, known)
        self.rules[key] = rules
        marks = marks if marks == marks_of(module) else []
        self._recorded[key] = Recorded(kept, output, rules, marks, self._splits)
        self._note_inputs(call, rules)
        for tensor, rule in zip(call.tensors, rules.inputs, strict=True):
            self.check_backward(f"an argument of unit {call.fqn!r}", tensor, [rule])
        copies = list(map(copied, tensors_in(output)))
        returned = self._returned(output, copies, rules.is_differentiable, rules.outputs)
        for i, tensor in enumerate(tensors_in(returned)):
            if i in self._examiner.aliased:
                self.watcher.aliased[storage_of(tensor)] = (call.fqn, tensor)
        return returned

    def check_backward(self, what: str, tensor: Tensor, rules: Sequence[Rule]) -> None:
        """Raise if code outside of units mixes samples in the backward of a tensor of the large
        run, whose samples are where one of ``rules`` says.
        """
        is_own = self._hooks.are_found or has_own_backward(tensor)
        if not (is_own and tensor.requires_grad):
            return
        axes = [rule for rule in rules if isinstance(rule, BatchAxis)] if self._splits else []
        if self._model.divides_late and not is_linear_outside(tensor, self.eps):
            raise Law.GRADIENTS.refusal(f"{what}, computed outside of units{BENT}")
        if axes and not any(is_apart(tensor, axis, self.eps) for axis in axes):
            raise Law.GRADIENTS.refusal(f"{what}, computed outside of units{MIXED}")

    def _note_inputs(self, call: ProbedCall, rules: VisitRules) -> None:
        for tensor, rule in zip(call.tensors, rules.inputs, strict=True):
            if isinstance(rule, BatchAxis) and tensor.requires_grad:
                known = (i for i, each in enumerate(self._refs) if each() is tensor)
                number = next(known, len(self._refs))
                self._refs += [ref(tensor)] * (number == len(self._refs))
                nbytes = tensor.numel() * tensor.dtype.itemsize / LARGE
                self.inputs.append(SeenInput(call.fqn, number, nbytes))

    def _run_rest(self, key: CallKey, call: ProbedCall) -> Any:
        known = self._recorded[key]
        self.is_unlike |= call.arguments != known.rules.arguments
        changed = known.changed(call, self._samples, self._runner.module_of(call))
        if changed is None:
            return self._run_afresh(key, call)
        output, results = known.results(call, self._samples, changed, self._runner.run)
        return self._returned(
            output, results, known.rules.is_differentiable, known.rules.outputs
        )

    def _run_afresh(self, key: CallKey, call: ProbedCall) -> Any:
        output, rules = self._runner.run(call), self._recorded[key].rules
        copies = list(map(copied, tensors_in(output)))
        return self._returned(output, copies, rules.is_differentiable, rules.outputs)

    def has_to_run(self, fqn: str, arguments: Any) -> bool:
        """Whether the next call of a unit's module computes anything in this run."""
        known = self._recorded.get(CallKey(fqn, self._num_calls[fqn]))
        if self._run is not Probe._run_rest or known is None:
            return True
        with self.watcher.paused():
            leaves, spec = flatten(arguments)
            call = ProbedCall(fqn, _accept, leaves, Layout.of(leaves, spec))
            changed = known.changed(call, self._samples, self._runner.module_of(call))
        return bool(changed) or known.has_to_run(changed)

    def _run_plain(self, key: CallKey, call: ProbedCall) -> Any:
        """As it is, with a cache that it changes, for a comparison of outputs alone."""
        given = [each.detach() for each in call.tensors]  # only in the call they are its own
        args, kwargs = unflatten(filled(call.leaves, given), call.arguments.spec)
        with self.watcher.call(call.fqn, given), torch.no_grad():
            output = call.function(*args, **kwargs)
        self.watcher.give(call.tensors)  # they were made outside, and may be used there
        tensors = tensors_in(output)
        return self._returned(output, tensors, [False] * len(tensors))

    def _run_again(self, key: CallKey, _call: ProbedCall) -> Any:
        seen = self._seen[key]
        if any(seen.is_differentiable):
            self._runner.check_repeated(seen)
        return seen.outputs

    def _returned(
        self,
        output: Any,
        tensors: Sequence[Tensor],
        flags: Sequence[bool],
        rules: Sequence[Rule] = (),
    ) -> Any:
        """The output given to the model: it counts as made outside of units, with gradients."""
        outputs, spec = flatten(output)
        given = [
            attached(self._model.anchor, t, rule) if flag and self._has_gradients else t
            for t, flag, rule in zip_longest(tensors, flags, rules)
        ]
        self.watcher.give(given)
        return unflatten(filled(outputs, given), spec)


@contextmanager
def _isolated(model: ProbedModel) -> Iterator[None]:
    with restored_modules(model.module), model.norms.frozen(), ExitStack() as stack:
        # If it is not imported, nothing is compiled; importing it takes seconds.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _refuse_random(operation: str) -> None:
    raise Law.REPEATS.refusal(
        f"the model draws random numbers outside of units ({operation}), once for all samples "
        "of a rank"
    )


def _accept(_operation: str) -> None:
    """Accept it: one rank computes all samples at once, and draws once, as one process does."""


_CALLED_OTHERWISE = (
    f" is called in another order, or with other kinds of arguments, for {LARGE} samples than "
    f"for {SMALL}"
)
