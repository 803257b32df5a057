"""What a rank logs of a run: steps and devices, beside what was predicted of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from shardhet.apps.run.loggers import MetricsLogger
from shardhet.apps.run.prediction import Outcome, Prediction
from shardhet.comm.channel import progress
from shardhet.training.peak_memory import DeviceUse
from shardhet.training.trainer import StepMetrics


class RunLog:
    """The loggers of a run, and its last step until that is logged."""

    def __init__(self, prediction: Prediction | None, position: int) -> None:
        """``position`` is that of this rank's device in the plan."""
        self.prediction: Prediction | None = None  # of the plan that is followed
        self._position = position
        self.outcome = Outcome()  # under it
        if prediction is not None:
            self.expect(prediction)
        self.pending: StepMetrics | None = None  # a step whose norm has not been read
        self.loggers: Sequence[MetricsLogger] = ()  # on rank zero

    def expect(self, prediction: Prediction) -> None:
        """From now on, a plan is followed of which this was predicted."""
        self.prediction, self.outcome = prediction, Outcome()
        progress.predicted_bytes = prediction.memory[self._position].total_bytes

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log the values of a step by name."""
        for each in self.loggers:
            each.log(step, values)

    def log_pending(self) -> StepMetrics | None:
        """Log the step that has not been yet, and return it, if there is one."""
        metrics, self.pending = self.pending, None
        if metrics is not None:
            self.outcome.step_times_s.append(metrics.step_time_s)
            self._log_step(metrics, metrics.grad_norm)
        return metrics

    def _log_step(self, metrics: StepMetrics, grad_norm: float | None) -> None:
        values = {
            "loss": metrics.mean_loss,
            "grad_norm": grad_norm,
            "lr": metrics.learning_rate,
            "num_tokens": metrics.num_targets,
            "step_time_s": metrics.step_time_s,
        }
        values |= {} if metrics.loss_scale is None else {"loss_scale": metrics.loss_scale}
        if self.prediction is not None:
            values["predicted_step_time_s"] = self.prediction.step_time_s
        self.log(metrics.step, values)

    def log_uses(self, step: int, uses: Sequence[DeviceUse]) -> None:
        """Log what the devices did since the last look."""
        self.outcome.looks.append(uses)
        self.log(step, values_of(uses, self.prediction))

    def roll_back(self, step: int, to_step: int) -> None:
        """Drop what came after ``to_step``; ``step`` is the one that took the run back."""
        for each in self.loggers:
            each.roll_back(to_step)
        self.log(to_step, {"rolled_back_from": step})

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close the loggers in the end; if an error ends the run, with its last step, too.

        The norm of that step is left out unless it was read in time: the device may never have
        it, or something else in its place once communicators are aborted.
        """
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                if self.pending is not None:
                    self._log_step(self.pending, self.pending.known_grad_norm)
                self._close()
            raise
        self._close()

    def _close(self) -> None:
        for each in self.loggers:
            each.close()


def values_of(uses: Sequence[DeviceUse], prediction: Prediction | None) -> dict[str, float]:
    """What devices did, beside what they were predicted to do, by name."""
    values: dict[str, float] = {}
    for i, use in enumerate(uses):
        values[f"device{i}/busy_share"] = use.busy_share
        values[f"device{i}/waiting_share"] = use.waiting_share
        values[f"device{i}/peak_memory_bytes"] = use.peak_memory_bytes
        values[f"device{i}/kept_bytes"] = use.kept.on_device
        values[f"device{i}/host_bytes"] = use.kept.on_host
        if prediction is not None:
            values[f"device{i}/predicted_busy_share"] = prediction.busy_shares[i]
            values[f"device{i}/predicted_memory_bytes"] = prediction.memory[i].total_bytes
            values[f"device{i}/predicted_kept_bytes"] = prediction.memory[i].state_bytes
            values[f"device{i}/predicted_host_bytes"] = prediction.memory[i].host_bytes
    return values
