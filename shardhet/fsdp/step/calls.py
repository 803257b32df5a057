"""Calls of units, and of modules of the root, while a step is in progress.

[Note: Features]
A contrastive loss compares each sample with all others, so it cannot be computed from a rank's
own.  Each rank computes the terms of its own samples from the features of all, with gradients:

    image, text = model(pixels, tokens)            # [own, D] each
    images, texts = map(shardhet.gather_features, (image, text))  # [all, D], in plan order
    own = model.own_samples                        # their places among all
    targets = torch.arange(own.start, own.stop)
    loss_sum = cross_entropy(image @ texts.T, targets, reduction="sum") + ...
    model.backward(loss_sum, len(own))

In backward the gradients for all features are summed over ranks and each rank takes its rows:
a reduce-scatter, which a rank without samples takes part in too.  Autograd runs the nodes of
gathers in the reverse order of their calls, before any unit's, so all ranks do.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from shardhet.comm.channel import progress
from shardhet.comm.collectives import own_of_sum, whole_of
from shardhet.comm.peers import Peers
from shardhet.fsdp.microbatch.layered import run_visit
from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.microbatch.surroundings import (
    DROPOUT_CALLS,
    CheckpointedError,
    RootDropout,
    is_checkpointed,
)
from shardhet.fsdp.params.row_group import ShardGroup
from shardhet.fsdp.probing.known_calls import KnownCalls
from shardhet.fsdp.probing.prober import Prober
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitModule
from shardhet.fsdp.step.around import BackwardTurn, Visits
from shardhet.fsdp.step.rounds import Round, RoundKey, Rounds, StepInProgress
from shardhet.fsdp.step.schedule_executor import ScheduleExecutor


class _Shape(NamedTuple):
    """What one gather moves."""

    rows: tuple[int, ...]  # by position
    row_shape: tuple[int, ...]
    dtype: torch.dtype


class FeatureGathers:
    """The gathers of features since the last forward of one model."""

    # Those of the model that was called last.
    latest: "ClassVar[ref[FeatureGathers] | None]" = None

    def __init__(self, group: ShardGroup, step: StepInProgress) -> None:
        self.has_parts = False  # whether the plan has several rounds, or stages
        self.has_groups = False
        self._comm, self._control, self._peers = group.comm, group.control, group.peers
        self.anchor = torch.zeros((), device=group.comm.device, requires_grad=True)
        self._step = step
        self._round: Round | None = None  # whose features are gathered
        self.open: list[_Shape] = []  # whose gradients have not been reduced

    def gather(self, features: Tensor) -> Tensor:
        """See ``gather_features``."""
        with self._peers.fail_together("gather_features"):
            if self.has_groups:
                raise ValueError(
                    "gather_features: the plan has context groups, of which no device has "
                    "features of whole samples. Give a plan without context groups."
                )
            if self._step.is_in_forward:
                raise RuntimeError(
                    "gather_features was called inside the model, where a rank without samples "
                    "computes nothing. Return the features, and call it between model(...) and "
                    "model.backward."
                )
            if self.has_parts and torch.is_grad_enabled():
                raise ValueError(
                    "gather_features: the plan has several rounds, or stages, of which each "
                    "has features of its own samples only. Give a plan of one round without "
                    "stages, or disable gradients."
                )
            if not features.dim():
                raise ValueError(
                    "gather_features: a single number has no rows. Pass a tensor with one row "
                    "per sample."
                )
            self._control.enter("gather_features")
            if self._round is not self._step.round:
                self._round, self.open = self._step.round, []
            needs_grad = torch.is_grad_enabled() and features.requires_grad
            mine = (features.shape[0], tuple(features.shape[1:]), features.dtype, needs_grad)
            rows, shapes, dtypes, flags = zip(
                *self._control.exchange_objects(mine), strict=True
            )
            if len({*shapes}) > 1 or len({*dtypes}) > 1:
                raise ValueError(
                    f"gather_features: ranks pass rows of shapes {shapes} and dtypes {dtypes}. "
                    "Pass rows of one shape and dtype on every rank."
                )
            shape = _Shape(rows, features.shape[1:], features.dtype)
            if not any(flags):
                return self.all_gather(shape, features)
            self.open.append(shape)
            gathered: Tensor = _Gathered.apply(  # type: ignore[no-untyped-call]
                self.anchor, features, self, len(self.open) - 1
            )
            return gathered

    def all_gather(self, shape: _Shape, features: Tensor) -> Tensor:
        """The rows of all ranks, [sum(shape.rows), *shape.row_shape].  Collective."""
        return whole_of(features.detach(), shape.rows, self._comm.all_gather_channel)

    def reduce(self, index: int, grad: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' ``grad``.  Collective."""
        self.finish(index)
        return self._reduce(self.open.pop(), grad)

    def finish(self, index: int = -1) -> None:
        """Take part in the reductions of gathers after this one, for which this rank has no
        gradients.  Collective.
        """
        if self._round is not self._step.round:  # a forward without backward
            self.open = []
        while len(self.open) > index + 1:
            self._reduce(self.open.pop(), None)

    def _reduce(self, shape: _Shape, grad: Tensor | None) -> Tensor:
        comm = self._comm
        if grad is None:
            whole = sum(shape.rows), *shape.row_shape
            grad = torch.zeros(whole, dtype=shape.dtype, device=comm.device)
        return own_of_sum(grad, shape.rows, comm.reduce_scatter_channel, comm.buffers)


