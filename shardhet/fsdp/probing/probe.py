"""Runs a model on two and on three samples before it is trained, to find where the batch is.

At the first call of every kind all ranks run the model on a few of its real samples, without
a backward.  Attributes, buffers and random states are restored afterwards.
Generators of the host draw what ``surroundings`` says.

    run    samples    what is found
    small  a b        how units are called, what needs gradients, what leaks out of units
    large  a b c      which dimensions grow with the batch; whether a unit gives the same in the
                      microbatches (a b) and (c), and (a) and (b c), as whole; after it, whether
                      units that are recomputed give for (a b) what they gave in the small run
    whole  a          of long samples, which are tried with few of their tokens: whether units
                      are called alike with all of them
    rest   c, a, ...  whether what the model returns is, for (a b c) and for (a b a), that of
                      its parts, once more with gradients where values do not tell; units
                      return what they have for these samples in the large run

What cannot be shown to be right is refused by name.  During a probe dropout is off and batch
norm uses its running statistics, so that a sample's values do not depend on the other samples.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn

from shardhet.comm.channel import Channel
from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.batching import (
    BatchAxis,
    BatchingRules,
    flatten,
    named_leaves,
    storage_of,
    unflatten,
)
from shardhet.fsdp.microbatch.layered import tensors_in
from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.microbatch.surroundings import CacheSwitch
from shardhet.fsdp.probing.comparing import Law, check_params
from shardhet.fsdp.probing.examine import Examiner
from shardhet.fsdp.probing.gradients import (
    NONLINEAR,
    OUTSIDE,
    Attached,
    Gradients,
    gradients_outside,
    has_own_backward,
    is_linear,
)
from shardhet.fsdp.probing.module_state import (
    Number,
    Writes,
    marks_of,
    numbers,
    restored_modules,
    set_numbers,
    values_of,
)
from shardhet.fsdp.probing.probed_call import (
    CallRunner,
    ProbedCall,
    Recorded,
    Seen,
    copies,
    filled,
)
from shardhet.fsdp.probing.rules import LARGE, SMALL
from shardhet.fsdp.probing.watch import Operators, Watcher
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.stages.flow import Flow, Reads
from shardhet.records.plan import Plan


class CallKey(NamedTuple):
    """One of the calls of a module in a forward."""

    fqn: str
    call: int  # number of earlier calls


# An output of the model, or a tensor among the arguments of a call.
Place = str | tuple[CallKey, int]


class SeenInput(NamedTuple):
    """A tensor with samples that needs a gradient, as an input of a unit."""

    fqn: str  # of the unit's module
    tensor: int  # the same number if the same tensor is an input of several units
    bytes_per_sample: float


def _storages_of(flats: Sequence[FlatTensor], among: Set[int] | None = None) -> set[int]:
    """The storages that hold parameters now: rows of frozen ones move (``persistence``)."""
    found = {
        each.untyped_storage()._cdata
        for flat in flats
        for each in (flat.flat_shard, *flat.unsharded_params[:1])
    }
    return found if among is None else found & among


@dataclass(eq=False, kw_only=True)
class ProbedModel:
    """A model as its probes see it: its units, and the root for all other parameters."""

    module: nn.Module
    units: tuple[FSDPUnit, ...]
    root: FSDPUnit
    norms: BatchNorms
    caches: CacheSwitch
    loss: FusedLoss
    control: Channel
    device: torch.device
    plan: InitVar[Plan]

    def __post_init__(self, plan: Plan) -> None:
        of_units = [(i, flat) for i, unit in enumerate(self.units) for flat in unit.flats]
        flats = [*(flat for _, flat in of_units), *self.root.flats]
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        # Ids of unsharded parameters, and indices of units by id of a parameter of theirs.
        self.params = frozenset(id(each) for flat in flats for each in flat.unsharded_params)
        self.rows = {id(each): i for i, flat in of_units for each in flat.sharded_params}
        self.gathered = {id(each): i for i, flat in of_units for each in flat.unsharded_params}
        self.storages = partial(_storages_of, flats, _storages_of(flats))
        # Results of units are followed to where they are used; losses are divided by their
        # tokens after backward.
        self.is_followed = plan.stages is not None
        self.divides_late = self.is_followed or plan.num_rounds > 1
        self.rank_plan = plan.ranks[self.control.position]
        modules = [each.fqn for unit in self.units for each in unit.modules]
        self.recomputed = {fqn for fqn in modules if any(r.recomputes(fqn) for r in plan.ranks)}

    def with_gathered(self, gathered: Mapping[int, int], rows: Mapping[int, int]) -> Self:
        """This model, of whose units other parameters must not be used outside of them."""
        other = copy(self)
        other.gathered, other.rows = dict(gathered), dict(rows)
        return other


class Probe:
    """The runs of a model on a few samples, on one rank."""

    def __init__(self, model: ProbedModel, *, has_gradients: bool, splits: bool) -> None:
        self.rules: dict[CallKey, BatchingRules] = {}
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
        self._has_gradients, self._splits = has_gradients, splits
        self._hooked: set[int] = set()  # tensors by id that got hooks outside of units
        self.own: list[Place] = []  # where code outside of units has a backward of its own
        self.gradients: dict[Place, Gradients] = {}  # kept in the present run
        # One rank that computes all samples at once draws once, as one process does.
        self.watcher = Watcher(is_cut=has_gradients and splits, refuses_random=splits)
        self.watcher.rows, self.watcher.params = model.rows, model.params
        self.watcher.storages, self.watcher.gathered = model.storages, model.gathered
        self._runner = CallRunner(
            module=model.module,
            watcher=self.watcher,
            device=model.device,
            has_gradients=has_gradients,
        )
        self.examiner = Examiner(
            runner=self._runner,
            watcher=self.watcher,
            splits=splits,
            divides_late=model.divides_late,
        )
        # Not bound: a cycle would keep all that has been seen until cycles are collected.
        self._run: Callable[[Probe, CallKey, ProbedCall], Any] = Probe._run_small
        self._num_calls: Counter[str] = Counter()  # by module, in the present run
        self._samples: Sequence[int] = ()  # of the present run

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
        if name == "whole":
            self.inputs, self._refs = [], []
        self.gradients = {}
        with isolated(self._model):
            set_numbers(self._model.module, self.begins_with)
            writes, before = Writes(self._model.module), numbers(self._model.module)
            given = [tensor for tensor, _ in inputs]
            self.watcher.give(given)
            self.watcher.made_rows.begin(inputs)
            follows = self._model.is_followed and name in ("large", "whole")
            self.watcher.flow = Flow(given) if follows else None
            self.flow = self.watcher.flow or self.flow
            reads = Reads(self.watcher.hook, self.watcher.read) if follows else nullcontext()
            hooks = Reads(lambda tensor: self._hooked.add(id(tensor)))
            self.watcher.aliased.clear()
            first = {"small": Operators(), "large": hooks}.get(name, nullcontext())
            with first, reads, self.watcher:
                yield
            self.counted |= dict(numbers(self._model.module).items() - before.items()).keys()
            self.values[name] = values_of(self._model.module)
            writes.check()
            self.rewritten |= writes.take()
            check_params(self._model.module, self.watcher.storages())

    def check_output(self, output: Any) -> None:
        """Raise if the model returns a tensor that a unit has made but not returned."""
        self.watcher.check_returned(tensors_in(output))
        if self._run is Probe._run_large:
            for at, leaf in named_leaves(output).items():
                if isinstance(leaf, Tensor):
                    self._check_backward(at, leaf, "an output of model(...)")
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
        call = ProbedCall.of(fqn, function, (args, kwargs))
        given = call.tensors
        self.watcher.check_arguments(given)
        key = CallKey(fqn, self._num_calls[fqn])
        self._num_calls[fqn] += 1
        known = self._seen if self._run is Probe._run_large else self._recorded
        if key not in known and self._run not in (Probe._run_small, Probe._run_plain):
            raise Law.INDEPENDENT.refusal(f"unit {fqn!r}{_CALLED_OTHERWISE}")
        flow = self.watcher.flow
        if flow is not None and not is_piece:
            flow.reach(given)
        if self._run is Probe._run_rest and call.arguments == self.rules[key].arguments:
            for i, tensor in enumerate(given):
                if (key, i) in self.own:
                    self.keep_gradients((key, i), tensor)
        with self.watcher.paused():
            output = self._run(self, key, call)
        self.watcher.made_rows.pass_through(given, tensors_in(output))
        if flow is not None and is_piece:
            flow.drop(given, tensors_in(output))
        elif flow is not None:
            flow.give(output, self.rules[key])
        return output

    # One call in each run

    def _run_small(self, key: CallKey, call: ProbedCall) -> Any:
        seen, output = self._runner.look(call)
        self.watcher.check_counts(f"unit {call.fqn!r}", tensors_in(output))
        self._seen[key] = seen
        return self._returned(key, output, copies(seen.outputs), seen.is_differentiable)

    def _run_large(self, key: CallKey, call: ProbedCall) -> Any:
        seen = self._seen[key]
        module = self._runner.module_of(call)
        marks, kept = marks_of(module), call.copy()
        if seen.call.arguments == call.arguments:
            rules, output = self.examiner.rules_of(seen, call)
        else:  # perhaps a mask that only one sample needs
            known = self.examiner.known_from(seen, call)
            rules, output = self.examiner.infer(call, LARGE, known)
        self.rules[key] = rules
        marks = marks if marks == marks_of(module) else []
        self._recorded[key] = Recorded(kept, output, rules, marks, self._splits)
        _note_inputs(self, call, rules)
        for i, (tensor, rule) in enumerate(zip(call.tensors, rules.inputs, strict=True)):
            if isinstance(rule, BatchAxis):
                self._check_backward((key, i), tensor, f"an argument of unit {call.fqn!r}")
        returned = self._returned(key, output, copies(output), rules.is_differentiable)
        for i, tensor in enumerate(tensors_in(returned)):
            if i in self.examiner.aliased:
                self.watcher.aliased[storage_of(tensor)] = (call.fqn, tensor)
        return returned

    def _check_backward(self, place: Place, tensor: Tensor, what: str) -> None:
        """Note that code outside of units has a backward of its own for a tensor of the large
        run, if it has; raise if that is not linear.
        """
        is_own = bool(self._hooked) or has_own_backward(tensor)
        if not (is_own and tensor.requires_grad and tensor.is_floating_point()):
            return
        if self._splits:
            self.own.append(place)
        with self.watcher.paused():
            is_nonlinear = self._model.divides_late and not is_linear(
                lambda scale: gradients_outside(tensor, scale), self.watcher.eps
            )
        if is_nonlinear:
            raise Law.GRADIENTS.refusal(f"{what}{OUTSIDE}{NONLINEAR}")

    def keep_gradients(self, place: Place, tensor: Tensor) -> None:
        """Keep gradients of what code outside of units has computed, in this run."""
        with self.watcher.paused():
            grads = gradients_outside(tensor) if tensor.requires_grad else {}
        self.gradients[place] = grads

    def _run_rest(self, key: CallKey, call: ProbedCall) -> Any:
        known = self._recorded[key]
        self.is_unlike |= call.arguments != known.rules.arguments
        changed = known.changed(call, self._samples, self._runner.module_of(call))
        if changed is None:
            return self._run_afresh(key, call)
        output, results = known.results(call, self._samples, changed, self._runner.run)
        return self._returned(key, output, results, known.rules.is_differentiable)

    def _run_whole(self, key: CallKey, call: ProbedCall) -> Any:
        rules, number = self._recorded[key].rules, len(self._samples)
        _note_inputs(self, call, rules)
        output = self._run_afresh(key, call)
        self.is_unlike |= not _fits(call, output, rules, number)
        return output

    def _run_afresh(self, key: CallKey, call: ProbedCall) -> Any:
        output, rules = self._runner.run(call), self._recorded[key].rules
        return self._returned(key, output, copies(output), rules.is_differentiable)

    def has_to_run(self, fqn: str, arguments: Any) -> bool:
        """Whether the next call of a unit's module computes anything in this run."""
        known = self._recorded.get(CallKey(fqn, self._num_calls[fqn]))
        if self._run is not Probe._run_rest or known is None:
            return True
        with self.watcher.paused():
            call = ProbedCall.of(fqn, flatten, arguments)
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
        return self._returned(key, output, tensors, [False] * len(tensors))

    def _run_again(self, key: CallKey, _call: ProbedCall) -> Any:
        seen = self._seen[key]
        if any(seen.is_differentiable):
            self._runner.check_repeated(seen)
        return seen.outputs

    def _returned(
        self, key: CallKey, output: Any, tensors: Sequence[Tensor], flags: Sequence[bool]
    ) -> Any:
        """The output given to the model: it counts as made outside of units, with gradients."""
        outputs, spec = flatten(output)
        given = [
            Attached.apply(self._model.anchor, t, (key, i))  # type: ignore[no-untyped-call]
            if flag and self._has_gradients
            else t
            for i, (t, flag) in enumerate(zip(tensors, flags, strict=True))
        ]
        self.watcher.give(given)
        return unflatten(filled(outputs, given), spec)


