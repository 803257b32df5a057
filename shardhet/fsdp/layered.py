"""Layered accumulation: a rank's whole batch enters a unit at once; inside, microbatch by
microbatch.

Collectives are therefore per unit and not per microbatch, and ranks may have different
numbers of microbatches.  A unit's visit is one node of the outer autograd graph.  It keeps
either the unit's inputs (and recomputes in backward) or the graph of each microbatch.

    outer graph     x ------------------> [visit] ------------------> y
    inside          x[0:3] -> unit -> y[0:3]      one graph per microbatch, cut
                    x[3:6] -> unit -> y[3:6]      off from the outer one by detach
                    x[6:7] -> unit -> y[6:7]

Inputs whose dim 0 is the rank's batch are split; other tensors, and everything that is no
tensor, are passed whole.  Outputs whose dim 0 is the microbatch are joined along it; 0-d
outputs (losses, token counts) are summed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardhet.layout import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """How one visit of a unit is to be computed; made by the runtime."""

    unit_fqn: str
    function: Callable[..., Any]  # the module's own forward
    microbatch_sizes: tuple[int, ...]
    recomputes: bool
    unbatched_addresses: frozenset[int]  # of storages passed whole whatever their shape
    param_addresses: frozenset[int]  # of storages that are freed when the unit is resharded
    device_type: str
    random_state: Callable[[], AbstractContextManager[Any]]  # around a visit
    seed_microbatch: Callable[[int], None]
    watch_forward: Callable[[int], AbstractContextManager[Any]]
    watch_backward: Callable[[int], AbstractContextManager[Any]]
    enter_backward: Callable[[], None]
    leave_backward: Callable[[], None]

    @property
    def spans(self) -> list[Span]:
        """The samples of each microbatch within the rank's batch."""
        stops = accumulate(self.microbatch_sizes)
        return [Span(b - n, b) for n, b in zip(self.microbatch_sizes, stops, strict=True)]


def run_visit(
    visit: Visit,
    anchor: Tensor | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The unit's output for the whole rank batch, differentiable if ``anchor`` is given.

    ``anchor`` is a tensor that requires a gradient: without it a unit whose inputs need none
    (an embedding) would have no place in the outer graph.
    """
    leaves, spec = tree_flatten((args, kwargs))
    call = _Call(visit, leaves, spec)
    tensors = [leaves[i] for i in call.tensor_indices]
    call.check_batched(tensors)
    for leaf in leaves:
        if any(t.requires_grad for t in _hidden_tensors(leaf)):
            raise TypeError(_hides_tensors(visit.unit_fqn, "is passed", leaf))
    if anchor is not None:
        joined = _VisitFunction.apply(call, anchor, *tensors)  # type: ignore[no-untyped-call]
        return call.joined.as_returned(joined)
    with torch.no_grad(), visit.random_state():
        for i in range(len(visit.microbatch_sizes)):
            with visit.watch_forward(i):
                call.joined.add(i, call.run(i, call.pieces(i, tensors)))
    return call.joined.as_returned(call.joined.detached_from(tensors))


class _VisitFunction(torch.autograd.Function):
    """A visit as one node of the outer graph."""

    @staticmethod
    def forward(ctx: Any, call: "_Call", anchor: Tensor, *tensors: Tensor) -> Any:
        visit = call.visit
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        versions = [t._version for t in tensors]
        call.autocast_dtype = _autocast_dtype(visit.device_type)
        with visit.random_state():
            for i in range(len(visit.microbatch_sizes)):
                with visit.watch_forward(i):
                    if visit.recomputes:
                        call.joined.add(i, call.run(i, call.pieces(i, tensors)))
                    else:
                        graph = call.run_with_graph(i, tensors)
                        call.graphs.append(graph)
                        call.joined.add(i, graph.outputs)
                        graph.outputs = []  # the edges keep what backward needs, no more
        if [t._version for t in tensors] != versions:
            raise RuntimeError(_writes_on_input(visit.unit_fqn))
        joined = call.joined.detached_from(tensors)
        ctx.mark_non_differentiable(*(t for t in joined if not call.is_differentiable(t)))
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: _Call = ctx.call
        visit = call.visit
        tensors = ctx.saved_tensors
        visit.enter_backward()
        input_grads = _InputGrads(call, tensors)
        with visit.random_state():
            for i in range(len(visit.microbatch_sizes)):
                with visit.watch_backward(i):
                    if visit.recomputes:
                        with _autocast(visit.device_type, call.autocast_dtype):
                            graph = call.run_with_graph(i, tensors)
                        graph.outputs = []
                    else:
                        graph = call.graphs[i]
                        call.graphs[i] = _Graph([], [], [])
                    graph.backward(call.joined.pieces_of(i, grads))
                    input_grads.add(i, graph.inputs)
        visit.leave_backward()
        return None, None, *input_grads.result()


@dataclass(slots=True)
class _Graph:
    """One microbatch's own autograd graph."""

    inputs: list[Tensor]  # leaves, cut off from the outer graph
    outputs: list[Any]
    edges: list[GradientEdge | None]  # per output; None where it needs no gradient

    def backward(self, grads: Sequence[Tensor | None]) -> None:
        """Accumulate into parameters and ``inputs``; ``grads`` are of the outputs."""
        pairs = [
            (edge, grad)
            for edge, grad in zip(self.edges, grads, strict=True)
            if edge is not None and grad is not None
        ]
        if pairs:
            torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])
        self.edges = []


