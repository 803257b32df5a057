"""Backward from a rank's loss to gradients of the mean over all ranks' tokens.

[Note: Scale of the loss]
In a step of one round the loss is divided by the number of tokens before backward, as in any by
a divisor that the caller gives.  In several rounds the number is not known then: every backward
is scaled by the same power of two, near what the number will be, and the sums are multiplied
once, at the end.  Powers of two do not round.

[Note: The way to .grad]
``run`` calls ``Runtime.backward``: each turn's reduction is launched when the turn ends, and
waited for (``FlatGradient.finish``) before the next one is.  After the last round
``set_grads_with_hooks`` lets each ``FlatTensor`` assign the gradients of its rows
(``set_sharded_grads``).  ``.grad`` may be read when ``run`` returns; with whole matrices, who
reads one of the last reduction waits for it: an optimizer of others steps beside it.
"""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.comm import devices
from shardhet.comm.host_copy import HostCopy
from shardhet.comm.progress import progress
from shardhet.fsdp.microbatch.layered import leaves_of, run_backward
from shardhet.fsdp.microbatch.loss import check_no_tokens
from shardhet.fsdp.params.param_hooks import (
    ParamHooks,
    check_hooks_agree,
    may_be_late,
    set_grads_with_hooks,
)
from shardhet.fsdp.params.row_group import RowGroup
from shardhet.fsdp.params.step_settings import check_settings_agree, with_settings
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.fsdp.step.observer import Activity
from shardhet.fsdp.step.output import Laws, Output, check_factors
from shardhet.fsdp.step.runtime import Runtime

logger = logging.getLogger("shardhet.fsdp")


