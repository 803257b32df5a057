"""The mean loss of a step, and its gradients: what all ranks tell each other of them.

[Note: The way to .grad]
Each turn's reduction is launched when the turn ends, and waited for (``FlatGradient.finish``)
before the next one is; ``end_step`` waits for the last, the root's if it trains.  Then
``set_grads_with_hooks`` sets the gradients of the rows of each flat tensor.  With whole
matrices ``end_step`` need not wait: who reads a gradient of the last reduction does
(``defer_grads``), and an optimizer of others steps beside it.

[Note: Settings]
A learning rate that follows the loss of one rank's samples (``ReduceLROnPlateau``) differs
between ranks, so that what a parameter's rows are trained with depends on who stores them.
The same holds for groups that are made by a rank's rows (``p.numel() > 1000``): parameters with
rows on all ranks are compared with the settings of their group at the next ``backward``.  Torch
calls ``note`` before every step of every optimizer.
"""

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardhet.comm import devices
from shardhet.comm.calls import HostCopy
from shardhet.comm.channel import progress
from shardhet.comm.peers import Peers
from shardhet.fsdp.microbatch.layered import leaves_of
from shardhet.fsdp.microbatch.loss import Laws, check_factors
from shardhet.fsdp.params.optimizer_check import rows_among
from shardhet.fsdp.params.row_params import (
    ParamHooks,
    check_hooks_agree,
    may_be_late,
    set_grads_with_hooks,
)
from shardhet.fsdp.step.around import Activity
from shardhet.fsdp.step.runtime import Runtime

NO_STEP = 0  # a rank without rows need not step
SETTINGS, FINGERPRINTS = 2**31, 2**22  # how many are told apart
# Of the steps since ``backward``: a number for all, and the text of the last.
_steps: "WeakKeyDictionary[Peers, tuple[int, str]]" = WeakKeyDictionary()
_last_text: "WeakKeyDictionary[Peers, str]" = WeakKeyDictionary()


