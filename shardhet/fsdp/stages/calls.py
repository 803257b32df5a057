"""Calls of units in the part of a forward that a stage computes.

[Note: A part of a forward]
A stage runs the model's whole forward, with the calls of units counted.  Calls before its own
return what was handed over, or absent tensors; the first call after its own ends the forward:

    stage 1 of 3    embedding  blocks.0   |  blocks.1  blocks.2  |  blocks.3
                    absent     received   |  computed            |  ends the forward

So code outside of units runs on every stage that needs it, on parameters of the root, which all
ranks have unsharded for the whole step.

[Note: Absent tensors]
In code of other stages the results of units are absent: operations on them give absent tensors
of the right shapes, which cost nothing.  Code that needs a value raises, and a stage raises
where an absent tensor reaches one of its units: a wrong value cannot come out.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map

from shardhet.fsdp.microbatch.batching import flatten, unflatten
from shardhet.fsdp.microbatch.layered import tensors_in
from shardhet.fsdp.microbatch.modes import written_by
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.attempt import RunModule
from shardhet.fsdp.probing.probed_call import filled
from shardhet.fsdp.probing.prober import Findings
from shardhet.fsdp.probing.watch import FACTORIES
from shardhet.fsdp.sharding.unit import UnitModule
from shardhet.fsdp.stages.flow import Result, Returned
from shardhet.fsdp.stages.stage_transfer import StagePart, StageTensor
from shardhet.fsdp.step.calls import UnitCalls
from shardhet.fsdp.step.schedule_executor import OTHER_ORDER

REMEDY = (
    "Let one stage have all units that use it, or use the same code and the same kinds of "
    "arguments at every step."
)


class MetaPlaceholder(Tensor):
    """A shape, dtype and device."""

    _shape: Tensor  # on the meta device
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def like(example: Tensor, device: torch.device) -> "MetaPlaceholder":
        """An absent tensor of the example's shape; the example is on the meta device."""
        made: MetaPlaceholder = torch.Tensor._make_wrapper_subclass(
            MetaPlaceholder,
            example.shape,
            strides=example.stride(),
            dtype=example.dtype,
            device=device,
        )
        made._shape = example
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # which has no class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on shapes alone."""
        kwargs = kwargs or {}
        absent = next(
            each for each in tree_leaves((args, kwargs)) if isinstance(each, MetaPlaceholder)
        )
        if func.__name__.split(".")[0] in FACTORIES:  # they use nothing but the shape
            return func(*tree_map(_filled, args), **tree_map(_filled, kwargs))
        _check_writes(func, args, kwargs)
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("meta")}
        try:
            result = func(*tree_map(_shape_of, args), **tree_map(_shape_of, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error).lower():
                _refuse(f"{func.__name__} asks for its values")
            raise
        if func._schema.is_mutable and isinstance(args[0], MetaPlaceholder):
            return args[0]
        device = absent.device

        def wrapped(leaf: Any) -> Any:
            return MetaPlaceholder.like(leaf, device) if isinstance(leaf, Tensor) else leaf

        return tree_map(wrapped, result)

    def __repr__(self) -> str:  # type: ignore[override]  # whose argument nobody passes
        """Its shape."""
        return f"Absent({tuple(self.shape)}, {self.dtype})"


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, MetaPlaceholder):
        return leaf._shape
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _filled(leaf: Any) -> Any:
    if not isinstance(leaf, MetaPlaceholder):
        return leaf
    return torch.zeros(1, dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def _check_writes(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raise if the operation would write what is absent into a tensor that is not."""
    if not all(isinstance(each, MetaPlaceholder) for each in written_by(func, args, kwargs)):
        _refuse(f"{func.__name__} writes it into another tensor")


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"stages: {what} outside of units, but it is what a unit of another stage has "
        f"returned, which is not handed over. {REMEDY}"
    )


class EndOfStage(BaseException):
    """Ends the model's forward at the first call after the stage's own."""


@dataclass(frozen=True, slots=True)
class CallKind:
    """What was found for a kind of call, on this rank's stage."""

    findings: Findings
    part: StagePart
    received: list[StageTensor]
    sent: list[StageTensor]

    @property
    def received_with_grad(self) -> list[StageTensor]:
        """Those that get a gradient."""
        return [each for each in self.received if each.is_differentiable]

    @property
    def sent_with_grad(self) -> list[StageTensor]:
        """Those that get a gradient."""
        return [each for each in self.sent if each.is_differentiable]


class StageCalls(UnitCalls):
    """Runs the calls of this stage's units, and stands in for those of others."""

    _kind: CallKind | None = None  # None while no part of a forward runs
    _place = 0  # of the next call of a unit
    _values: dict[Returned, Tensor]  # received, and those to send
    _versions: dict[Returned, int]  # when they were

    def run_part(
        self, run_module: RunModule, call: ModelCall, kind: CallKind, received: Sequence[Tensor]
    ) -> Any:
        """The tensors to hand over, or of the last stage the model's output."""
        part = kind.part
        self._kind, self._place = kind, 0
        self._values = dict(zip(part.received, received, strict=True))
        self._versions = {value: tensor._version for value, tensor in self._values.items()}
        try:
            output = run_module(*call.with_all())
        except EndOfStage:
            return [self._unwritten(value) for value in part.sent]
        finally:
            self._kind, self._values = None, {}
        segments = kind.findings.schedule.segments
        if part.stop < len(segments):
            unit = self.units[segments[part.stop].unit].fqn
            raise RuntimeError(
                f"stages: forward ended before unit {unit!r} of the next stage was called, as "
                "it was when the model was first called in this way. Call the units in the "
                "same order at every step, and let no `except` or `finally` of the model end "
                "what raises inside a unit."
            )
        _check_present(tensors_in(output), "the model's output")
        return output

    def visit(
        self, unit_index: int, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See ``UnitCalls.visit`` and [Note: A part of a forward]."""
        kind = self._kind
        if kind is None:
            return super().visit(unit_index, module, args, kwargs)
        place, part = self._place, kind.part
        self._place += 1
        if place == part.stop:
            raise EndOfStage
        if place < part.start:
            self._check_is_next(kind, place, unit_index)
            return self._result_of_others(kind, place)
        fqn = self.units[unit_index].fqn
        self._check_keeps_graph(fqn)
        _check_present(tensors_in((args, kwargs)), f"unit {fqn!r}")
        output = super().visit(unit_index, module, args, kwargs)
        tensors = tensors_in(output)
        _check_present(tensors, f"the result of unit {fqn!r}")
        if part.sent:
            _check_known(kind.findings.results[place], output, fqn)
        for value in (each for each in part.sent if each.place == place):
            tensor = self._values[value] = tensors[value.number]
            self._versions[value] = tensor._version
            assert self._step.round is not None
            known = kind.findings.results[place].shape(
                value.number, self._step.round.num_samples
            )
            _check_shape(tensor, known, fqn)
        return output

    def visit_piece(
        self, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run dropout outside of units, where this stage has what it is applied to."""
        if any(isinstance(each, MetaPlaceholder) for each in tensors_in((args, kwargs))):
            self.known.pass_over(module)
            with self.dropout.left_alone():
                return module.forward(*args, **kwargs)
        return super().visit_piece(module, args, kwargs)

    def _unwritten(self, value: Returned) -> Tensor:
        """What is handed over; the next stage would write to it once more."""
        tensor = self._values[value]
        if tensor._version != self._versions[value]:
            raise RuntimeError(
                f"stages: a tensor of shape {tuple(tensor.shape)} that a unit has returned is "
                "written to in place outside of units, and handed over. Make that operation "
                "out of place, or give all units that use the tensor to one stage."
            )
        return tensor

    def _check_keeps_graph(self, fqn: str) -> None:
        """Raise if a reentrant checkpoint calls the unit, which it means to do once more."""
        if torch.is_grad_enabled() or not self._step.has_gradients:
            return
        frames = (frame for frame, _ in traceback.walk_stack(None))
        if any(each.f_globals.get("__name__") == checkpoint.__name__ for each in frames):
            raise RuntimeError(
                f"stages: unit {fqn!r} is called by gradient checkpointing around units, which "
                "would call it once more during backward. Switch that off: the plan decides "
                "which units are recomputed (Plan.by_hand(recompute=True))."
            )

    def _check_is_next(self, kind: CallKind, place: int, unit_index: int) -> None:
        expected = kind.findings.schedule.segments[place].unit
        if unit_index != expected:
            pair = self.units[unit_index].fqn, self.units[expected].fqn
            raise RuntimeError(OTHER_ORDER.format(*pair, place))

    def _result_of_others(self, kind: CallKind, place: int) -> Any:
        """What a call of another stage returned: received tensors, and absent ones."""
        assert self._step.round is not None
        result, num_samples = kind.findings.results[place], self._step.round.num_samples
        tensors = []
        for i, example in enumerate(result.examples):
            tensor = self._values.get(Returned(place, i))
            if tensor is None:
                shape = torch.empty(
                    result.shape(i, num_samples), dtype=example.dtype, device="meta"
                )
                tensor = MetaPlaceholder.like(shape, self.anchor.device)
            tensors.append(tensor)
        return unflatten(filled(result.leaves, tensors), result.spec)


def _check_known(result: Result, output: Any, fqn: str) -> None:
    """Raise if a plain value that a unit returns is another one than in the probe, which is all
    that other stages know of it.
    """
    for known, found in zip(result.leaves, flatten(output)[0], strict=False):
        if type(found) in (bool, int, float, str) and repr(found) != repr(known):
            raise RuntimeError(
                f"stages: unit {fqn!r} returns the value {found!r}, where it was {known!r} "
                "when the model was first called in this way; other stages know that one "
                "alone. Return it as a tensor with a row for each sample, or keep it inside "
                "the unit."
            )


def _check_shape(tensor: Tensor, known: tuple[int, ...], fqn: str) -> None:
    """Raise unless it has the shape that the next stage has made room for."""
    if tensor.shape != known:
        raise RuntimeError(
            f"stages: unit {fqn!r} hands over a tensor of shape {tuple(tensor.shape)}, but the "
            f"next stage expects {known}, as for the samples that the model was probed with: "
            "values of samples choose it (x[:, :int(lengths.max())]), perhaps. Cut and pad the "
            "arguments themselves, alike on all ranks, or give a plan without stages."
        )


def _check_present(tensors: Sequence[Tensor], where: str) -> None:
    """Raise if one of the tensors has no values."""
    for tensor in tensors:
        if isinstance(tensor, MetaPlaceholder):
            raise RuntimeError(
                f"stages: a tensor of shape {tuple(tensor.shape)} reaches {where} that depends "
                f"on what another stage has computed and did not hand over. {REMEDY}"
            )