class MeanBackward:
    """Implements ``HetFSDP.backward``."""

    def __init__(
        self,
        runtime: Runtime,
        flats: Sequence[FlatTensor],
        param_by_fqn: Mapping[str, nn.Parameter],
        hooks: ParamHooks,
        rows: RowGroup,
        *,
        is_float16: bool,
    ) -> None:
        self._num_forwards = 0
        self.is_float16 = is_float16
        self._returned = Output(None)  # by the last model(...)
        self._runtime = runtime
        self._flats = flats
        self._param_by_fqn = param_by_fqn
        self._own = {
            id(each)
            for flat in flats
            for each in (*flat.sharded_params, *flat.unsharded_params)
        }
        self._hooks = hooks
        self._rows = rows
        self._comm = rows.comm
        self._control = rows.control
        self._peers = rows.peers
        self._is_in_backward = False
        self.is_divided = False  # the loss, by what ``backward`` is told
        # Of the rounds of the step so far
        self._sums: Tensor | None = None  # losses and tokens of every rank, [world_size, 2]
        self._laws: list[Laws] = []  # see ``check_factors``
        self._told: list[float] = []
        self._power = torch.ones(())  # by which losses are multiplied, on the device
        self._scale_on_host: HostCopy | None = None  # the same; None in a step of one round

    def run(
        self, loss_sum: Tensor, num_tokens: Tensor | int, divisor: float | None
    ) -> float | None:
        """See ``HetFSDP.backward``.  Collective."""
        with self._peers.guard("model.backward"):
            if not self._runtime.step.awaits_backward:
                raise RuntimeError(_NO_FORWARD if self._runtime.had_samples else _NO_SAMPLES)
            check_is_number(loss_sum)
            if self.is_float16:
                _check_scaled(loss_sum, [*self._returned.leaves.values()])
            if divisor is None:
                self.check_pair(loss_sum, num_tokens)
            num_samples = batch.num_samples if (batch := self._runtime.step.round) else 0
            several = self._runtime.rounds.number > 1
            self.check_leaves(loss_sum, divides_late=several and divisor is None)
            with self._runtime.observers.watch("", Activity.AGREE):
                told = math.inf if divisor is None else divisor
                rows = self.enter("model.backward", told, loss_sum.requires_grad, num_samples)
                check_graph(any(row[2] for row in rows), any(row[3] for row in rows))
                self._check_divisor(divisor, {row[1] for row in rows})
                # Read after backward is launched: the host then waits only for the end of
                # forward, while the device, which still has backward queued, is not idle.
                rows_on_host, total = self._share(loss_sum, num_tokens)
            is_last = self._runtime.rounds.is_last
            seed_grad = self._scale(total, divisor).to(loss_sum.dtype)

            def run_autograd() -> None:
                if loss_sum.requires_grad:
                    run_backward([loss_sum], [seed_grad])

            self._is_in_backward = True
            self._returned.begin_backward(loss_sum, seed_grad)
            try:
                self._runtime.backward(run_autograd)
            finally:
                self._is_in_backward = False
            of_round = rows_on_host.read()
            own = float(of_round[self._control.position, 1])
            self._laws.append(self._returned.laws)
            self._told += [num_samples, own, *self._returned.factors()]
            has_grad = self.agree_on_grads() if is_last else {}
            if divisor is None:
                check_no_tokens(of_round[:, 1].tolist(), [row[3] for row in rows])
                if self._runtime.tokens is not None:
                    self._runtime.tokens.cutter.check_number(own, num_samples)
            _warn_of_bounded(of_round.tolist(), self._sums)
            if divisor is not None:
                of_round = of_round / torch.tensor([divisor, 1.0], dtype=torch.float64)
            self._sums = of_round if self._sums is None else self._sums + of_round
            ends_early = self._runtime.raises_bad_loss and not self._sums[:, 0].isfinite().all()
            if not is_last and not ends_early:
                return None
        scale = self._scale_on_host
        number = None if scale is None else scale.read().item()
        return self.end_step(self._sums, has_grad, number)

    def check_pair(self, loss_sum: Any, num_tokens: Any) -> None:
        """Raise ``ValueError`` if what ``model(...)`` has returned is no sum over samples."""
        if self._runtime.rounds.is_cut:
            self._returned.check_adds_up(loss_sum, num_tokens, "model.backward")

    def enter(self, call: str, *values: float) -> list[list[float]]:
        """Enter ``call`` with all ranks: hooks, settings and buffers are the same on all."""
        known = self._runtime.calls.known
        hooks = with_settings(self._hooks.find(self._param_by_fqn), self._peers)
        entered = self._control.enter(call, [hooks, *values, known.written])
        check_hooks_agree(rows := check_settings_agree(entered, self._peers))
        known.check_written([row[-1] for row in rows], [bool(row[-2]) for row in rows])
        return rows

    def end_step(
        self, sums: Tensor, has_grad: Mapping[str, bool], scale: float | None
    ) -> float | None:
        """Set the gradients of a step, and return its mean loss.  Collective.

        ``sums`` are losses and tokens of every rank, [world_size, 2].  Gradients are those of
        the sum of losses times ``scale``; None if they are of what is returned.
        """
        self._sums = sums
        losses, counts = sums.T.tolist()
        is_valid = all(map(math.isfinite, losses)) and sum(counts) > 0
        if not is_valid:
            with self._peers.guard("model.backward"):
                self._runtime.drop()
        step = self._runtime.rounds.step + 1
        self._runtime.rounds.end_step(step)
        progress.end_step(step)
        if not is_valid:
            if not all(map(math.isfinite, losses)):
                if self._runtime.raises_bad_loss:
                    raise FloatingPointError(_not_finite(step, losses))
                return math.nan
            logger.warning("step %d has no valid token and is skipped.", step)
            return None
        walk, factor = self._runtime.walk, None if scale is None else 1 / (scale * sum(counts))
        if not (self._runtime.plan.whole_matrices and may_be_late(self._flats, self._hooks)):
            walk.finish()
        with self._peers.guard("hooks on parameters"):
            for flat in (each for each in self._flats if each.is_trainable):
                has = [has_grad[slot.fqn] for slot in flat.slots]
                set_grads_with_hooks(flat, has, factor, self._hooks, self._rows, walk)
        return self.mean_so_far

    @property
    def mean_so_far(self) -> float:
        """Of the rounds so far of the step in progress, or of the last one."""
        if self._sums is None:
            return 0.0
        losses, counts = map(sum, self._sums.T.tolist())
        return float(losses if self.is_divided else losses / counts if counts else losses)

    def _check_divisor(self, divisor: float | None, divisors: set[float]) -> None:
        """Raise ``ValueError`` unless ranks, and rounds of a step, agree on there being one."""
        if len(divisors) > 1 or not all(each > 0 for each in divisors):
            raise ValueError(_UNLIKE_DIVISORS.format(sorted(divisors)))
        is_divided = divisor is not None
        if self._runtime.rounds.have_begun and is_divided != self.is_divided:
            raise ValueError(_DIVISOR_OF_SOME)
        self.is_divided = is_divided

    def _scale(self, num_tokens: Tensor, divisor: float | None) -> Tensor:
        """By what to multiply the loss of a round in which all ranks have so many tokens.

        It stays a tensor, so that the host does not wait for an accelerator.
        """
        number = torch.where(num_tokens == 0, 1.0, num_tokens)
        rounds, before = self._runtime.rounds.number, self._scale_on_host
        if not self._runtime.rounds.have_begun:
            self._sums, before = None, None
            self._laws, self._told = [], []
        if rounds == 1 or divisor is not None:
            self._scale_on_host = None
            return (
                number if divisor is None else torch.full_like(number, divisor)
            ).reciprocal()
        if self._sums is None or not self._sums[:, 1].any():
            # See [Note: Scale of the loss].  m / (m 2^e) is exact, also where exp2 is not.
            mantissa, _ = torch.frexp(number * rounds)
            nearest = torch.where(mantissa < 0.5**0.5, 2.0, 1.0)
            self._power = nearest * mantissa / (number * rounds)
            self._scale_on_host = HostCopy(self._power)
            if before is not None:  # the rounds so far, without tokens, are rescaled
                self._runtime.walk.finish()  # before sums are changed
                factor = (self._scale_on_host.read() / before.read()).item()
                for flat in self._flats:
                    flat.grad.multiply(factor)
        return self._power

    def agree_on_grads(self) -> dict[str, bool]:
        """Which parameters have a gradient on any rank, by fqn.  Collective."""
        names = [slot.fqn for flat in self._flats for slot in flat.slots]
        mine = [float(has) for flat in self._flats for has in flat.grad.has_grad]
        laws, told, self._laws, self._told = self._laws, self._told, [], []
        with self._runtime.observers.watch("", Activity.AGREE):
            rows = self._control.exchange([float(self._runtime.asks_to_end), *mine, *told])
        if self._runtime.rounds.is_cut and told:
            check_factors(laws, [row[1 + len(mine) :] for row in rows])
        asks_to_end, *columns = zip(*rows, strict=True)
        self._runtime.is_asked_to_end = any(asks_to_end)
        columns = columns[: len(names)]
        return {name: any(column) for name, column in zip(names, columns, strict=True)}

    def expect(self, output: Any) -> Any:
        """The output to return; takes gradients only of the one model.backward that follows."""
        self._num_forwards += 1
        number = self._num_forwards

        def check(_: Tensor) -> None:
            if self._is_in_backward and self._num_forwards == number:
                return
            with self._peers.guard():
                if torch.is_grad_enabled():  # only under create_graph=True
                    raise RuntimeError(_CREATES_GRAPH)
                raise RuntimeError(_arrived_late(of_earlier=self._is_in_backward))

        laws = self._runtime.calls.known.current.laws if self._runtime.had_samples else {}
        output, self._returned = Output.watched(output, laws)
        for leaf in self._returned.leaves.values():
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(check)
        return output

    def check_leaves(self, loss_sum: Tensor, *, divides_late: bool) -> None:
        """Raise ``ValueError`` if the loss depends on a parameter that is not the model's, or,
        where it is divided after backward only, on anything else that gets a gradient.
        """
        anchors = {id(each.anchor) for each in (self._runtime.calls, self._runtime.features)}
        others = (each for each in leaves_of(loss_sum) if id(each) not in self._own | anchors)
        for variable in others:
            if isinstance(variable, nn.Parameter) and not self._rows.is_alone:
                raise ValueError(_OF_OTHERS.format(tuple(variable.shape)))
            if divides_late:
                raise ValueError(wants_gradient("model.backward", variable))

    def _share(self, loss_sum: Tensor, num_tokens: Tensor | int) -> tuple[HostCopy, Tensor]:
        """Loss and tokens of every rank, [world_size, 2] in plan order, and all tokens."""
        comm = self._comm
        mine = torch.zeros(2, dtype=torch.float64, device=comm.device)
        batch = self._runtime.step.round
        if batch is not None and batch.num_samples:
            mine[0] = loss_sum.detach()  # without samples it may be 0 / 0
        mine[1].add_(_number(num_tokens))
        # On the stream of its communicator; the divisor is what the compute stream waits for.
        comm.reduce_scatter_stream.wait_stream(comm.current_stream())
        with comm.on_stream(comm.reduce_scatter_stream):
            rows = comm.reduce_channel.gather_rows(mine)
            total = rows[:, 1].sum()
            on_host = HostCopy(rows)
            # After the copy: a rank that is alone copies ``mine``, which is freed below.
            shared = comm.record_event(comm.reduce_scatter_stream)
        comm.current_stream().wait_event(shared)
        return on_host, total


