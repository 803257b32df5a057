"""Trainer: one optimizer step, an exact evaluation, and what each device did meanwhile."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardhet.checkpoint.state.optimizer_state import listed
from shardhet.comm.calls import HostCopy, to_device
from shardhet.comm.channel import may_take_long, progress
from shardhet.fsdp import HetFSDP
from shardhet.records.layout import Span
from shardhet.training.data import GlobalBatches, TokenBatch
from shardhet.training.guard import BadStepGuard
from shardhet.training.hooks.bad_steps import OnBadStep
from shardhet.training.loss_scaling import LossScaler
from shardhet.training.optim import Schedule
from shardhet.training.peak_memory import (
    DeviceTimes,
    DeviceUse,
    KeptBytes,
    PeakMemory,
    kept_bytes,
)

# Calls the model with this rank's samples; returns (loss_sum, num_targets).  To train,
# ``model.forward_backward`` is called in the same way, which returns the mean.
Run = Callable[[Any, Sequence[Tensor]], Any]


def run_plainly(call: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """``Run`` for a model that takes the batch's tensors and returns its loss."""
    return call(*tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimizer step; the same on every rank except for ``step_time_s``."""

    step: int  # counts from 1
    mean_loss: float | None  # nats per target; None if no sample had one
    norm: float | HostCopy  # of the gradients before clipping; see ``grad_norm``
    learning_rate: float  # of the first parameter group
    num_targets: int  # tokens, or labels, of all ranks
    # On the host, with what it has waited for the step before; an accelerator may still run
    # while the next step begins.
    step_time_s: float
    # Why the step changed nothing: its loss or gradients are not finite, or a spike.
    why_skipped: str | None = None
    loss_scale: float | None = None  # of the step, in float16
    # In float16: the scale was too large, which says nothing against the batch.
    has_overflowed: bool = False

    @property
    def grad_norm(self) -> float:
        """The norm before clipping.  The host waits until the device has it."""
        return self.norm if isinstance(self.norm, float) else float(self.norm.read())

    @property
    def known_grad_norm(self) -> float | None:
        """The norm, or None if the host has not waited for it yet."""
        if isinstance(self.norm, float):
            return self.norm
        return None if self.norm.value is None else float(self.norm.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Sums over all ranks, which do not depend on how samples were distributed."""

    loss_sum: float  # nats
    num_targets: int

    @property
    def mean_loss(self) -> float:
        """Nats per target."""
        return self.loss_sum / self.num_targets

    @property
    def bits_per_target(self) -> float:
        """Bits per target; bits per byte if a target is a byte."""
        return self.mean_loss / math.log(2)


class Trainer:
    """Takes ``model`` through ``batches``, one optimizer step at a time.

        trainer = Trainer(model, optimizer, batches, schedule=WarmupDecay(num_steps=100))
        while model.step < 100:
            metrics = trainer.train_step()
        evaluation = trainer.evaluate(held_out)

    Hooks go around it: ``hooks.before_step()``, ``hooks.after_step(metrics.mean_loss)``.

    Every method is collective.  The only state besides the model's and the optimizer's is
    ``model.step``, which says which batch comes next and what the learning rate is,
    ``num_batches_skipped``, which is 0 unless the run was rolled back, and that of ``guard``
    and ``loss_scaler``.
    """

    def __init__(
        self,
        model: HetFSDP,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        batches: GlobalBatches,
        *,
        schedule: Schedule,
        max_grad_norm: float = 1.0,
        device: torch.device | None = None,
        peak_memory: PeakMemory | None = None,
        run: Run = run_plainly,
        guard: BadStepGuard | None = None,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        """Create a trainer; the current learning rates of the optimizer, or of several, are
        the peaks.

        ``run`` calls the model with a batch's tensors and returns what ``Run`` says.

        ``guard`` says which steps are bad, and what becomes of them; None stops at what is not
        finite.

        ``loss_scaler`` is for a model that computes in float16.

        ``peak_memory`` counts the device's memory; None asks the device, or the process.
        """
        if batches.global_batch_size != model.plan.global_batch_size:
            raise ValueError(
                f"batches: global batches of {batches.global_batch_size} samples but the plan "
                f"deals out {model.plan.global_batch_size}. Make the two equal."
            )
        self.model = model
        self.optimizers = listed(optimizer)
        self._batches = batches
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._device = device or torch.device("cpu")
        self.peak_memory = peak_memory or PeakMemory(self._device)
        self._run = run
        self.guard = guard or BadStepGuard()
        self.loss_scaler = loss_scaler
        # Batches that were left out: the batch of a step is that of ``model.step`` plus this.
        self.num_batches_skipped = 0
        self._peak_lrs = [float(group["lr"]) for group in self._groups]
        self._times = DeviceTimes(model, self._device)
        self._waited_s = 0.0  # time of waiting for a step since it ended
        self._kept = KeptBytes()  # of the last timed step
        self._is_in_step = False
        self.peak_memory.forget()  # that of building the model

    def train_step(self, *, is_timed: bool = True) -> StepMetrics:
        """One optimizer step on the next global batch.

        ``look_at_devices`` counts it if it ``is_timed``, which takes an accelerator two events
        per computation and wait, and the host their launches.  On a CPU each step is.
        """
        start_s = time.perf_counter() - self._waited_s
        self._waited_s = 0.0
        if self._is_in_step:  # the last step failed
            self.guard.unchecked = None
        self._is_in_step = True
        self._times.begin_step(is_timed=is_timed)
        model = self.model
        with may_take_long("loading the next batch"):
            batch = self._batches[model.step + self.num_batches_skipped]
        learning_rate = self._set_learning_rates()
        mean_loss, why_skipped = self._run_rounds(batch)
        self.check_last_step()
        norm: float | HostCopy = math.nan
        overflow = None
        if why_skipped is None:
            norm, why_skipped, overflow = self._update(mean_loss)
        if is_timed and why_skipped is None:
            self._kept = kept_bytes(model, self.optimizers)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._is_in_step = False
        if why_skipped is not None:
            self.guard.check(model.step, why_skipped)
        step_time_s = time.perf_counter() - start_s
        self._times.end_step(step_time_s)
        return StepMetrics(
            step=model.step,
            mean_loss=mean_loss,
            norm=norm,
            learning_rate=learning_rate,
            num_targets=batch.num_targets,
            step_time_s=step_time_s,
            why_skipped=overflow or why_skipped,
            loss_scale=None if self.loss_scaler is None else self.loss_scaler.step_scale,
            has_overflowed=overflow is not None,
        )

    def check_last_step(self) -> None:
        """As ``BadStepGuard.check_last_step``; what it waits for is time of the step."""
        start_s = time.perf_counter()
        self.guard.check_last_step()
        if not self._is_in_step:
            self._waited_s += time.perf_counter() - start_s

    def _run_rounds(self, batch: TokenBatch) -> tuple[float | None, str | None]:
        """The mean loss, and why the step has no gradients, if the guard goes on then."""
        scaler = None if self.loss_scaler is None else self.loss_scaler.begin_step()
        call = partial(self.model.forward_backward, scaler=scaler)
        try:
            return self._run(call, self._my_part(batch)), None
        except FloatingPointError as error:  # raised on every rank
            self.check_last_step()  # the step before may be the cause
            if self.guard.on_bad_step is OnBadStep.STOP:
                raise
            return None, str(error).partition(";")[0]

    def _update(self, mean_loss: float | None) -> tuple[HostCopy, str | None, str | None]:
        """Clip, and let the optimizer step; the gradient norm, why the step is bad, and how it
        has overflowed in float16.

        GradScaler reads what has overflowed before the optimizer steps, so the host waits then.
        """
        scaler, step = self.loss_scaler if mean_loss is not None else None, self.model.step
        if scaler is not None:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        norm = HostCopy(self.model.clip_grad_norm_(self._max_grad_norm))
        is_finite = scaler is None or math.isfinite(float(norm.read()))
        why_skipped = self.guard.look(step, mean_loss, norm) if is_finite else None
        if is_finite and why_skipped is None:  # one of several may have no overflow
            progress.mark("the optimizer's step")
            for optimizer in self.optimizers:
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
        overflow = None if scaler is None else scaler.end_step(step, is_finite=is_finite)
        if not is_finite and overflow is None:
            why_skipped = self.guard.judge(mean_loss, float(norm.read()))
        return norm, why_skipped, overflow

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self.optimizers for group in each.param_groups]

    def _set_learning_rates(self) -> float:
        fraction = self._schedule(self.model.step)
        for group, peak in zip(self._groups, self._peak_lrs, strict=True):
            group["lr"] = peak * fraction
        return self._peak_lrs[0] * fraction

    @torch.no_grad()
    def evaluate(self, held_out: TokenBatch) -> Evaluation:
        """The loss over all samples of ``held_out``, dealt out like training batches.

        The last batch may be smaller than a global batch; the last ranks then get fewer
        samples or none.
        """
        self.check_last_step()
        # Loss and targets; on the device, so that the host reads them once.
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        plan = self.model.plan
        # Without gradients there are rounds only where stages take them one after the other.
        size = plan.round_size if plan.stages is None else plan.global_batch_size
        self.model.eval()
        for start in range(0, held_out.num_samples, size):
            progress.mark("evaluation")
            batch = held_out.samples(Span(start, min(start + size, held_out.num_samples)))
            outputs = self._run(self.model, self._my_part(batch))
            for i, output in enumerate(outputs[:2]):
                sums[i] += output
        self.model.train()
        rows = self.model.exchange(sums.tolist())
        loss_sum, num_targets = map(sum, zip(*rows, strict=True))
        return Evaluation(loss_sum=loss_sum, num_targets=int(num_targets))

    def look_at_devices(self) -> tuple[DeviceUse, ...]:
        """What each device did in the timed steps since the last call, in plan order."""
        self.check_last_step()  # the device has done by then what is timed
        rows = self.model.exchange([*self._times.look(), self.peak_memory.read(), *self._kept])
        return tuple(
            DeviceUse(
                busy_share=busy,
                waiting_share=waiting,
                peak_memory_bytes=int(nbytes),
                kept=KeptBytes(*map(int, kept)),
            )
            for busy, waiting, nbytes, *kept in rows
        )

    def _my_part(self, batch: TokenBatch) -> list[Tensor]:
        """This rank's samples, on the device; no rows if it has none."""
        mine = self.model.plan.sample_indices(self.model.position, batch.num_samples)
        # Copies that are contiguous: losses on strided indices cost 1 % of a step.
        arrays = [torch.from_numpy(array[mine]) for array in batch.arrays]
        return [to_device(array, self._device) for array in arrays]