class _Gathered(torch.autograd.Function):
    """A gather as a node of the graph, also where this rank's features need no gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, features: Tensor, gathers: FeatureGathers, index: int
    ) -> Tensor:
        ctx.gathers, ctx.index = gathers, index
        return gathers.all_gather(gathers.open[index], features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, ctx.gathers.reduce(ctx.index, grads[0]), None, None


def gather_features(features: Tensor) -> Tensor:
    """Return the rows of all ranks' ``features``, [all samples, ...], in the plan's order.

    For losses that compare samples with each other.  Gradients flow back to every rank's own
    rows.  Collective: call it between ``model(...)`` and ``model.backward`` on every rank, also
    on those without samples, which pass the empty features that the model has returned.
    ``model.own_samples`` says which rows are this rank's.  Its loss is the sum of their terms,
    and its number of tokens theirs.  A rank that computes the mean over all samples passes it
    times its own number: ``model.backward(mean * len(features), len(features))``.

    Args:
        features: [own samples, ...], of one dtype and row shape on every rank.

    Raises ``RuntimeError`` on every rank if no model was called before, or from inside of one,
    and ``ValueError`` if rows of ranks differ in shape or dtype, or, with gradients, if the
    plan has several rounds, or stages.
    """
    latest = FeatureGathers.latest
    gathers = None if latest is None else latest()
    if gathers is None:
        raise RuntimeError("gather_features: no HetFSDP model was called yet. Call it first.")
    return gathers.gather(features)


CALL_THE_MODEL = (
    "Call the HetFSDP model (trainer.het), not the module inside it; to call that module "
    "without gradients, enter unit_by_unit() of the HetFSDP model on all ranks."
)
# The index of a unit, one of its modules, args and kwargs of the call; returns its output.
CallUnit = Callable[[int, UnitModule, tuple[Any, ...], dict[str, Any]], Any]


class UnitCalls:
    """Runs what the wrapped module calls: each unit in its turn, microbatch by microbatch."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[FSDPUnit],
        *,
        step: StepInProgress,
        rounds: Rounds,
        executor: ScheduleExecutor,
        features: FeatureGathers,
        peers: Peers,
        device: torch.device,
    ) -> None:
        self.root, self.units = root, tuple(units)
        self.dropout = RootDropout(root, self.visit_piece)
        self.outside_of_steps: CallUnit | None = None  # replaces ``visit`` while it is set
        self._step = step
        self._rounds = rounds
        self._executor = executor
        self._features = features
        self._peers = peers
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._visiting = ""  # the unit that is being computed

    def follow(self, visits: Visits, prober: Prober, known: KnownCalls) -> None:
        """Run calls as these say from the next forward on."""
        self._visits = visits
        self._prober = prober
        self.known = known

    def visit(
        self, unit_index: int, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of one of the unit's modules; its intercepted forward calls this."""
        if self.outside_of_steps is not None:
            return self.outside_of_steps(unit_index, module, args, kwargs)
        unit = self.units[unit_index]
        self._check_is_inside(unit.fqn)
        if self._rounds.number > 1:
            _check_flags(unit)
        needs_backward = _needs_backward(module, args, kwargs)
        self._visiting = unit.fqn
        try:
            if self._prober.probe is None:
                return self._take_turn(unit_index, module, needs_backward, (args, kwargs))
            progress.mark(f"forward of unit {unit.fqn!r}")
            self._prober.enter(unit_index, needs_backward, module.fqn, (args, kwargs))
            with self.dropout.left_alone():
                function = self._visits.function_of(module, is_probe=True)
                return self._prober.probe.call(module.fqn, function, args, kwargs)
        finally:
            self._visiting = ""

    def _take_turn(
        self, unit_index: int, module: UnitModule, needs_backward: bool, arguments: Any
    ) -> Any:
        """The output of the next visit, and its turn around it."""
        unit, of = self.units[unit_index], self._step.round
        assert of is not None
        segment, needs_backward = self._executor.expect(unit_index, needs_backward)
        self._executor.begin_turn()
        call = self._step.num_visits[unit.fqn]
        self._step.num_visits[unit.fqn] += 1
        backward = BackwardTurn(
            self._enter_backward, self._executor.end_turn, segment, of.round_key
        )
        with self.dropout.left_alone():
            leaves, rules = self.known.prepare(module, arguments)
            visit = self._visits.of(module, rules, of, call=call, unit=unit, backward=backward)
            output = run_visit(visit, self.anchor if needs_backward else None, leaves)
        self._executor.end_turn()
        return output

    def visit_piece(
        self, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of a module of the root that has to run microbatch by microbatch."""
        if (
            self._step.round is None
            or not self._step.round.num_samples
            or not module.module.training
        ):
            return module.forward(*args, **kwargs)
        if isinstance(module.module, _DropoutNd) and not module.module.p:
            with self.dropout.left_alone():
                return module.forward(*args, **kwargs)  # its argument
        # A checkpoint around functional dropout does not call this again in backward.
        is_function = module.fqn == DROPOUT_CALLS
        if self._step.is_in_autograd or (
            is_function and is_checkpointed(grad_enabled=self._step.has_gradients)
        ):
            raise RuntimeError(
                f"{module.fqn} is called outside of units and once more during backward, "
                "perhaps by gradient checkpointing, where it would draw other random numbers. "
                "Switch that off: the plan decides which units are recomputed "
                "(Plan.by_hand(recompute=True))."
            )
        needs_backward = _needs_backward(module, args, kwargs)
        with self.dropout.left_alone():
            if (probe := self._prober.probe) is not None:
                return probe.call(module.fqn, module.forward, args, kwargs, is_piece=True)
            call = self.known.count(module)
            leaves, rules = self.known.prepare(module, (args, kwargs))
            visit = self._visits.of(module, rules, self._step.round, call=call)
            return run_visit(visit, self.anchor if needs_backward else None, leaves)

    def _check_is_inside(self, unit_fqn: str) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"unit {unit_fqn!r} was called inside a transform of torch.func (vmap, grad, "
                "jvp, ...), but its parameters are gathered and its batch is cut around its "
                "calls. Call it on the whole batch: unit(x.flatten(0, 1)).unflatten(0, "
                "x.shape[:2]) instead of torch.vmap(unit)(x), and transform what is inside it."
            )
        if self._step.is_in_autograd or is_checkpointed(grad_enabled=False):
            raise CheckpointedError(
                f"unit {unit_fqn!r} was called under gradient checkpointing, or during "
                "backward. Switch that off: the plan decides which units are "
                "recomputed (Plan.by_hand(recompute=True))."
            )
        if self._visiting:
            raise RuntimeError(
                f"unit {unit_fqn!r} was called by unit {self._visiting!r}, so its parameters "
                "would be gathered once for each microbatch. Make both one unit, or call it "
                "outside: HetFSDP(units=[...])."
            )
        if self._step.round is None or not self._step.round.num_samples:
            with self._peers.fail_together():  # outside of model(...) nothing else tells
                raise RuntimeError(
                    f"unit {unit_fqn!r} was called outside of HetFSDP's forward. "
                    f"{CALL_THE_MODEL}"
                )

    def _enter_backward(self, segment: int, round_key: RoundKey) -> None:
        """Begin the backward of a visit; take the turns before it that autograd skipped."""
        if (
            self._step.round is None
            or self._rounds.round_key != round_key
            or not self._step.is_in_autograd
        ):
            with self._peers.fail_together():  # outside of model.backward nothing else tells
                raise RuntimeError(
                    "backward of an earlier forward, or not through HetFSDP. Call "
                    "model.backward(loss_sum, num_tokens) once after each model(...), before "
                    "the next, instead of loss.backward()."
                )
        if self._features.open:
            self._features.finish()
        self._executor.reach(segment)


def _check_flags(unit: FSDPUnit) -> None:
    """Raise ``RuntimeError`` if the model has frozen or unfrozen parameters of the unit."""
    for flat in unit.flats:
        for each in (*flat.sharded_params, *flat.unsharded_params):
            if each.requires_grad != flat.is_trainable:
                raise RuntimeError(
                    f"unit {unit.fqn!r}: requires_grad of its parameters was changed before "
                    "this call, which may lose gradients in a step of several rounds. Use "
                    "torch.no_grad() alone, or give a plan of one round."
                )


def _needs_backward(module: UnitModule, args: Any, kwargs: Any) -> bool:
    return torch.is_grad_enabled() and (
        module.is_trainable or _any_requires_grad((args, kwargs))
    )


def _any_requires_grad(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(tree))


def intercept(
    root: nn.Module, calls: UnitCalls, loss: FusedLoss, pieces: Sequence[UnitModule]
) -> None:
    """Route calls of every unit's modules, and of pieces of the root, through ``calls``."""
    head = loss.find_head(root, calls.units)
    for index, unit in enumerate(calls.units):
        for module in unit.modules:
            if module is head:
                module.module.forward = _visit_with_loss(calls, index, module, loss)
            else:
                module.module.forward = _visit(calls, index, module)
    for piece in pieces:
        piece.module.forward = _visit_piece(calls, piece)


def _visit(calls: UnitCalls, unit: int, module: UnitModule) -> Callable[..., Any]:
    def visit(*args: Any, **kwargs: Any) -> Any:
        return calls.visit(unit, module, args, kwargs)

    return visit


def _visit_piece(calls: UnitCalls, module: UnitModule) -> Callable[..., Any]:
    def visit(*args: Any, **kwargs: Any) -> Any:
        return calls.visit_piece(module, args, kwargs)

    return visit


def _visit_with_loss(
    calls: UnitCalls, unit: int, module: UnitModule, loss: FusedLoss
) -> Callable[..., Any]:
    with_loss = loss.with_loss(module)

    def visit(*args: Any, **kwargs: Any) -> Any:
        # The caller, or the model, wants the head's output.
        is_wanted = calls.outside_of_steps is not None or loss.is_left_out
        if is_wanted or loss.is_outside:
            return calls.visit(unit, module, args, kwargs)
        output = calls.visit(unit, with_loss, (loss.inputs, *args), kwargs)
        loss.note(output)
        return output

    return visit