_OF_OTHERS = (
    "model.backward: the loss depends on a parameter of shape {} that is not one of the "
    "model's (of a criterion, perhaps), so its gradient would be that of this rank's samples "
    "only. Put it into the module that HetFSDP wraps, or use it detached."
)
_NO_FORWARD = (
    "model.backward: there was no model(...) with gradients enabled since the last one. Call "
    "the model first."
)
_NO_SAMPLES = (
    "model.backward: no rank has given the model samples. Pass the batch as tensors with one "
    "row per sample; a model without arguments has none."
)
_NO_GRADIENT = (
    "model.backward: no rank's loss depends on a parameter that requires gradients. Give it "
    "the loss itself, not detached, and train some parameters."
)
_UNLIKE_DIVISORS = (
    "model.backward: divisor is {} on different ranks (inf: none) but must be the same and "
    "above 0."
)
_DIVISOR_OF_SOME = "model.backward: give a divisor in all rounds of a step, or in none of them."
_CREATES_GRAPH = (
    "gradients of gradients (create_graph=True, as for a gradient penalty) are not computed "
    "through a HetFSDP model, whose backward has no graph. Leave the penalty out, or train "
    "this model with plain PyTorch."
)


def _arrived_late(*, of_earlier: bool) -> str:
    return (
        "a gradient arrived for the output of "
        + ("an earlier model(...)" if of_earlier else "model(...)")
        + ". Call model.backward(loss_sum, num_tokens) once after each model(...), before the "
        "next, instead of loss.backward() or one backward for several calls: gradients add up. "
        "For the mean over the tokens of several calls give each model.backward this rank's "
        "number of tokens in all. Does one loss compare two calls, as of a siamese net? Make "
        "both in the forward of one module that HetFSDP wraps. Does it go through two HetFSDP "
        "models? Wrap both in one module, and make an optimizer for the parameters of each."
    )