def note(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Keep the settings of a step until the next ``backward``."""
    rows_by_group = [rows_among(group["params"]) for group in optimizer.param_groups]
    owners = dict.fromkeys(each.group.peers for rows in rows_by_group for each in rows)
    texts = [
        ", ".join(
            f"{name}={number}"
            for name in optimizer.defaults
            if (number := _numbers_in(group.get(name)))
        )
        for group in (optimizer.param_groups if owners else ())
    ]
    text = "; ".join(dict.fromkeys(texts))
    for peers in owners:
        before, _ = _steps.get(peers, (0, ""))
        found = [
            (settings, sorted(each.fqn for each in rows if each.is_everywhere(peers)))
            for settings, rows in zip(texts, rows_by_group, strict=True)
        ]
        _steps[peers] = (crc32(repr(found).encode(), before), text)


register_optimizer_step_pre_hook(note)


def with_settings(fingerprint: int, peers: Peers) -> float:
    """A fingerprint, and the settings of the steps since this was called last, in one number.

    A float64 has 53 bits.
    """
    steps, _last_text[peers] = _steps.pop(peers, (None, "none"))
    settings = NO_STEP if steps is None else 1 + steps % (SETTINGS - 1)
    return float(fingerprint % FINGERPRINTS * SETTINGS + settings)


def check_settings_agree(rows: Sequence[Sequence[float]], peers: Peers) -> list[list[float]]:
    """The rows with the fingerprint alone; raises ``ValueError`` if settings differ."""
    parts = [divmod(int(row[0]), SETTINGS) for row in rows]
    if len({settings for _, settings in parts} - {NO_STEP}) > 1:
        raise ValueError(
            "optimizer.step: ranks have stepped with different settings or groups, or not "
            f"equally often; this one's last step had {_last_text[peers]}. Does the learning "
            "rate, or the group of a parameter, follow the loss of a rank's own samples "
            "(ReduceLROnPlateau), or how many rows it has (p.numel(), p.shape)? Let it follow "
            "a number of all ranks: what model.backward returns, p.norm(), p.square().mean(), "
            "sums by model.exchange, or sizes from before wrapping."
        )
    return [[float(found), *row[1:]] for (found, _), row in zip(parts, rows, strict=True)]


def _numbers_in(value: Any) -> str:
    """The numbers of a setting; none of one that may differ, such as ``fused``."""
    values = value if isinstance(value, list | tuple) else [value]
    numbers = [
        each.item()
        if isinstance(each, Tensor) and each.numel() == 1 and devices.is_on_host(each)
        else each
        for each in values
    ]
    are_numbers = all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in numbers
    )
    return " ".join(f"{each:.6g}" for each in numbers) if are_numbers else ""


logger = logging.getLogger("shardhet.fsdp")


class MeanLoss:
    """The mean loss of the step in progress."""

    def __init__(
        self,
        runtime: Runtime,
        param_by_fqn: Mapping[str, nn.Parameter],
        hooks: ParamHooks,
        *,
        is_float16: bool,
    ) -> None:
        self.is_float16 = is_float16
        self._runtime = runtime
        self.flats = runtime.flats
        self._param_by_fqn = param_by_fqn
        self._own = {
            id(each)
            for flat in self.flats
            for each in (*flat.sharded_params, *flat.unsharded_params)
        }
        self._hooks = hooks
        self._control, self._peers = runtime.control, runtime.peers
        self.is_divided = False  # the loss, by what the program gives
        # Of the rounds of the step so far
        self.sums: Tensor | None = None  # losses and tokens of every rank, [world_size, 2]
        self.reductions: list[Laws] = []  # see ``check_factors``
        self.told: list[float] = []

    def enter(self, call: str, *values: float) -> list[list[float]]:
        """Enter ``call`` with all ranks: hooks, settings and buffers are the same on all."""
        known = self._runtime.known
        hooks = with_settings(self._hooks.find(self._param_by_fqn), self._peers)
        entered = self._control.enter(call, [hooks, *values, known.written])
        check_hooks_agree(rows := check_settings_agree(entered, self._peers))
        known.check_written([row[-1] for row in rows], [bool(row[-2]) for row in rows])
        return rows

    def end_step(
        self, sums: Tensor, has_grad: Sequence[bool], scale: float | None
    ) -> float | None:
        """Set the gradients of a step, and return its mean loss.  Collective.

        ``sums`` are losses and tokens of every rank, [world_size, 2], ``has_grad`` whether any
        rank has a gradient, by parameter of all flat tensors.  Gradients are those of
        the sum of losses times ``scale``; None if they are of what is returned.
        """
        self.sums = sums
        losses, counts = sums.T.tolist()
        is_valid = all(map(math.isfinite, losses)) and abs(sum(counts)) > 0
        if not is_valid:
            with self._peers.fail_together("model.backward"):
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
        executor, factor = (
            self._runtime.executor,
            None if scale is None else 1 / (scale * sum(counts)),
        )
        is_late = self._runtime.plan.whole_matrices and may_be_late(self.flats, self._hooks)
        if not is_late:
            executor.finish()
        with self._peers.fail_together("hooks on parameters"):
            has = iter(has_grad)
            for flat in self.flats:
                of_flat = [next(has) for _ in flat.slots]
                if flat.is_trainable:
                    set_grads_with_hooks(
                        flat, of_flat, factor, self._hooks, self._runtime.group, executor
                    )
        self._runtime.is_at_rest = not is_late
        return self.mean_so_far

    @property
    def mean_so_far(self) -> float:
        """Of the rounds so far of the step in progress, or of the last one."""
        if self.sums is None:
            return 0.0
        losses, counts = map(sum, self.sums.T.tolist())
        return float(losses if self.is_divided else losses / counts if counts else losses)

    def agree_on_grads(self) -> list[bool]:
        """Whether any rank has a gradient, by parameter of all flat tensors.  Collective."""
        mine = [float(has) for flat in self.flats for has in flat.grad.has_grad]
        reductions, told, self.reductions, self.told = self.reductions, self.told, [], []
        with self._runtime.observers.watch("", Activity.AGREE):
            rows = self._control.exchange([float(self._runtime.asks_to_end), *mine, *told])
        if self._runtime.rounds.is_cut and told:
            check_factors(reductions, [row[1 + len(mine) :] for row in rows])
        asks_to_end, *columns = zip(*rows, strict=True)
        self._runtime.is_asked_to_end = any(asks_to_end)
        return [any(column) for column in columns[: len(mine)]]

    def check_leaves(self, loss_sum: Tensor, *, divides_late: bool) -> None:
        """Raise ``ValueError`` if the loss depends on a parameter that is not the model's, or,
        where it is divided after backward only, on anything else that gets a gradient.
        """
        anchors = {id(each.anchor) for each in (self._runtime.calls, self._runtime.features)}
        others = (each for each in leaves_of(loss_sum) if id(each) not in self._own | anchors)
        for variable in others:
            if isinstance(variable, nn.Parameter) and self._control.group is not None:
                raise ValueError(_OF_OTHERS.format(tuple(variable.shape)))
            if divides_late:
                raise ValueError(wants_gradient("model.backward", variable))

    def share(self, loss_sum: Tensor, num_tokens: Tensor | int) -> tuple[HostCopy, Tensor]:
        """Loss and tokens of every rank, [world_size, 2] in plan order, and all tokens."""
        comm = self._runtime.root_comm
        mine = torch.zeros(2, dtype=torch.float64, device=comm.device)
        batch = self._runtime.step.round
        if batch is not None and batch.num_samples:
            mine[0] = loss_sum.detach()  # without samples it may be 0 / 0
        mine[1].add_(_number(num_tokens))
        # On the stream of its communicator; the divisor is what the compute stream waits for.
        comm.reduce_scatter_stream.wait_stream(comm.current_stream())
        with comm.on_stream(comm.reduce_scatter_stream):
            rows = comm.reduce_scatter_channel.gather_rows(mine)
            total = rows[:, 1].sum()
            on_host = HostCopy(rows)
            # After the copy: a rank that is alone copies ``mine``, which is freed below.
            shared = comm.record_event(comm.reduce_scatter_stream)
        comm.current_stream().wait_event(shared)
        return on_host, total


_NO_GRADIENT = (
    "model.backward: no rank's loss depends on a parameter that requires gradients. Give it "
    "the loss itself, not detached, and train some parameters."
)
_OF_OTHERS = (
    "model.backward: the loss depends on a parameter of shape {} that is not one of the "
    "model's (of a criterion, perhaps), so its gradient would be that of this rank's samples "
    "only. Put it into the module that HetFSDP wraps, or use it detached."
)


def check_graph(has_graph: bool, has_samples: bool) -> None:
    """Raise ``RuntimeError`` if there is nothing to differentiate, as torch does."""
    if has_samples and not has_graph:
        raise RuntimeError(_NO_GRADIENT)


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


def check_is_wide(loss_sum: Tensor, call: str) -> None:
    """Raise ``ValueError`` if the loss is in float16."""
    if loss_sum.dtype is torch.float16:
        raise ValueError(
            f"{call}: the loss is a sum in float16, where more than 65,504 is infinite. "
            "Compute it from output.float()."
        )


def check_scaler(scaler: torch.amp.GradScaler | None, *, is_float16: bool) -> None:
    """Raise ``ValueError`` if there is none, in float16."""
    if is_float16 and scaler is None:
        raise ValueError(
            "forward_backward: param_dtype is float16, but the loss is not scaled, so small "
            "gradients would become 0. Give it scaler=torch.amp.GradScaler(...), and call "
            "scaler.step(optimizer) and scaler.update() after it."
        )


def _not_finite(step: int, losses: Sequence[float]) -> str:
    bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
    return (
        f"step {step}: the loss is not finite at positions {bad} of the "
        f"plan (loss sums {losses}); no gradient was set. Lower the learning rate, "
        "clip gradients, or look for bad samples there."
    )


def check_scaled(loss_sum: Tensor, outputs: Sequence[Any]) -> None:
    """Raise ``ValueError`` if the loss is that of the model itself, or in float16, too."""
    if loss_sum.requires_grad and any(output is loss_sum for output in outputs):
        raise ValueError(
            "model.backward: param_dtype is float16, but the loss is not scaled, so small "
            "gradients would become 0. Call "
            "model.backward(scaler.scale(loss_sum), num_tokens) with a "
            "torch.amp.GradScaler, and scaler.step(optimizer) and scaler.update() after it."
        )
    check_is_wide(loss_sum, "model.backward")


def _number(num_tokens: Tensor | int) -> Any:
    """A plain number for a tensor of the host, whose copy would wait for all of forward."""
    if isinstance(num_tokens, Tensor) and devices.is_on_host(num_tokens):
        return num_tokens.item()
    return num_tokens


def warn_of_bounded(rows: Sequence[Sequence[float]], before: Tensor | None) -> None:
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
