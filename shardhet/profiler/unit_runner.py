"""Run one unit on one device as the runtime runs a microbatch of it, without other ranks.

[Note: How a microbatch is timed]
A microbatch is timed as part of a visit of several, as in training.  On an accelerator the time
is that of its kernels, or of launching them if that takes longer; the host waits for the device
only before and after the visit.  On a CPU it is the unit's own work plus that of the runtime:
detaching inputs, joining outputs, calling autograd.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardhet.comm import devices
from shardhet.fsdp.microbatch.batching import flatten
from shardhet.fsdp.microbatch.joining import spans_of
from shardhet.fsdp.microbatch.layered import Visit, run_visit
from shardhet.fsdp.microbatch.surroundings import RandomStates, Seeded, VisitContext
from shardhet.fsdp.sharding.build import UnitDraft, draft_units
from shardhet.fsdp.sharding.materialize import materialize, move_buffers
from shardhet.fsdp.sharding.unit import find_units
from shardhet.profiler.batch import TrainedModel
from shardhet.profiler.describe import trained_dtype
from shardhet.profiler.model_spec import TensorInput, UnitCall, UnitSpec, copy_with
from shardhet.profiler.stopwatch import Stopwatch
from shardhet.records.layout import Span

# Microbatches in a visit, which is timed as a whole: two show what the runtime does for each;
# more let the host of an accelerator run ahead.
MAX_MICROBATCHES, MAX_MICROBATCHES_OF_ACCELERATOR = 2, 8


@dataclass(slots=True)
class Started:
    """A forward whose backward is still to come."""

    microbatch_sizes: tuple[int, ...]  # equal ones
    forward_s: float = 0.0  # of one microbatch
    outputs: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)  # and grads


class UnitRunner:
    """A unit with its parameters on the device, ready to be run on microbatches.

    It runs what ``fsdp.microbatch.layered`` runs: the inputs are detached, the graph is kept,
    and gradients are added to those of earlier microbatches, as for all but the first of a
    step.
    """

    def __init__(
        self,
        model: TrainedModel,
        unit: UnitSpec,
        *,
        device: torch.device,
        max_samples: int,
        stopwatch: Stopwatch,
    ) -> None:
        self._device = device
        self._max_samples = max_samples
        self._stopwatch = stopwatch
        self._random = RandomStates(model.seed, device)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._module, draft = _drafted(model, unit.fqn)
        _put_on_device(draft, model, device)
        self._accumulate_in(model.reduce_dtype or trained_dtype(model.module), draft)
        given = model.batch.of_size(max_samples).tensors
        self._calls = [_PreparedCall(call, given, max_samples, device) for call in unit.calls]
        self._functions = [
            call.function(self._module, param_dtype=model.param_dtype, loss_fn=model.loss_fn)
            for call in unit.calls
        ]

    def num_microbatches(self, num_samples: int) -> int:
        """The number of microbatches of ``num_samples`` samples to run in a timed visit."""
        if not all(call.unit_call.rules.is_batched for call in self._calls):
            return 1
        is_on_host = devices.is_on_host(self._device)
        most = MAX_MICROBATCHES if is_on_host else MAX_MICROBATCHES_OF_ACCELERATOR
        return max(1, min(most, self._max_samples // num_samples))

    def run(self, num_samples: int) -> tuple[float, float]:
        """Seconds of the forward and backward of one microbatch, without recomputation."""
        return self.backward(self.forward(num_samples))

    @contextmanager
    def running_ahead(self) -> Iterator[None]:
        """Context in which an accelerator's host waits for nothing; ``run`` does not time."""
        self._stopwatch.waits_for_device = False
        try:
            yield
        finally:
            self._stopwatch.waits_for_device = True

    def forward(self, num_samples: int, num_microbatches: int = 1) -> Started:
        """Run a forward of microbatches of ``num_samples``; graphs are kept for ``backward``.

        Together they may have at most the ``max_samples`` that the runner was created for.
        """
        started = Started((num_samples,) * num_microbatches)
        batch = num_samples * num_microbatches
        for call, function in zip(self._calls, self._functions, strict=True):
            args, kwargs = call.arguments(batch)
            visit = self._visit(call, function, started.microbatch_sizes)
            with self._stopwatch.running():
                returned = run_visit(visit, self._anchor, flatten((args, kwargs))[0])
            started.forward_s += self._stopwatch.seconds / num_microbatches
            outputs = [leaf for leaf in tree_leaves(returned) if _needs_grad(leaf)]
            started.outputs.append((outputs, call.output_grads(batch, outputs)))
        return started

    def backward(self, started: Started) -> tuple[float, float]:
        """Run the backward; returns forward and backward seconds of one microbatch."""
        backward_s = 0.0
        while started.outputs:
            outputs, grads = started.outputs.pop()
            if outputs:
                with self._stopwatch.running():
                    torch.autograd.backward(outputs, grads)
                backward_s += self._stopwatch.seconds
        return started.forward_s, backward_s / len(started.microbatch_sizes)

    def peak_bytes(self, num_samples: int) -> int | None:
        """The most bytes that one run allocates; None on the CPU, which does not count them."""
        if devices.is_on_host(self._device):
            return None
        module = devices.module_of(self._device)
        self.run(num_samples)
        module.synchronize(self._device)
        before = int(module.memory_allocated(self._device))
        module.reset_peak_memory_stats(self._device)
        self.run(num_samples)
        return int(module.max_memory_allocated(self._device)) - before

    def _visit(
        self,
        call: "_PreparedCall",
        function: Callable[..., Any],
        microbatch_sizes: tuple[int, ...],
    ) -> Visit:
        fqn = call.unit_call.module_fqn
        around: tuple[VisitContext, ...] = ()
        if self._module.get_submodule(fqn).training:
            around = (Seeded(self._random, fqn, 0, 0, 0),)
        return Visit(
            unit_fqn=fqn,
            function=function,
            spans=call.unit_call.rules.runs(spans_of(microbatch_sizes)),
            recomputes=False,
            rules=call.unit_call.rules,
            param_storages=frozenset(),
            device_type=self._device.type,
            around=around,
        )

    def _accumulate_in(self, reduce_dtype: torch.dtype, draft: UnitDraft) -> None:
        # In the parameters' own dtype, autograd itself accumulates gradients.
        for slot in draft.slots:
            param = slot.current
            if slot.is_trainable and param.dtype != reduce_dtype:
                grad = torch.zeros_like(param, dtype=reduce_dtype)
                param.register_post_accumulate_grad_hook(partial(_add_grad, grad))