def check_graph(has_graph: bool, has_samples: bool) -> None:
    """Raise ``RuntimeError`` if there is nothing to differentiate, as torch does."""
    if has_samples and not has_graph:
        raise RuntimeError(_NO_GRADIENT)


def _number(num_tokens: Tensor | int) -> Any:
    """A plain number for a tensor of the host, whose copy would wait for all of forward."""
    if isinstance(num_tokens, Tensor) and devices.is_on_host(num_tokens):
        return num_tokens.item()
    return num_tokens


def _warn_of_bounded(rows: Sequence[Sequence[float]], before: Tensor | None) -> None:
    """Warn if a rank's number of tokens may be 1 in place of 0.

    ``rows`` are losses and tokens of a round, by position, and ``before`` of the rounds before.
    """
    counts = [tokens for _, tokens in (*rows, *([] if before is None else before.tolist()))]
    if [0.0, 1.0] in rows and max(counts) > 1:
        warnings.warn(
            f"model.backward: the loss of position {rows.index([0.0, 1.0])} of the plan is 0 "
            "and has 1 token. If that is because the count is kept above 0 (clamp(min=1), "
            "max(1, n)), the loss is divided by too much: give the count as it is. It may be "
            "0, and losses are divided by that of all ranks.",
            stacklevel=4,
        )


