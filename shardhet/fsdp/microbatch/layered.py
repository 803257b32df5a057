"""Layered accumulation: a rank passes its whole batch to a unit, which runs it microbatch by
microbatch.

There is therefore one collective per unit, not per microbatch, and ranks may have different
numbers of microbatches.  A visit of a unit is one node of the outer autograd graph.  It keeps
either the unit's inputs (and recomputes in backward) or the graph of each microbatch.

    outer graph     x ------------------> [visit] ------------------> y
    inside          x[0:3] -> unit -> y[0:3]      one graph per microbatch, cut
                    x[3:6] -> unit -> y[3:6]      off from the outer one by detach
                    x[6:7] -> unit -> y[6:7]

Rules (batching.py) say which inputs are split, and along which dimension; other inputs, and
everything that is not a tensor, are passed whole.  A call without batched inputs runs once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from shardhet.fsdp.microbatch.batching import BatchingRules, flatten, unflatten
from shardhet.fsdp.microbatch.host_inputs import InputsOnHost, KeptInputs
from shardhet.fsdp.microbatch.joining import InputGrads, Joined
from shardhet.fsdp.microbatch.surroundings import Context, VisitContext, entered
from shardhet.records.layout import Span
from shardhet.records.schedule import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What one visit of a unit computes, and what surrounds it."""

    unit_fqn: str
    function: Callable[..., Any]  # the module's own forward
    rules: BatchingRules
    spans: Sequence[Span]  # the samples of each run within the rank's batch
    recomputes: bool
    param_storages: frozenset[int]  # storages that are freed when the unit is resharded
    device_type: str
    around: tuple[VisitContext, ...]
    watch: Callable[[Phase, int], Context] = lambda *_: nullcontext()  # of a microbatch
    inputs_on_host: InputsOnHost | None = None  # where its inputs wait for backward
    only_inputs: bool = False  # whether gradients of parameters are dropped, as in a probe
    only_backward: bool = False  # whether nobody looks at the values of its results


def run_visit(visit: Visit, anchor: Tensor | None, leaves: list[Any]) -> Any:
    """The unit's output for the whole rank batch, differentiable if ``anchor`` is given.

    ``leaves`` are the arguments, flattened as ``visit.rules.arguments`` says.  ``anchor`` is a
    tensor that requires a gradient: without it, a unit whose inputs need no gradient (an
    embedding) would not be part of the outer graph.
    """
    call = _Call(visit, leaves)
    tensors = [leaves[i] for i in call.tensor_indices]
    if anchor is not None:
        joined = _VisitFunction.apply(call, anchor, *tensors)  # type: ignore[no-untyped-call]
        return call.joined.as_returned(joined)
    autocast = autocast_as(visit.device_type, autocast_dtype_now(visit.device_type))
    with torch.no_grad(), entered(visit.around, "in_phase", Phase.FORWARD), autocast:
        for i in range(len(call.spans)):
            with visit.watch(Phase.FORWARD, i):
                call.joined.add(i, call.run(i, call.pieces(i, tensors), is_repeated=False))
    detached = call.joined.detached_from(tensors, visit.param_storages)
    return call.joined.as_returned(detached)


class _VisitFunction(torch.autograd.Function):
    """A visit as one node of the outer graph."""

    @staticmethod
    def forward(ctx: Any, call: "_Call", anchor: Tensor, *tensors: Tensor) -> Any:
        visit = call.visit
        ctx.call = call
        ctx.set_materialize_grads(False)
        versions = [t._version for t in tensors]
        call.autocast_dtype = autocast_dtype_now(visit.device_type)
        autocast = autocast_as(visit.device_type, call.autocast_dtype)
        with entered(visit.around, "in_phase", Phase.FORWARD), autocast:
            ctx.save_for_backward(*call.keep(tensors))
            for i in range(1 if visit.only_backward else len(call.spans)):
                with visit.watch(Phase.FORWARD, i):
                    if visit.recomputes:
                        # Tensors of this forward that require gradients have no graph.
                        pieces = [each.detach() for each in call.pieces(i, tensors)]
                        call.joined.add(i, call.run(i, pieces, is_repeated=False))
                    else:
                        graph, output = call.run_with_graph(i, tensors, is_repeated=False)
                        graph.end_at(call.joined.add(i, output))
                        call.graphs.append(graph)
                        del output  # the edges keep what backward needs, nothing else
        if [t._version for t in tensors] != versions:
            raise RuntimeError(writes_on_input(visit.unit_fqn))
        joined = call.joined.detached_from(tensors, visit.param_storages)
        rules = visit.rules.is_differentiable
        ctx.mark_non_differentiable(
            *(t for t, is_used in zip(joined, rules, strict=True) if not is_used)
        )
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: _Call = ctx.call
        visit = call.visit
        with entered(visit.around, "in_phase", Phase.BACKWARD):
            tensors = call.kept_tensors(ctx.saved_tensors)
            input_grads = InputGrads(call.spans, visit.rules.inputs, tensors)
            for i in range(len(call.spans)):
                with visit.watch(Phase.BACKWARD, i):
                    if visit.recomputes:
                        with autocast_as(visit.device_type, call.autocast_dtype):
                            graph, output = call.run_with_graph(i, tensors, is_repeated=True)
                        graph.end_at(tensors_in(output))
                        del output
                    else:
                        graph = call.graphs[i]
                        call.graphs[i] = _Graph([])
                    graph.backward(call.joined.pieces_of(i, grads), visit.only_inputs)
                    input_grads.add(i, graph.inputs)
            if call.kept is not None and visit.inputs_on_host is not None:
                visit.inputs_on_host.finish(call.kept)
        return None, None, *input_grads.result()