class _Call:
    """A visit's arguments taken apart, and what lives from its forward to its backward."""

    def __init__(self, visit: Visit, leaves: list[Any], spec: TreeSpec) -> None:
        self.visit = visit
        self.tensor_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.is_batched = [self._is_batched(leaves[i]) for i in self.tensor_indices]
        self.spans = visit.spans
        self.joined = _Joined(visit)
        self.graphs: list[_Graph] = []
        self.autocast_dtype: torch.dtype | None = None
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._spec = spec

    def _is_batched(self, tensor: Tensor) -> bool:
        if tensor.dim() == 0 or tensor.shape[0] != sum(self.visit.microbatch_sizes):
            return False
        is_expanded = tensor.stride(0) == 0  # of one row, so dim 0 is the batch after all
        address = tensor.untyped_storage().data_ptr()
        return is_expanded or address not in self.visit.unbatched_addresses

    def check_batched(self, tensors: Sequence[Tensor]) -> None:
        """Raise where there is nothing to split."""
        if len(self.spans) > 1 and not any(self.is_batched):
            raise ValueError(
                f"unit {self.visit.unit_fqn!r}: none of its inputs "
                f"{[tuple(t.shape) for t in tensors]} has the rank's batch of "
                f"{sum(self.visit.microbatch_sizes)} samples in dim 0, so it cannot be run in "
                f"microbatches. Put the batch first, or choose units that receive it there."
            )

    def pieces(self, microbatch: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What of ``tensors`` the microbatch gets: views of the batched ones."""
        span = self.spans[microbatch]
        if span.numel == sum(self.visit.microbatch_sizes):
            return list(tensors)
        return [
            t.narrow(0, span.start, span.numel) if batched else t
            for t, batched in zip(tensors, self.is_batched, strict=True)
        ]

    def run(self, microbatch: int, pieces: Sequence[Tensor]) -> list[Any]:
        """The unit's output for one microbatch, flattened."""
        visit = self.visit
        leaves = list(self._constants)
        for i, piece in zip(self.tensor_indices, pieces, strict=True):
            leaves[i] = piece
        args, kwargs = tree_unflatten(leaves, self._spec)
        visit.seed_microbatch(self.spans[microbatch].start)
        with _autocast(visit.device_type, _autocast_dtype(visit.device_type)):
            output = visit.function(*args, **kwargs)
        outputs, self.joined.spec = tree_flatten(output)
        return outputs

    def run_with_graph(self, microbatch: int, tensors: Sequence[Tensor]) -> _Graph:
        """The same, keeping its graph; its inputs are leaves that collect gradients."""
        inputs = [
            piece.detach().requires_grad_(t.requires_grad)
            for piece, t in zip(self.pieces(microbatch, tensors), tensors, strict=True)
        ]
        try:
            with torch.enable_grad():
                outputs = self.run(microbatch, inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):  # one of our inputs
                raise RuntimeError(_writes_on_input(self.visit.unit_fqn)) from error
            raise
        edges = [
            get_gradient_edge(out) if isinstance(out, Tensor) and out.requires_grad else None
            for out in outputs
        ]
        return _Graph(inputs, outputs, edges)

    def is_differentiable(self, joined: Tensor) -> bool:
        """Whether the outer graph may send a gradient for this output."""
        if not (joined.is_floating_point() or joined.is_complex()):
            return False
        index = next(i for i, t in enumerate(self.joined.tensors) if t is joined)
        leaf = self.joined.tensor_indices[index]
        return self.visit.recomputes or any(g.edges[leaf] is not None for g in self.graphs)


class _Joined:
    """The outputs of a visit's microbatches put together again."""

    def __init__(self, visit: Visit) -> None:
        self.tensors: list[Tensor] = []
        self.tensor_indices: list[int] = []  # where the tensors are among the leaves
        self.spec: TreeSpec | None = None  # of the output, set by the call
        self._visit = visit
        self._spans = visit.spans
        self._leaves: list[Any] = []  # tensors replaced by None
        self._is_scalar: list[bool] = []

    @torch.no_grad()
    def add(self, microbatch: int, outputs: Sequence[Any]) -> None:
        """Take the flattened output of one microbatch."""
        tensors = [out for out in outputs if isinstance(out, Tensor)]
        constants = [None if isinstance(out, Tensor) else out for out in outputs]
        for leaf in constants:
            if _hidden_tensors(leaf):
                raise TypeError(_hides_tensors(self._visit.unit_fqn, "returns", leaf))
        if microbatch == 0:
            self._leaves = constants
            self.tensor_indices = [i for i, o in enumerate(outputs) if isinstance(o, Tensor)]
            self._is_scalar = [t.dim() == 0 for t in tensors]
            self.tensors = [self._first(t) for t in tensors]
            return
        if constants != self._leaves or len(tensors) != len(self.tensors):
            raise ValueError(
                f"unit {self._visit.unit_fqn!r}: microbatches 0 and {microbatch} return "
                f"{self._leaves} and {constants} besides tensors. Return the same for each."
            )
        span = self._spans[microbatch]
        for i, tensor in enumerate(tensors):
            if self._is_scalar[i]:
                self.tensors[i] += tensor
            else:
                self._check_is_batched(tensor, span)
                self.tensors[i][span.start : span.stop].copy_(tensor)

    def _first(self, tensor: Tensor) -> Tensor:
        if len(self._spans) == 1:
            return tensor.detach()
        if tensor.dim() == 0:
            return tensor.detach().clone()
        self._check_is_batched(tensor, self._spans[0])
        joined = tensor.new_empty(sum(self._visit.microbatch_sizes), *tensor.shape[1:])
        joined[: self._spans[0].stop].copy_(tensor)
        return joined

    def _check_is_batched(self, tensor: Tensor, span: Span) -> None:
        if tensor.shape[:1] != (span.numel,):
            raise ValueError(
                f"unit {self._visit.unit_fqn!r}: an output of shape {tuple(tensor.shape)} for "
                f"a microbatch of {span.numel} samples. Outputs must have the microbatch in "
                "dim 0, or be 0-d (they are summed)."
            )

    def detached_from(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The joined tensors, copied where one shares memory with an input or a parameter."""
        addresses = {t.untyped_storage().data_ptr() for t in inputs}
        addresses |= self._visit.param_addresses
        self.tensors = [
            t.clone() if t.untyped_storage().data_ptr() in addresses else t
            for t in self.tensors
        ]
        return self.tensors

    def pieces_of(self, microbatch: int, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the microbatch's flattened outputs, from those of the joined ones."""
        span = self._spans[microbatch]
        pieces: list[Tensor | None] = [None] * len(self._leaves)
        is_single = len(self._spans) == 1
        for i, grad, scalar in zip(self.tensor_indices, grads, self._is_scalar, strict=True):
            if grad is not None:
                pieces[i] = grad if scalar or is_single else grad[span.start : span.stop]
        return pieces

    def as_returned(self, tensors: Sequence[Tensor]) -> Any:
        """What the unit's caller gets."""
        assert self.spec is not None
        leaves = list(self._leaves)
        for i, tensor in zip(self.tensor_indices, tensors, strict=True):
            leaves[i] = tensor
        self.tensors = []
        return tree_unflatten(leaves, self.spec)


class _InputGrads:
    """Gradients of a visit's inputs, put together from those of its microbatches."""

    def __init__(self, call: _Call, tensors: Sequence[Tensor]) -> None:
        self._call = call
        self._tensors = tensors
        self._grads: list[Tensor | None] = [None] * len(tensors)

    @torch.no_grad()
    def add(self, microbatch: int, inputs: Sequence[Tensor]) -> None:
        """Take the gradients that ``inputs``, the microbatch's leaves, have collected."""
        span = self._call.spans[microbatch]
        is_single = len(self._call.spans) == 1
        for i, leaf in enumerate(inputs):
            grad = leaf.grad
            if grad is None:
                continue
            if is_single:
                self._grads[i] = grad
            elif not self._call.is_batched[i]:
                sum_before = self._grads[i]
                self._grads[i] = grad if sum_before is None else sum_before + grad
            else:
                self._whole(i)[span.start : span.stop].copy_(grad)

    def _whole(self, i: int) -> Tensor:
        whole = self._grads[i]
        if whole is None:
            # Zeros, because some microbatches may send nothing back.
            whole = self._grads[i] = torch.zeros_like(self._tensors[i])
        return whole

    def result(self) -> list[Tensor | None]:
        """One per input; None where nothing arrived."""
        return self._grads


def _hidden_tensors(leaf: Any) -> list[Tensor]:
    """Tensors in the attributes of an object: neither split nor joined nor cut off."""
    if leaf is None or isinstance(leaf, Tensor | type):
        return []
    held = list(getattr(leaf, "__dict__", {}).values())
    if is_dataclass(leaf):  # which may have slots
        held += [getattr(leaf, field.name, None) for field in fields(leaf)]
    return [each for each in held if isinstance(each, Tensor)]


def _hides_tensors(unit_fqn: str, verb: str, leaf: Any) -> str:
    return (
        f"unit {unit_fqn!r} {verb} a {type(leaf).__name__}, whose tensors HetFSDP cannot see. "
        "Use tuples or dicts, or register the class with torch.export.register_dataclass."
    )


def _writes_on_input(unit_fqn: str) -> str:
    return (
        f"unit {unit_fqn!r} writes in place on its input, which all its microbatches and its "
        f"recomputation share. Make that operation out of place (inplace=False), or choose "
        f"units that begin before it."
    )


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to now; None where it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _autocast(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast as it was in forward, without its cache: that would outlive the parameters."""
    if dtype is None and not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False)
