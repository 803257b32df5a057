"""A step as a program takes it by itself: ``model(...)`` and ``backward``, once for each round.

[Note: Scale of the loss]
In a step of one round the loss is divided by the number of tokens before backward, as in any by
a divisor that the caller gives.  In several rounds the number is not known then: every backward
is scaled by the same power of two, near what the number will be, and the sums are multiplied
once, at the end.  Powers of two do not round.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardhet.comm.calls import HostCopy
from shardhet.fsdp.microbatch.layered import run_backward
from shardhet.fsdp.microbatch.loss import CREATES_GRAPH, Output, arrived_late, check_no_tokens
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.attempt import RunModule
from shardhet.fsdp.probing.known_calls import UNKNOWN
from shardhet.fsdp.step.around import Activity
from shardhet.fsdp.step.mean_loss import (
    MeanLoss,
    check_graph,
    check_is_number,
    check_scaled,
    warn_of_bounded,
)
from shardhet.fsdp.step.rounds import beside_others
from shardhet.fsdp.step.runtime import Runtime, aside


class RoundByRound:
    """Rounds that the program begins, of a plan without stages."""

    def __init__(self, runtime: Runtime, mean: MeanLoss, run_module: RunModule) -> None:
        self._runtime, self._mean = runtime, mean
        self._control, self._peers = runtime.control, runtime.peers
        self._run_module = run_module
        self._num_forwards = 0
        self._returned = Output({})  # by the last model(...)
        self._had_samples = True  # on any rank, in the last forward
        self.own_samples = range(0)  # of the last forward, in the global batch
        self._is_in_backward = False
        self._power = torch.ones(())  # by which losses are multiplied, on the device
        self._scale_on_host: HostCopy | None = None  # the same; None in a step of one round

    def forward(self, call: ModelCall, *, is_training: bool) -> Any:
        """The module's output; on a rank without samples an empty one.  Collective.

        Returns None if no rank has samples, unless earlier rounds of the step had some.
        """
        runtime = self._runtime
        awaits_backward = runtime.step.awaits_backward
        runtime.rounds.check_goes_on("model(...)", awaits_backward=awaits_backward)
        if not torch.is_grad_enabled():
            with aside(runtime):
                return self._forward(call, is_training=is_training)
        if not runtime.rounds.have_begun:
            runtime.begin_step()
        return self._forward(call, is_training=is_training)

    def _forward(self, call: ModelCall, *, is_training: bool) -> Any:
        runtime = self._runtime
        rounds, known, executor = runtime.rounds, runtime.known, runtime.executor
        runtime.enter_forward()
        is_ragged = False
        if call.is_ragged:
            call, is_ragged = beside_others(call, self._control)
        most = max(runtime.rank_plan.microbatch_sizes, default=0)
        splits = is_ragged or rounds.is_cut or call.num_samples > most
        tokens = runtime.tokens
        with runtime.observers.watch("", Activity.AGREE):
            each = rounds.agree(
                self._control,
                call,
                index=known.index_of(call, is_training=is_training, splits=splits),
                of_frozen=runtime.of_frozen,
                is_written=rounds.have_begun and runtime.written.has_rows(),
                checksum=0.0 if tokens is None else tokens.cutter.checksum,
            )
        first = each.first_sample - each.round_key.num_samples_before
        self.own_samples = range(first, first + each.num_samples)
        self._had_samples = bool(each.computing)
        if not each.computing:
            if not rounds.have_begun:
                runtime.step.is_in_forward = False
                return None
            each.index = known.latest  # its turns are taken all the same
        if each.gathers_anew and rounds.have_begun:
            runtime.gather_anew()
        receivers = runtime.root_comm.receivers_for(each.computing)
        if rounds.receivers is not None and runtime.step.has_gradients:
            receivers = rounds.receivers
        runtime.unshard_root(receivers, receivers)
        if each.index == UNKNOWN:
            runtime.probe(each, self._run_module, is_training=is_training, splits=splits)
        findings = known.findings(each.index)
        executor.is_behind = call.is_behind
        executor.begin(findings.schedule, each.round_key.round, findings.always_unsharded)
        has_norms = is_training and runtime.has_norms
        if has_norms:
            runtime.norms.begin()
        run = partial(self._run_module, *call.with_all())
        output = runtime.forward_round(each, run, is_training=is_training)
        runtime.step.is_in_forward = False
        if has_norms:
            runtime.norms.apply(self._control)
        runtime.step.awaits_backward = torch.is_grad_enabled()
        if runtime.step.awaits_backward:
            executor.go_on()  # while the loss is computed and shared
            runtime.written.forget()
        else:
            runtime.end_rounds()
            runtime.is_at_rest = True
        return output

    def backward(
        self, loss_sum: Tensor, num_tokens: Tensor | int, divisor: float | None
    ) -> float | None:
        """See ``HetFSDP.backward``.  Collective."""
        mean = self._mean
        with self._peers.fail_together("model.backward"):
            if not self._runtime.step.awaits_backward:
                raise RuntimeError(_NO_FORWARD if self._had_samples else _NO_SAMPLES)
            if written := self._runtime.written.flats:
                raise RuntimeError(_WRITTEN.format(written[0].slots[0].fqn))
            check_is_number(loss_sum)
            if mean.is_float16:
                check_scaled(loss_sum, [*self._returned.leaves.values()])
            if divisor is None:
                self.check_pair(loss_sum, num_tokens)
            num_samples = batch.num_samples if (batch := self._runtime.step.round) else 0
            several = self._runtime.rounds.number > 1
            mean.check_leaves(loss_sum, divides_late=several and divisor is None)
            with self._runtime.observers.watch("", Activity.AGREE):
                told = math.inf if divisor is None else divisor
                rows = mean.enter("model.backward", told, loss_sum.requires_grad, num_samples)
                check_graph(any(row[2] for row in rows), any(row[3] for row in rows))
                self._check_divisor(divisor, {row[1] for row in rows})
                # Read after backward is launched: the host then waits only for the end of
                # forward, while the device, which still has backward queued, is not idle.
                rows_on_host, total = mean.share(loss_sum, num_tokens)
            is_last = self._runtime.rounds.is_last
            seed_grad = self._scale(total, divisor).to(loss_sum.dtype)

            def run_autograd() -> None:
                if loss_sum.requires_grad:
                    run_backward([loss_sum], [seed_grad])

            self._is_in_backward = True
            self._returned.begin_backward(loss_sum, seed_grad)
            try:
                self._end_round(run_autograd)
            finally:
                self._is_in_backward = False
            of_round = rows_on_host.read()
            own = float(of_round[self._control.position, 1])
            mean.reductions.append(self._returned.reductions)
            mean.told += [num_samples, own, *self._returned.factors()]
            has_grad = mean.agree_on_grads() if is_last else []
            if divisor is None:
                have_samples = [row[3] for row in rows]
                if not all(have_samples):
                    check_no_tokens(of_round[:, 1].tolist(), have_samples)
                if self._runtime.tokens is not None:
                    self._runtime.tokens.cutter.check_number(own, num_samples)
            warn_of_bounded(of_round.tolist(), mean.sums)
            if divisor is not None:
                of_round = of_round / torch.tensor([divisor, 1.0], dtype=torch.float64)
            mean.sums = of_round if mean.sums is None else mean.sums + of_round
            ends_early = self._runtime.raises_bad_loss and not mean.sums[:, 0].isfinite().all()
            if not is_last and not ends_early:
                return None
        scale = self._scale_on_host
        number = None if scale is None else scale.read().item()
        return mean.end_step(mean.sums, has_grad, number)

    def _end_round(self, run_autograd: Callable[[], None]) -> None:
        """Take all turns of a backward, and after the last round reduce what is left."""
        runtime, each = self._runtime, self._runtime.step.round
        assert each is not None
        runtime.step.awaits_backward = False
        runtime.backward_round(each, run_autograd)
        if runtime.rounds.is_last:
            runtime.reduce_rest()
        else:
            runtime.rounds.end_round(each.num_together)
        runtime.step.round = None

    def check_pair(self, loss_sum: Any, num_tokens: Any) -> None:
        """Raise ``ValueError`` if what ``model(...)`` has returned is no sum over samples."""
        if self._runtime.rounds.is_cut:
            self._returned.check_adds_up(loss_sum, num_tokens, "model.backward")

    def _check_divisor(self, divisor: float | None, divisors: set[float]) -> None:
        """Raise ``ValueError`` unless ranks, and rounds of a step, agree on there being one."""
        if len(divisors) > 1 or not all(each > 0 for each in divisors):
            raise ValueError(_UNLIKE_DIVISORS.format(sorted(divisors)))
        is_divided = divisor is not None
        if self._runtime.rounds.have_begun and is_divided != self._mean.is_divided:
            raise ValueError(_DIVISOR_OF_SOME)
        self._mean.is_divided = is_divided

    def _scale(self, num_tokens: Tensor, divisor: float | None) -> Tensor:
        """By what to multiply the loss of a round in which all ranks have so many tokens.

        It stays a tensor, so that the host does not wait for an accelerator.
        """
        number = torch.where(num_tokens == 0, 1.0, num_tokens)
        rounds, before = self._runtime.rounds.number, self._scale_on_host
        if not self._runtime.rounds.have_begun:
            self._mean.sums, before = None, None
            self._mean.reductions, self._mean.told = [], []
        if rounds == 1 or divisor is not None:
            self._scale_on_host = None
            return (
                number if divisor is None else torch.full_like(number, divisor)
            ).reciprocal()
        sums = self._mean.sums
        if sums is None or not sums[:, 1].any():
            # See [Note: Scale of the loss].  m / (m 2^e) is exact, also where exp2 is not.
            mantissa, _ = torch.frexp(number * rounds)
            nearest = torch.where(mantissa < 0.5**0.5, 2.0, 1.0)
            self._power = nearest * mantissa / (number * rounds)
            self._scale_on_host = HostCopy(self._power)
            if before is not None:  # the rounds so far, without tokens, are rescaled
                self._runtime.executor.finish()  # before sums are changed
                factor = (self._scale_on_host.read() / before.read()).item()
                for flat in self._mean.flats:
                    flat.grad.multiply(factor)
        return self._power

    def expect(self, output: Any) -> Any:
        """The output to return; takes gradients only of the one model.backward that follows."""
        self._num_forwards += 1
        number = self._num_forwards

        def check(_: Tensor) -> None:
            if self._is_in_backward and self._num_forwards == number:
                return
            with self._peers.fail_together():
                if torch.is_grad_enabled():  # only under create_graph=True
                    raise RuntimeError(CREATES_GRAPH)
                raise RuntimeError(arrived_late(of_earlier=self._is_in_backward))

        reductions = self._runtime.known.current.reductions if self._had_samples else {}
        output, self._returned = Output.watched(output, reductions)
        for leaf in self._returned.leaves.values():
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(check)
        return output


_NO_FORWARD = (
    "model.backward: there was no model(...) with gradients enabled since the last one, or it "
    "was called again without them. Call the model, then this once, with the sum of all losses "
    "of what it has returned."
)
_WRITTEN = (
    "model.backward: {}, or a parameter beside it, was written after model(...), and backward "
    "computes with it. Write parameters, and step optimizers, before model(...) or after "
    "model.backward."
)
_NO_SAMPLES = (
    "model.backward: no rank has given the model samples. Pass the batch as tensors with one "
    "row per sample; a model without arguments has none."
)
_UNLIKE_DIVISORS = (
    "model.backward: divisor is {} on different ranks (inf: none) but must be the same and "
    "above 0."
)
_DIVISOR_OF_SOME = "model.backward: give a divisor in all rounds of a step, or in none of them."
