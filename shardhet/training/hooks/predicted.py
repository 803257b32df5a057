"""Predicted: how long steps took, beside what was predicted of the plan."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from shardhet.pricing.setting import Setting
from shardhet.training.hooks.hooks import Hook, Hooks
from shardhet.training.rebalancing import Rebalancer
from shardhet.training.slow_devices import places_of, step_seconds

NUM_WARM_UP_STEPS = 3  # first steps, which predictions do not cover


def beside(predicted_s: float, step_times_s: Sequence[float]) -> str:
    """One line that compares step times with the prediction.

    It is their median, without the first steps unless there are no others.
    """
    measured_s = median(step_times_s[NUM_WARM_UP_STEPS:] or step_times_s)
    return (
        f"a step was predicted to take {1000 * predicted_s:.0f} ms and took "
        f"{1000 * measured_s:.0f} ms (median of {len(step_times_s)}): "
        f"{measured_s / predicted_s - 1:+.1%}"
    )


class Predicted(Hook):
    """Says in the end how long a step took, beside what was predicted of it."""

    def __init__(self, setting: Setting | str | Path) -> None:
        """``setting`` is what the plan was made from, or the folder that it was measured in."""
        self._setting = setting if isinstance(setting, Setting) else Setting.load(setting)

    def begin(self, run: Hooks) -> None:
        self._run, self._plan = run, run.model.plan
        self._step_times_s: list[float] = []  # under this plan
        self._setting.check_plan(self._plan, name="setting")

    def before_step(self, step: int) -> None:
        self._began_s = time.perf_counter()

    def after_step(self, step: int, loss: float | None) -> None:
        if self._run.model.plan is not self._plan:
            self._plan, self._step_times_s = self._run.model.plan, []
        self._step_times_s.append(time.perf_counter() - self._began_s)

    def end(self, error: BaseException | None) -> None:
        if error is None and self._step_times_s:
            found = self._run.find(Rebalancer)  # knows at which speeds
            setting = self._setting if found is None else found.setting
            places = places_of(self._plan, self._setting)
            predicted_s = step_seconds(self._plan, setting, places)
            self._run.say(beside(predicted_s, self._step_times_s))