class _PreparedCall:
    """A call's arguments for any number of samples, prepared before timing starts."""

    def __init__(
        self,
        unit_call: UnitCall,
        given: Sequence[Tensor],
        max_samples: int,
        device: torch.device,
    ) -> None:
        self.unit_call = unit_call
        self._max_samples = max_samples
        self._device = device
        self._tensors: dict[int, Tensor] = {}
        self._grads: dict[int, list[Tensor]] = {}
        for leaf in unit_call.tensor_inputs:
            known = None if leaf.source is None else given[leaf.source]
            self._tensors[id(leaf)] = _values(leaf, known, max_samples, device)

    def arguments(self, num_samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call; batched tensors are the first rows of larger ones."""

        def first_rows(leaf: TensorInput) -> Tensor:
            rows = self._tensors[id(leaf)]
            if leaf.axis is not None:
                rows = leaf.axis.narrow(rows, Span(0, num_samples), self._max_samples)
            return rows.detach().requires_grad_(leaf.requires_grad)

        return self.unit_call.arguments(first_rows)

    def output_grads(self, num_samples: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that backward starts from; the same for every run."""
        if num_samples not in self._grads:
            self._grads[num_samples] = [torch.ones_like(output) for output in outputs]
        return self._grads[num_samples]


def _values(
    leaf: TensorInput, known: Tensor | None, max_samples: int, device: torch.device
) -> Tensor:
    """The example's values if known, else noise; zeros for indices that the model computes."""
    if known is not None:
        return known.to(device)
    shape = leaf.shape(max_samples)
    if leaf.dtype.is_floating_point:
        return torch.randn(shape, dtype=leaf.dtype, device=device)
    return torch.zeros(shape, dtype=leaf.dtype, device=device)


def _drafted(model: TrainedModel, fqn: str) -> tuple[nn.Module, UnitDraft]:
    """A copy of the model that shares its tensors, and one of its units."""
    copied = copy_with(model.module, Tensor.detach)
    modules = find_units(copied, model.units, keeps_last=model.loss_fn is not None)
    drafts = {draft.fqn: draft for draft in draft_units(copied, modules)}
    return copied, drafts[fqn]


def _put_on_device(draft: UnitDraft, model: TrainedModel, device: torch.device) -> None:
    materialize(draft.slots, draft.inner, draft.fqn, seed=model.seed, init_fn=model.init_fn)
    for slot in draft.slots:
        dtype = model.param_dtype if slot.current.is_floating_point() else None
        placed = slot.current.detach().to(device, dtype or slot.current.dtype)
        slot.put(nn.Parameter(placed, requires_grad=slot.is_trainable))
    move_buffers(draft.inner, device)


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _add_grad(into: Tensor, param: Tensor) -> None:
    assert param.grad is not None
    into.add_(param.grad)
    param.grad = None
