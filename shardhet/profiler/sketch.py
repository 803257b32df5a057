"""How a model calls its units: found by one forward on tensors that hold no memory.

Fake tensors are meta tensors that say which device they are on, so that the same kernels are
chosen as on that device: on plain meta tensors attention would keep its scores.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardhet.fsdp.build import UnitDraft, casting, draft_units
from shardhet.fsdp.wrapping import find_units
from shardhet.profiler.batch import ExampleBatch

LossFn = Callable[..., tuple[Tensor, Tensor]]

# Two sizes tell what grows with the batch.  One sample is no typical batch: dimensions of
# length 1 are broadcast, and copied where others are not.
SIZES = (2, 3)


@dataclass(frozen=True, slots=True)
class TensorInput:
    """One tensor that a unit is called with."""

    sample_shape: tuple[int, ...]  # of one sample where it is batched, else all of it
    dtype: torch.dtype
    is_batched: bool
    requires_grad: bool
    source: int | None  # which tensor of the example batch it is; None: computed

    def shape(self, num_samples: int) -> tuple[int, ...]:
        """Its shape for so many samples."""
        return (num_samples, *self.sample_shape) if self.is_batched else self.sample_shape

    def nbytes(self, num_samples: int) -> int:
        """Its bytes for so many samples."""
        return torch.Size(self.shape(num_samples)).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One call of a module of a unit; tensors among the arguments are described."""

    module_fqn: str
    leaves: tuple[Any, ...]  # TensorInput, or what is no tensor
    spec: TreeSpec  # of (args, kwargs), the loss inputs of the head being the first argument
    is_head: bool  # the loss is computed from what it returns

    @property
    def tensor_inputs(self) -> list[TensorInput]:
        """The tensors among its arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorInput)]

    def arguments(
        self, make: Callable[[TensorInput], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with ``make`` giving the tensors."""
        leaves = [make(leaf) if isinstance(leaf, TensorInput) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def function(
        self, model: nn.Module, *, param_dtype: torch.dtype | None, loss_fn: LossFn | None
    ) -> Callable[..., Any]:
        """What the runtime runs for it, with the modules of ``model``."""
        forward = casting(model.get_submodule(self.module_fqn).forward, param_dtype)
        if not self.is_head:
            return forward
        assert loss_fn is not None
        return partial(_with_loss, forward, loss_fn)


def _with_loss(
    forward: Callable[..., Any], loss_fn: LossFn, loss_inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    return loss_fn(forward(*args, **kwargs), *loss_inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSketch:
    """One unit, in order of execution; the root comes last and is not called."""

    fqn: str
    kind: str  # units of one kind are alike
    draft: UnitDraft  # in a model whose tensors are fake
    calls: tuple[UnitCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSketch:
    """The units of a model and how they are called."""

    model: nn.Module  # a copy, all fake
    fake_mode: FakeTensorMode
    units: tuple[UnitSketch, ...]

    @property
    def unit_by_kind(self) -> dict[str, UnitSketch]:
        """The first unit of each kind."""
        return {unit.kind: unit for unit in reversed(self.units)}


def sketch_model(
    model: nn.Module,
    batch: ExampleBatch,
    *,
    units: Sequence[type[nn.Module] | str] | None,
    loss_fn: LossFn | None,
    param_dtype: torch.dtype | None,
    device: torch.device,
) -> ModelSketch:
    """The units that HetFSDP would make of ``model``, in the order in which it calls them.

    ``model`` may be on the meta device and is not touched.  Raises ``ValueError`` where an
    input of a unit depends on the batch in another way than by its dim 0.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    with fake_mode:
        copied = copy_with(model, fake, param_dtype=param_dtype)
        modules = find_units(copied, units, keeps_last=loss_fn is not None)
        drafts = draft_units(copied, modules)
        recorder = _Recorder(copied, drafts, has_loss=loss_fn is not None)
        first, second = [
            recorder.record(batch.of_size(size).map(fake), param_dtype) for size in SIZES
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
    return ModelSketch(
        model=copied, fake_mode=fake_mode, units=_named_by_kind(drafts, calls_by_unit)
    )


def copy_with(
    model: nn.Module,
    make: Callable[[Tensor], Tensor],
    *,
    param_dtype: torch.dtype | None = None,
) -> nn.Module:
    """A copy of the model whose tensors are those that ``make`` gives; nothing is copied.

    Floating-point parameters get ``param_dtype``, as they travel.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        made = make(param)
        if param_dtype is not None and made.is_floating_point():
            made = made.to(param_dtype)
        memo[id(param)] = nn.Parameter(made, requires_grad=param.requires_grad)
    memo |= {id(buffer): make(buffer) for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A call as it was seen for one batch."""

    unit: int
    module_fqn: str
    leaves: list[Any]
    spec: TreeSpec
    sources: list[int | None]  # per leaf
    is_head: bool


class _Recorder:
    """Runs a model and writes down how its units are called."""

    def __init__(
        self, model: nn.Module, drafts: Sequence[UnitDraft], *, has_loss: bool
    ) -> None:
        self._model = model
        self._modules = [
            (i, fqn, module)
            for i, draft in enumerate(drafts)
            for fqn, module in zip(draft.modules.fqns, draft.modules.modules, strict=True)
        ]
        positions = {fqn: i for i, (fqn, _) in enumerate(model.named_modules())}
        last = max((fqn for _, fqn, _ in self._modules), key=positions.__getitem__, default="")
        self._head_fqn = last if has_loss else None

    def record(self, batch: ExampleBatch, param_dtype: torch.dtype | None) -> list[_Seen]:
        """The calls of one forward, in order."""
        seen: list[_Seen] = []
        source_by_id = {id(tensor): i for i, tensor in enumerate(batch.tensors)}

        def note(unit: int, fqn: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:
            is_head = fqn == self._head_fqn
            given = ((batch.loss_inputs, *args), kwargs) if is_head else (args, kwargs)
            leaves, spec = tree_flatten(given)
            sources = [source_by_id.get(id(leaf)) for leaf in leaves]
            seen.append(_Seen(unit, fqn, leaves, spec, sources, is_head))
            return casting(lambda *a, **k: (a, k), param_dtype)(*args, **kwargs)

        handles = [
            module.register_forward_pre_hook(partial(note, unit, fqn), with_kwargs=True)
            for unit, fqn, module in self._modules
        ]
        try:
            with torch.enable_grad():
                self._model(*batch.args, **batch.kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return seen


def _merged(one: _Seen, two: _Seen) -> UnitCall:
    """The call, with what differs between two sizes of batch found to be batched."""
    leaves: list[Any] = []
    for leaf, other, source in zip(one.leaves, two.leaves, one.sources, strict=True):
        if not isinstance(leaf, Tensor):
            leaves.append(leaf)
            continue
        is_batched = leaf.shape[:1] != other.shape[:1]
        if leaf.shape[1:] != other.shape[1:] or (is_batched and leaf.shape[0] != SIZES[0]):
            raise ValueError(
                f"unit {one.module_fqn!r}: an input has shape {tuple(leaf.shape)} for "
                f"{SIZES[0]} samples and {tuple(other.shape)} for {SIZES[1]}, but only dim 0 "
                "may depend on the batch, and be its size. Put the batch first, or choose "
                "units that receive it there."
            )
        shape = leaf.shape[1:] if is_batched else leaf.shape
        leaves.append(
            TensorInput(tuple(shape), leaf.dtype, is_batched, leaf.requires_grad, source)
        )
    return UnitCall(one.module_fqn, tuple(leaves), one.spec, one.is_head)


def _named_by_kind(
    drafts: Sequence[UnitDraft], calls_by_unit: dict[int, list[UnitCall]]
) -> tuple[UnitSketch, ...]:
    """The units in order of execution; those that look alike share the name of a kind."""
    name_by_look: dict[Any, str] = {}
    sketches = []
    for i, calls in calls_by_unit.items():
        draft = drafts[i]
        look = _look(draft, calls)
        if look not in name_by_look:
            base = _snake(type(draft.modules.modules[0]).__name__)
            taken = [name for name in name_by_look.values() if name.split("_v")[0] == base]
            name_by_look[look] = f"{base}_v{len(taken) + 1}" if taken else base
        sketches.append(
            UnitSketch(fqn=draft.fqn, kind=name_by_look[look], draft=draft, calls=tuple(calls))
        )
    root = drafts[-1]
    if any(slot.shape.numel() for slot in root.slots):
        sketches.append(UnitSketch(fqn=root.fqn, kind="root", draft=root, calls=()))
    return tuple(sketches)


def _look(draft: UnitDraft, calls: Sequence[UnitCall]) -> tuple[Any, ...]:
    """Equal for units that cost the same."""
    params = [
        (tuple(slot.shape), str(slot.current.dtype), slot.is_trainable) for slot in draft.slots
    ]
    return (
        tuple(repr(module) for module in draft.modules.modules),
        tuple(params),
        tuple(tuple(map(_look_of, call.leaves)) for call in calls),
        tuple((str(call.spec), call.is_head) for call in calls),
    )


def _look_of(leaf: Any) -> Any:
    """What of an argument decides the cost: everything but where it comes from."""
    if isinstance(leaf, TensorInput):
        return replace(leaf, source=None)
    is_plain = leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype)
    return repr(leaf) if is_plain else type(leaf).__name__


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
