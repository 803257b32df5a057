"""Find how a model calls its units, by a forward pass on tensors without memory.

Fake tensors are meta tensors that claim to be on a device, so that torch chooses the same
kernels as on that device; on plain meta tensors, attention would keep its scores.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import TreeSpec

from shardhet.fsdp.microbatch.batching import (
    BatchAxis,
    BatchingRules,
    Join,
    Layout,
    find_axis,
    flatten,
    unflatten,
)
from shardhet.fsdp.microbatch.loss import loss_pair
from shardhet.fsdp.microbatch.surroundings import CacheSwitch
from shardhet.fsdp.sharding.build import UnitDraft, cast_arguments, casting, draft_units
from shardhet.fsdp.sharding.unit import UnitModules, find_units
from shardhet.profiler.batch import ExampleBatch, LossFn, TrainedModel

CPU = torch.device("cpu")
# Two batch sizes show what grows with the batch.  A single sample is not typical: dimensions of
# length 1 are broadcast, and copied where others are not.
SIZES = (2, 3)


@dataclass(frozen=True, slots=True)
class TensorInput:
    """One tensor that a unit is called with."""

    shape_of_one: tuple[int, ...]  # for one sample
    axis: BatchAxis | None  # the dimension that holds the samples; None: there is none
    dtype: torch.dtype
    requires_grad: bool
    source: int | None  # its index in the example batch; None: computed

    def shape(self, num_samples: int) -> tuple[int, ...]:
        """Its shape for ``num_samples`` samples."""
        if self.axis is None:
            return self.shape_of_one
        return self.axis.shape(self.shape_of_one, num_samples)

    def nbytes(self, num_samples: int) -> int:
        """Its bytes for ``num_samples`` samples."""
        return torch.Size(self.shape(num_samples)).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One call of a module of a unit; tensors among the arguments are described."""

    module_fqn: str
    leaves: tuple[Any, ...]  # a TensorInput for each tensor; other values as they are
    rules: BatchingRules  # for (args, kwargs); for the head, the loss inputs come first
    is_head: bool  # the loss is computed from its output

    @property
    def tensor_inputs(self) -> list[TensorInput]:
        """The tensors among its arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorInput)]

    def arguments(
        self, make: Callable[[TensorInput], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with tensors made by ``make``."""
        leaves = [make(leaf) if isinstance(leaf, TensorInput) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(leaves, self.rules.arguments.spec)
        return args, kwargs

    def function(
        self, model: nn.Module, *, param_dtype: torch.dtype | None, loss_fn: LossFn | None
    ) -> Callable[..., Any]:
        """The function that the runtime runs for the call, with the modules of ``model``."""
        forward = casting(model.get_submodule(self.module_fqn).forward, param_dtype)
        if not self.is_head:
            return forward
        assert loss_fn is not None
        return partial(_with_loss, forward, loss_fn)


def pass_on(output: Any, *_loss_inputs: Any) -> Any:
    """In place of a loss in the head, if it is outside."""
    return output


def _with_loss(
    forward: Callable[..., Any], loss_fn: LossFn, loss_inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    return loss_fn(forward(*args, **kwargs), *loss_inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """One unit, in order of execution; the root comes last and is not called."""

    fqn: str
    kind: str  # units of one kind are alike
    draft: UnitDraft  # of a model with fake tensors
    calls: tuple[UnitCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The units of a model and how they are called."""

    model: nn.Module  # a copy, all fake
    fake_mode: FakeTensorMode
    units: tuple[UnitSpec, ...]
    output: Any  # of the model, without the loss
    goes_on: bool  # whether the loss is that of this output, not of the head's
    times_loss: bool  # with the head, of whose output it can be computed
    head_fqn: str | None  # the module that the loss follows, if there is a ``loss_fn``
    stored_itemsizes: Mapping[str, int]  # of every parameter by name, before any cast

    @property
    def unit_by_kind(self) -> dict[str, UnitSpec]:
        """The first unit of each kind."""
        return {unit.kind: unit for unit in reversed(self.units)}


def trace_model(model: TrainedModel, device: torch.device = CPU) -> ModelSpec:
    """The units that HetFSDP would make of ``model``, in the order in which it calls them.

    The module may be on the meta device and is not changed.  Raises ``ValueError`` if an input
    of a unit depends on the batch other than through a dimension that holds the samples.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    with fake_mode:
        copied = copy_with(model.module, fake, param_dtype=model.param_dtype)
        modules = find_units(copied, model.units, keeps_last=model.loss_fn is not None)
        drafts = draft_units(copied, modules)
        recorder = _Recorder(copied, drafts, loss_fn=model.loss_fn)
        first, second = [
            recorder.record(
                model.batch.of_size(size).map(fake).cast(model.param_dtype), model.param_dtype
            )
            for size in SIZES
        ]
    if [call.module_fqn for call in first] != [call.module_fqn for call in second]:
        raise ValueError("model: it calls other units for 2 samples than for 3. Name units=.")
    calls_by_unit: dict[int, list[UnitCall]] = {}
    for one, two in zip(first, second, strict=True):
        calls_by_unit.setdefault(one.unit, []).append(_merged(one, two))
    never = [draft.fqn for i, draft in enumerate(drafts[:-1]) if i not in calls_by_unit]
    if never:
        raise ValueError(
            f"model: units {never} are not called for the example batch. Give a batch that "
            "uses all of the model, or name other units."
        )
    return ModelSpec(
        model=copied,
        fake_mode=fake_mode,
        units=_named_by_kind(drafts, calls_by_unit),
        output=recorder.output,
        goes_on=recorder.goes_on,
        times_loss=recorder.times_loss,
        head_fqn=recorder.head_fqn,
        stored_itemsizes={
            fqn: param.element_size()
            for fqn, param in model.module.named_parameters(remove_duplicate=False)
        },
    )


def last_module_fqn(model: nn.Module, units: Sequence[UnitModules]) -> str:
    """The module of a unit after which HetFSDP puts the loss."""
    positions = {fqn: i for i, (fqn, _) in enumerate(model.named_modules())}
    fqns = [fqn for unit in units for fqn in unit.fqns]
    return max(fqns, key=positions.__getitem__, default="")


def copy_with(
    model: nn.Module,
    make: Callable[[Tensor], Tensor],
    *,
    param_dtype: torch.dtype | None = None,
) -> nn.Module:
    """A copy of the model with tensors from ``make``; no tensor data is copied.

    Floating-point parameters get ``param_dtype``, as when they are gathered.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        made = make(param)
        if param_dtype is not None and made.is_floating_point():
            made = made.to(param_dtype)
        memo[id(param)] = nn.Parameter(made, requires_grad=param.requires_grad)
    memo |= {id(buffer): make(buffer) for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


@dataclass(slots=True)
class _Seen:
    """A call as it was recorded for one batch."""

    unit: int
    module_fqn: str
    leaves: list[Any]
    spec: TreeSpec
    sources: list[int | None]  # per leaf
    is_head: bool
    output: Any = None


class _Recorder:
    """Runs a model and records how its units are called."""

    def __init__(
        self, model: nn.Module, drafts: Sequence[UnitDraft], *, loss_fn: LossFn | None
    ) -> None:
        self._model = model
        self._modules = [
            (i, fqn, module)
            for i, draft in enumerate(drafts)
            for fqn, module in zip(draft.modules.fqns, draft.modules.modules, strict=True)
        ]
        last = last_module_fqn(model, [draft.modules for draft in drafts])
        self._cache_switch = CacheSwitch(model)
        self._loss_fn = loss_fn
        self.goes_on = False  # whether the model computes with the head's output
        self.times_loss = True
        self.output: Any = None  # of the model, in the last forward
        self.head_fqn = None if loss_fn is None else last

    def record(self, batch: ExampleBatch, param_dtype: torch.dtype | None) -> list[_Seen]:
        """The calls of one forward, in order."""
        seen: list[_Seen] = []
        source_by_id = {id(tensor): i for i, tensor in enumerate(batch.tensors)}

        def note(unit: int, fqn: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:
            is_head = fqn == self.head_fqn
            given = ((batch.loss_inputs, *args), kwargs) if is_head else (args, kwargs)
            leaves, spec = flatten(given)
            sources = [source_by_id.get(id(leaf)) for leaf in leaves]
            seen.append(_Seen(unit, fqn, leaves, spec, sources, is_head))
            return cast_arguments(args, kwargs, param_dtype)

        def note_output(fqn: str, _module: nn.Module, _args: Any, output: Any) -> None:
            next(each for each in reversed(seen) if each.module_fqn == fqn).output = output

        handles = []
        for unit, fqn, module in self._modules:
            before = partial(note, unit, fqn)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(note_output, fqn)))
        try:
            with torch.enable_grad(), self._cache_switch.off(), quiet_fakes():
                self.output = self._model(*batch.args, **batch.kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            reason = (
                f"the result of {error.func} depends on values, as where tokens go to experts"
            )
            raise _needs_values(seen, reason) from None
        except RuntimeError as error:
            raise _needs_values(seen, str(error).rstrip(".")) from error
        finally:
            for handle in handles:
                handle.remove()
        self._add_loss([each for each in seen if each.is_head], batch)
        return seen

    def _add_loss(self, heads: Sequence[_Seen], batch: ExampleBatch) -> None:
        """Let calls of the head return the loss: where it is computed, or takes as long."""
        returned = {id(leaf) for leaf in flatten(self.output)[0]}
        made = [leaf for each in heads for leaf in flatten(each.output)[0]]
        self.goes_on = bool(heads) and not any(id(leaf) in returned for leaf in made)
        loss_fn = self._loss_fn
        if loss_fn is None or not self.times_loss:
            return
        try:
            losses = [loss_fn(each.output, *batch.loss_inputs) for each in heads]
            for loss in losses:
                loss_pair(loss, loss_fn)
        except Exception as error:  # it may be of what the model makes of the head's output
            self.times_loss = False
            if self.goes_on:
                return
            if isinstance(error, TypeError) and not batch.loss_inputs:
                raise ValueError(
                    f"batch: loss_fn does not take what it holds for it ({error}). Give the "
                    "example its targets: ExampleBatch(args=(inputs,), loss_inputs=(targets,))."
                ) from error
            raise
        for each, loss in zip(heads, losses, strict=True):
            each.output = loss


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Context in which torch does not log failures on fake tensors; exceptions report them."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _needs_values(seen: Sequence[_Seen], reason: str) -> ValueError:
    running = [call.module_fqn for call in seen if call.output is None]
    where = f"unit {running[-1]!r}" if running else "the model, outside of its units"
    return ValueError(
        f"{where}: it cannot be run on tensors without values, so it can be neither counted "
        f"nor timed: {reason}. Give a batch that it takes, or train it by a plan that needs no "
        "measurement (plan=even, plan=by_hand, Plan.by_hand)."
    )


def _merged(one: _Seen, two: _Seen) -> UnitCall:
    """Merge the recordings for two batch sizes; what differs between them is batched."""
    leaves: list[Any] = []
    for leaf, other, source in zip(one.leaves, two.leaves, one.sources, strict=True):
        if not isinstance(leaf, Tensor):
            leaves.append(leaf)
            continue
        axis = _axis(f"unit {one.module_fqn!r}: an input", leaf, other)
        shape = tuple(leaf.shape) if axis is None else axis.shape(leaf.shape, 1)
        leaves.append(TensorInput(shape, axis, leaf.dtype, leaf.requires_grad, source))
    outputs, spec = flatten(one.output)
    pairs = [
        (small, large)
        for small, large in zip(outputs, flatten(two.output)[0], strict=True)
        if isinstance(small, Tensor)
    ]
    rules = BatchingRules(
        arguments=Layout.of(one.leaves, one.spec),
        inputs=tuple(
            leaf.axis or Join.SHARED for leaf in leaves if isinstance(leaf, TensorInput)
        ),
        results=Layout.of(outputs, spec),
        outputs=tuple(
            _axis(f"unit {one.module_fqn!r}: an output", small, large)
            or (Join.SUM if small.dim() == 0 else Join.SHARED)
            for small, large in pairs
        ),
        is_differentiable=tuple(small.requires_grad for small, _ in pairs),
    )
    return UnitCall(one.module_fqn, tuple(leaves), rules, one.is_head)


def _axis(what: str, small: Tensor, large: Tensor) -> BatchAxis | None:
    try:
        axes = find_axis(small, large, SIZES)
    except ValueError as error:
        raise ValueError(
            f"{what} has shape {tuple(small.shape)} for {SIZES[0]} samples and "
            f"{tuple(large.shape)} for {SIZES[1]}: {error}. Choose units that receive and "
            "return rows of samples."
        ) from error
    return axes[0] if axes else None


def _named_by_kind(
    drafts: Sequence[UnitDraft], calls_by_unit: dict[int, list[UnitCall]]
) -> tuple[UnitSpec, ...]:
    """The units in order of execution; units that look alike share a kind."""
    name_by_cost: dict[Any, str] = {}
    sketches = []
    for i, calls in calls_by_unit.items():
        draft = drafts[i]
        look = _look(draft, calls)
        if look not in name_by_cost:
            base = _snake(type(draft.modules.modules[0]).__name__)
            taken = [name for name in name_by_cost.values() if name.split("_v")[0] == base]
            name_by_cost[look] = f"{base}_v{len(taken) + 1}" if taken else base
        sketches.append(
            UnitSpec(fqn=draft.fqn, kind=name_by_cost[look], draft=draft, calls=tuple(calls))
        )
    root = drafts[-1]
    if any(slot.shape.numel() for slot in root.slots):
        sketches.append(UnitSpec(fqn=root.fqn, kind="root", draft=root, calls=()))
    return tuple(sketches)


def _look(draft: UnitDraft, calls: Sequence[UnitCall]) -> tuple[Any, ...]:
    """A description that is equal for units that cost the same."""
    params = [
        (tuple(slot.shape), str(slot.current.dtype), slot.is_trainable) for slot in draft.slots
    ]
    return (
        tuple(repr(module) for module in draft.modules.modules),
        tuple(params),
        tuple(tuple(map(_look_of, call.leaves)) for call in calls),
        tuple((str(call.rules.arguments.spec), call.is_head) for call in calls),
    )


def _look_of(leaf: Any) -> Any:
    """The part of an argument that decides the cost: everything except its source."""
    if isinstance(leaf, TensorInput):
        return replace(leaf, source=None)
    is_plain = leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype)
    return repr(leaf) if is_plain else type(leaf).__name__


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
