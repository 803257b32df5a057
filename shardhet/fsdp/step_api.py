"""The steps of a HetFSDP: backward, and the rounds of a step."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from shardhet.comm.calls import HostCopy
from shardhet.fsdp.microbatch.batching import CountRows
from shardhet.fsdp.microbatch.loss import FusedLoss, loss_pair
from shardhet.fsdp.microbatch.signature import Arguments, BatchDims, ModelCall, tokens_of
from shardhet.fsdp.probing.module_state import HOOKS, choices_of
from shardhet.fsdp.sharding.build import MixedPrecision
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.stages.step import Pipeline
from shardhet.fsdp.step.mean_loss import MeanLoss
from shardhet.fsdp.step.round_by_round import RoundByRound
from shardhet.fsdp.step.runtime import Runtime, aside
from shardhet.fsdp.surface import ModuleWithState
from shardhet.fsdp.tokens.skeleton import Skeleton
from shardhet.records.plan import Plan


class ModuleInRounds(ModuleWithState):
    """A base of HetFSDP: what follows its forward, and where it is in its steps."""

    plan: Plan
    position: int
    _precision: MixedPrecision
    _runtime: Runtime
    _mean: MeanLoss
    _by_round: RoundByRound
    _forward: Callable[..., Any]  # of the wrapped module
    _batch_dim: BatchDims
    _ragged: Mapping[str, CountRows]
    _pipeline: Pipeline | None = None  # of a plan with stages
    _loss: FusedLoss
    _skeleton: Skeleton | None = None  # of a plan with context groups
    _function: Callable[..., Any] | None = None  # called with the module instead of it
    _earlier: Sequence[ModelCall] = ()  # by round of the step, which stages take at its end

    def backward(
        self, loss_sum: Tensor, num_tokens: Tensor | int, *, divisor: float | None = None
    ) -> float | None:
        """Compute gradients of the mean loss over all ranks' tokens; return the mean.

        Collective.  ``loss_sum`` is the sum over this rank's valid tokens, ``num_tokens`` their
        number.  Gradients are summed over ranks and added to existing ones.  A parameter for
        which no rank has a gradient keeps None.  Returns None, and sets no gradient, if no rank
        has a valid token.  Raises ``FloatingPointError`` on every rank if the loss is not
        finite; the model may be used again after that.

        In a plan of several rounds, each is one call of the model and one of this.  All but the
        last return None and set no gradient; the last returns the mean over all rounds.  What
        the loss is divided by is known then; give a ``divisor``, the same on all ranks, if it
        is known before, or another in each round: gradients and the value returned are the
        sums of the rounds' losses over their divisors.
        """
        with self._forgetting_rounds():
            return self._by_round.backward(loss_sum, num_tokens, divisor)

    def forward_backward(
        self,
        *args: Any,
        loss_inputs: Any = (),
        scaler: GradScaler | None = None,
        **kwargs: Any,
    ) -> float | None:
        """All rounds of a batch: ``model(...)`` and ``backward`` for each.  Collective.

        The arguments hold this rank's samples of a global batch, round after round, as in
        ``plan.sample_indices(model.position, num_samples)``.  The model, or ``loss_fn``,
        returns ``(loss_sum, num_tokens)``, the latter within a mapping, too.  ``scaler`` scales
        the loss, in float16.  Returns the mean of the loss, as ``backward`` does of the last
        round, but never scaled; None after other batches of the step than the last.

        Under stages every rank passes all arguments of its samples, and all ranks get the mean.
        """
        mean = None
        with self._peers.fail_together("forward_backward"):
            self._runtime.rounds.check_begins_batch(self.plan.num_rounds)
            self._check_can_run()
            call = self._call_of_batch(args, kwargs, loss_inputs)
            parts = self._parts(call, self.plan.num_rounds, caller="forward_backward")
            calls = [self._call_of_round(part, call) for part in parts if self._pipeline]
        if self._pipeline is not None:
            return self._run_stages(self._pipeline, calls, scaler)
        scale = _scale_of(scaler, self._comm.device)
        for positional, named, of_loss in parts:
            output = self(*positional, loss_inputs=of_loss, **named)
            with self._peers.fail_together("forward_backward"):
                if len(parts) > 1 and call.num_samples:
                    call.check_cut(self._runtime.known.current.are_batched)
                loss_sum, num_tokens = loss_pair(output, self._loss.loss_fn)
                self._by_round.check_pair(loss_sum, num_tokens)
            if scaler is not None:
                loss_sum = scaler.scale(loss_sum)
            mean = self.backward(loss_sum, num_tokens)
        return mean if mean is None or scale is None else mean / float(scale.read())

    def _run_stages(
        self, pipeline: Pipeline, calls: Sequence[ModelCall], scaler: GradScaler | None
    ) -> float | None:
        """The rounds of a batch, once the step's other batches are known."""
        rounds = self._runtime.rounds
        self._earlier = [*self._earlier, *calls] if rounds.have_begun else [*calls]
        if self.rounds_left > len(calls):
            for _ in calls:
                rounds.end_round(0)
            return None
        of_step, self._earlier = self._earlier, ()
        with self._forgetting_rounds():
            return pipeline.step(of_step, scaler, is_training=self.module.training)

    @contextmanager
    def computing(self, function: Callable[..., Any]) -> Iterator[None]:
        """A context in which stages run ``function(module, ...)`` where they call the module.

        For trainers whose loss is computed from what the module returns.
        """
        self._function = self._runtime.known.function = function
        try:
            yield
        finally:
            self._function = self._runtime.known.function = None

    def step_of(
        self,
        rounds: Sequence[Mapping[str, Any]],
        divisors: Sequence[float | None],
        scaler: GradScaler | None = None,
    ) -> float | None:
        """As ``forward_backward`` in stages, given the arguments of every round.  Collective.

        There may be fewer rounds than a step has.  ``divisors`` are of their losses, as of
        ``backward``, all of them or none.
        """
        assert self._pipeline is not None, "plans without stages call model(...)"
        with self._peers.fail_together("forward_backward"):
            self._check_can_run()
            calls = [self._call_of_round(((), dict(each), ())) for each in rounds]
        with self._forgetting_rounds():
            return self._pipeline.step(
                calls, scaler, is_training=self.module.training, divisors=divisors
            )

    def _evaluate_stages(
        self, pipeline: Pipeline, args: Any, kwargs: Any, loss_inputs: Any
    ) -> Any:
        """The output of the samples of all rounds, without gradients.  Collective."""
        with self._peers.fail_together("model(...)"), self._forgetting_rounds():
            if torch.is_grad_enabled():
                raise ValueError(
                    "model(...): the plan has stages, whose forward and backward are one call. "
                    "Call model.forward_backward; to evaluate, call this in torch.no_grad()."
                )
            self._check_can_run()
            call = self._call_of_batch(args, kwargs, loss_inputs)
            own = self.plan.ranks[self.position].rank_batch_size or 1
            number = max(self.plan.num_rounds, -(-call.num_samples // own))
            parts = self._parts(call, number, caller="model(...)")
            calls = [self._call_of_round(part, call) for part in parts]
        with aside(self._runtime):
            return pipeline.evaluate(call, calls, is_training=self.module.training)

    def _call_of_batch(self, args: Any, kwargs: Any, loss_inputs: Any) -> ModelCall:
        """A call with this rank's samples of all rounds of a batch."""
        given = args, kwargs, in_tuple(loss_inputs)
        if (tokens := self._runtime.tokens) is not None:
            given = tokens.cutter.filled(given)
        return self._call(given, self.plan.num_rounds)

    def _check_can_run(self) -> None:
        if self._runtime.calls.outside_of_steps is not None:
            raise RuntimeError(_INSIDE)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(_TRANSFORMED)
        if self._pipeline is not None and torch.is_grad_enabled():
            _check_no_hooks(self)
        self._check_intact()

    def _call(self, given: Arguments, num_rounds: int = 1) -> ModelCall:
        """A call with this rank's samples of so many rounds."""
        planned = num_rounds * self._runtime.rounds.planned
        call = ModelCall.of(
            self._forward, *given, self._batch_dim, ragged=self._ragged, planned=planned
        )
        return replace(call, of_loss=choices_of(self._loss.loss_fn))

    def _parts(self, call: ModelCall, num_rounds: int, *, caller: str) -> list[Arguments]:
        return call.in_rounds(num_rounds, self._runtime.rounds.planned, caller=caller)

    def _call_of_round(self, part: Arguments, whole: ModelCall | None = None) -> ModelCall:
        if (tokens := self._runtime.tokens) and self._skeleton:
            part = tokens.cutter.cut(part, self._skeleton.check)
        call = self._call(part)
        _check_rows(call, self.plan)
        if torch.is_grad_enabled():
            self._loss.check_given(part[2] if call.num_samples else None)
            _warn_of_long(self._comm, tokens_of(call.leaves))
        cut_from = whole if self.plan.num_rounds > 1 else None
        call = call.brought(self._comm.device, self._precision.param_dtype)
        return replace(call, cut_from=cut_from)

    def drop_rounds(self) -> None:
        """Begin the step anew at the next call, without the rounds so far.  Collective.

        For programs that go on after an error of their own between two rounds.
        """
        with self._peers.fail_together("drop_rounds"):
            self._runtime.drop()

    @contextmanager
    def _forgetting_rounds(self) -> Iterator[None]:
        """A context in which an error ends the step, with what its rounds have summed up."""
        try:
            yield
        except BaseException:
            self._runtime.rounds.forget()
            raise

    @property
    def batches_per_step(self) -> int:
        """How many of the plan's batches one optimizer step has; 1 unless it is set.

        A step has all rounds of each, one after the other, and ends, with gradients, when
        ``is_between_steps``.  Set it to the same on all ranks, between steps: a step in
        progress is dropped, and the model is probed again.
        """
        return self._runtime.rounds.batches_per_step

    @batches_per_step.setter
    def batches_per_step(self, number: int) -> None:
        if number < 1:
            raise ValueError(f"batches_per_step is {number} but must be at least 1.")
        if number != self.batches_per_step:
            self._runtime.rounds.forget()
            self._runtime.follow(self.plan, number)

    @property
    def is_between_steps(self) -> bool:
        """Whether the next ``backward`` is of the first round of a step."""
        return not self._runtime.rounds.have_begun

    @property
    def rounds_left(self) -> int:
        """How many rounds the step has yet: all of them between steps."""
        return self._runtime.rounds.number - self._runtime.rounds.round_key.round

    @property
    def mean_so_far(self) -> float:
        """The mean loss in the rounds so far of the step in progress, or of the last one; the
        sum over their divisors if ``backward`` was given them.  The same on all ranks.
        """
        return self._mean.mean_so_far

    @property
    def own_samples(self) -> range:
        """The places of this rank's samples in the global batch of the last ``model(...)``."""
        self.plan.refuse_stages("own_samples", "plan.sample_indices has a rank's samples")
        return self._by_round.own_samples

    def ask_to_end(self) -> None:
        """Ask all ranks to end the run, from this rank; may be called by a signal handler.

        All ranks learn of it by the end of this or the next ``backward``, all of the same one.
        """
        self._runtime.asks_to_end = True

    @property
    def is_asked_to_end(self) -> bool:
        """Whether any rank called ``ask_to_end`` before the last backward; same on all."""
        return self._runtime.is_asked_to_end


def in_tuple(loss_inputs: Any) -> tuple[Any, ...]:
    """What ``loss_fn`` gets: a tuple, or one argument."""
    return loss_inputs if isinstance(loss_inputs, tuple) else (loss_inputs,)


def _scale_of(scaler: GradScaler | None, device: torch.device) -> HostCopy | None:
    """Copied before backward is launched, for whose end nobody waits."""
    return None if scaler is None else HostCopy(scaler.scale(torch.ones((), device=device)))


def _check_no_hooks(model: ModuleInRounds) -> None:
    """Raise ``RuntimeError`` for hooks on the whole, which no stage calls."""
    if any(vars(model)[kind] for kind in HOOKS):
        raise RuntimeError(
            "forward_backward: there are hooks on the HetFSDP, which the plan's stages do not "
            "call as a whole. Register them on modules inside (model.module.head), or let "
            "loss_fn do it."
        )


def _check_rows(call: ModelCall, plan: Plan) -> None:
    """Raise ``ValueError`` for rows of ragged arguments where samples have none of a kind."""
    kind = "stages" if plan.context_groups is None else "context groups"
    if call.has_rows and (plan.stages or plan.context_groups):
        names = dict.fromkeys(
            name for name, each in zip(call.names, call.rows, strict=True) if each
        )
        raise ValueError(
            f"model(...): the plan has {kind}, but rows of a ragged argument "
            f"({', '.join(names)}) are as many in each round as its samples have, and not "
            f"their tokens, nor of one shape. Give a plan without {kind}."
        )


def _warn_of_long(comm: CommContext, tokens: int) -> None:
    """Warn, once, of samples of more ``tokens`` than the plan has memory for."""
    held = comm.holds_for
    if held is None or held.tokens_per_sample == 1:  # no text, or it was said
        return
    if (mismatch := held.mismatch(tokens_per_sample=tokens)) is not None:
        comm.holds_for = replace(held, tokens_per_sample=1)
        warnings.warn(
            f"model(...): {mismatch}, so that memory and times are not those that it says. "
            "Truncate samples, or plan with an example of the longest.",
            stacklevel=2,
        )


_INSIDE = (
    "model(...): called inside unit_by_unit(). Call model.module there, or leave the context "
    "first."
)
_TRANSFORMED = (
    "model(...): called inside a transform of torch.func (vmap, grad, jvp, ...), where ranks "
    "cannot exchange tensors. Call it outside, and transform what is inside a unit."
)
