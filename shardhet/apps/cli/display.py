"""What rank zero shows of a run: its plan, then lines."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from shardhet.apps.cli.streamed import say
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan
from shardhet.training.peak_memory import DeviceUse
from shardhet.training.trainer import StepMetrics

NUM_STEPS_IN_MEAN = 20  # for the mean step time, which gives throughput and remaining time


class Display:
    """Shows a run in progress."""

    def __init__(self, *, num_steps: int, log_every: int, console: Console) -> None:
        self._num_steps = num_steps
        self._log_every = log_every
        self._step_times_s: deque[float] = deque(maxlen=NUM_STEPS_IN_MEAN)
        self.console = console

    def show_step(self, metrics: StepMetrics) -> None:
        """Print a line every ``log_every`` steps."""
        self._step_times_s.append(metrics.step_time_s)
        if metrics.step % self._log_every == 0 or metrics.step == self._num_steps:
            self.console.print(self._line(metrics), soft_wrap=True)

    def show_devices(self, uses: Sequence[DeviceUse]) -> None:
        """Print one line for all devices."""
        shares = "   ".join(
            f"{i}: {use.busy_share:.0%} busy {use.waiting_share:.0%} waiting"
            for i, use in enumerate(uses)
        )
        self.console.print(f"  devices   {shares}", soft_wrap=True)

    def show_remark(self, text: str) -> None:
        """Print something that happens seldom."""
        self.console.print(text, style="bold", markup=False, soft_wrap=True)

    def show_score(self, step: int, name: str, score: float) -> None:
        """Show how well the model does on held-out samples."""
        text = f"step {step:5d}   held-out {score:.3f} {name}"
        self.console.print(text, style="bold", soft_wrap=True)

    def _line(self, metrics: StepMetrics) -> str:
        loss = "none" if metrics.mean_loss is None else f"{metrics.mean_loss:.4f}"
        return (
            f"step {metrics.step:5d} of {self._num_steps}   loss {loss}   "
            f"grad norm {metrics.grad_norm:.2f}   lr {metrics.learning_rate:.2e}   "
            f"{metrics.num_targets / self._step_time_s():,.0f} tokens/s   "
            f"{1000 * self._step_time_s():.0f} ms/step   {self._time_left(metrics.step)} left"
        )

    def _step_time_s(self) -> float:
        return sum(self._step_times_s) / len(self._step_times_s)

    def _time_left(self, step: int) -> str:
        minutes, seconds = divmod(round((self._num_steps - step) * self._step_time_s()), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def show_plan(plan: Plan, devices: Sequence[DeviceSpec], console: Console) -> None:
    """Print what each of the ``devices``, as found, computes and stores."""
    ranks = zip(plan.ranks, devices, strict=True)
    found = tuple(replace(rank, device=device) for rank, device in ranks)
    say(console, str(replace(plan, ranks=found)))


def device_name(position: int, device: DeviceSpec) -> str:
    """The name of a device in all output of a run: ``1 Tesla T4``."""
    return f"{position} {device.kind or 'device'}"