def wants_gradient(call: str, tensor: Tensor) -> str:
    """The message of a refusal."""
    return (
        f"{call}: the loss depends on a tensor of shape {tuple(tensor.shape)} that requires a "
        "gradient and is no parameter of the model. In a step of several rounds, or of "
        "stages, losses are divided by the number of all tokens at the end only, so it would "
        "get that of another loss. Detach it, give every model.backward of the step a "
        "divisor, or give a plan of one round without stages."
    )


def check_is_number(loss_sum: Any) -> None:
    """Raise unless the loss is a tensor with one element."""
    if isinstance(loss_sum, Tensor) and loss_sum.dim() == 0:
        return
    if isinstance(loss_sum, Tensor):
        raise ValueError(
            f"model.backward: the loss has shape {tuple(loss_sum.shape)} but must be a single "
            "number, the sum over this rank's tokens. Call .sum() on it."
        )
    has_loss = hasattr(loss_sum, "loss") or (
        isinstance(loss_sum, Mapping) and "loss" in loss_sum
    )
    raise TypeError(
        f"model.backward: the loss is a {type(loss_sum).__name__} but must be a tensor, the "
        "sum over this rank's tokens. "
        + ("Pass output.loss * num_tokens." if has_loss else "Pass the loss itself.")
    )


def _check_scaled(loss_sum: Tensor, outputs: Sequence[Any]) -> None:
    """Raise ``ValueError`` if the loss is that of the model itself, or in float16, too."""
    if loss_sum.requires_grad and any(output is loss_sum for output in outputs):
        raise ValueError(
            "model.backward: param_dtype is float16, but the loss is not scaled, so small "
            "gradients would become 0. Call "
            "model.backward(scaler.scale(loss_sum), num_tokens) with a "
            "torch.amp.GradScaler, and scaler.step(optimizer) and scaler.update() after it."
        )
    check_is_wide(loss_sum, "model.backward")


def check_scaler(scaler: torch.amp.GradScaler | None, *, is_float16: bool) -> None:
    """Raise ``ValueError`` if there is none, in float16."""
    if is_float16 and scaler is None:
        raise ValueError(
            "forward_backward: param_dtype is float16, but the loss is not scaled, so small "
            "gradients would become 0. Give it scaler=torch.amp.GradScaler(...), and call "
            "scaler.step(optimizer) and scaler.update() after it."
        )


def check_is_wide(loss_sum: Tensor, call: str) -> None:
    """Raise ``ValueError`` if the loss is in float16."""
    if loss_sum.dtype is torch.float16:
        raise ValueError(
            f"{call}: the loss is a sum in float16, where more than 65,504 is infinite. "
            "Compute it from output.float()."
        )


def _not_finite(step: int, losses: Sequence[float]) -> str:
    bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
    return (
        f"step {step}: the loss is not finite at positions {bad} of the "
        f"plan (loss sums {losses}); no gradient was set. Lower the learning rate, "
        "clip gradients, or look for bad samples there."
    )