@contextmanager
def isolated(model: ProbedModel) -> Iterator[None]:
    """A context for calls of units that leave the model as it was."""
    with restored_modules(model.module), model.norms.frozen(), ExitStack() as stack:
        # If it is not imported, nothing is compiled; importing it takes seconds.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


_CALLED_OTHERWISE = (
    f" is called in another order, or with other kinds of arguments, for {LARGE} samples than "
    f"for {SMALL}"
)


def _fits(call: ProbedCall, output: Any, rules: BatchingRules, num_samples: int) -> bool:
    """Whether rules that were found are those of this call too."""
    pairs = (
        *zip(call.tensors, rules.inputs, strict=True),
        *zip(tensors_in(output), rules.outputs, strict=True),
    )
    return call.arguments == rules.arguments and all(
        rule.fits(tensor, num_samples) for tensor, rule in pairs
    )


def _note_inputs(probe: Probe, call: ProbedCall, rules: BatchingRules) -> None:
    for tensor, rule in zip(call.tensors, rules.inputs, strict=True):
        if isinstance(rule, BatchAxis) and tensor.requires_grad:
            known = (i for i, each in enumerate(probe._refs) if each() is tensor)
            number = next(known, len(probe._refs))
            probe._refs += [ref(tensor)] * (number == len(probe._refs))
            nbytes = tensor.numel() * tensor.dtype.itemsize / len(probe._samples)
            probe.inputs.append(SeenInput(call.fqn, number, nbytes))