class _Graph:
    """The autograd graph of one microbatch."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.inputs = inputs  # leaves, cut off from the outer graph
        self._edges: list[GradientEdge | None] = []  # one per returned tensor

    def end_at(self, outputs: Sequence[Tensor]) -> None:
        """Record where backward begins: the edges of those outputs that need a gradient."""
        self._edges = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]

    def backward(self, grads: Sequence[Tensor | None], only_inputs: bool) -> None:
        """Accumulate into parameters and ``inputs``; ``grads`` are gradients of the outputs."""
        into = [t for t in self.inputs if t.requires_grad] if only_inputs else []
        if into or not only_inputs:
            run_backward(self._edges, grads, into)
        self._edges = []


class _Call:
    """The flattened arguments of a visit, and what it keeps from forward to backward."""

    def __init__(self, visit: Visit, leaves: list[Any]) -> None:
        self.visit = visit
        self.tensor_indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.spans = visit.spans
        self.joined = Joined(visit.unit_fqn, self.spans, visit.rules)
        self.graphs: list[_Graph] = []
        self.kept: KeptInputs | None = None  # on the host
        self.autocast_dtype: torch.dtype | None = None
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._num_samples = self.spans[-1].stop
        self._is_positional = visit.rules.arguments.is_positional

    def keep(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """What autograd has to keep of the inputs."""
        visit, store = self.visit, self.visit.inputs_on_host
        if store is None:
            return tensors
        self.kept = store.keep(visit.unit_fqn, tensors, visit.rules.inputs, self.spans)
        return [None if i in self.kept.by_place else t for i, t in enumerate(tensors)]

    def kept_tensors(self, saved: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The inputs, given what autograd has kept of them."""
        if self.kept is None or self.visit.inputs_on_host is None:
            return saved  # type: ignore[return-value]
        found = dict(enumerate(saved)) | self.visit.inputs_on_host.come_back(self.kept)
        return list(found.values())  # type: ignore[arg-type]

    def pieces(self, microbatch: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The part of each of ``tensors`` that belongs to the microbatch."""
        return cut(tensors, self.visit.rules, self.spans[microbatch], self._num_samples)

    def run(self, microbatch: int, pieces: Sequence[Tensor], *, is_repeated: bool) -> Any:
        """The unit's output for one microbatch."""
        visit = self.visit
        leaves = list(self._constants)
        for i, piece in zip(self.tensor_indices, pieces, strict=True):
            leaves[i] = piece
        args: Any = leaves
        kwargs: dict[str, Any] = {}
        if not self._is_positional:
            args, kwargs = unflatten(leaves, visit.rules.arguments.spec)
        start = self.spans[microbatch].start
        with entered(visit.around, "in_function", start, is_repeated):
            return visit.function(*args, **kwargs)

    def run_with_graph(
        self, microbatch: int, tensors: Sequence[Tensor], *, is_repeated: bool
    ) -> tuple[_Graph, Any]:
        """As ``run``, keeping the graph, whose inputs are leaves that accumulate gradients."""
        inputs = [
            piece.detach().requires_grad_(t.requires_grad)
            for piece, t in zip(self.pieces(microbatch, tensors), tensors, strict=True)
        ]
        try:
            with torch.enable_grad():
                return _Graph(inputs), self.run(microbatch, inputs, is_repeated=is_repeated)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):  # one of ``inputs``
                raise RuntimeError(writes_on_input(self.visit.unit_fqn)) from error
            raise


def cut(
    tensors: Sequence[Tensor], rules: BatchingRules, span: Span, num_samples: int
) -> list[Tensor]:
    """The part of each of ``tensors``, the arguments of a call, for the samples of ``span``."""
    if span.numel == num_samples:
        return list(tensors)
    return [
        rule.narrow(t, span, num_samples) for t, rule in zip(tensors, rules.inputs, strict=True)
    ]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of ``tree``."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def run_backward(
    ends: Sequence[Tensor | GradientEdge | None],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor] = (),
) -> None:
    """``torch.autograd.backward`` from those that have a gradient, without its checks of their
    shapes, for which it imports sympy.
    """
    pairs = [
        (end, grad)
        for end, grad in zip(ends, grads, strict=False)
        if end is not None and grad is not None
    ]
    if pairs:
        found, given = zip(*pairs, strict=True)
        _engine_run_backward(
            found,
            given,
            False,
            False,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors for which its backward accumulates gradients."""
    for node in nodes_of(tensor):
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable


def nodes_of(tensor: Tensor) -> Iterator[Any]:
    """The nodes of the tensor's graph."""
    waiting, seen = [tensor.grad_fn], {None, tensor.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        found = {each for each, _ in node.next_functions} - seen
        seen |= found
        waiting += found


def writes_on_input(unit_fqn: str) -> str:
    return (
        f"unit {unit_fqn!r} writes in place to its input, which all its microbatches and its "
        f"recomputation share. Make that operation out of place (inplace=False), or choose "
        f"units that begin before it."
    )


def autocast_dtype_now(device_type: str) -> torch.dtype | None:
    """The dtype that autocast currently casts to; None if it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_as(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast as in forward, without its cache, which would outlive the parameters."""
    if dtype is None and not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False)
