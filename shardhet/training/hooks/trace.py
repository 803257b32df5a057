"""Trace: records chosen steps with torch.profiler, one file per rank, for Perfetto.

The trace shows the runtime's computations and waits by name, as "forward blocks.2 [1]" (unit,
microbatch) or "wait_gather blocks.3".
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shardhet.training.emulation import HostMemory
from shardhet.training.hooks.hooks import Hook, Hooks

POSITION, NUM_STEPS = "shardhet_position", "shardhet_num_steps"  # keys of a trace file


class Trace(Hook):
    """Records steps into ``folder``/rank0.json, rank1.json, ..."""

    def __init__(
        self,
        folder: str | Path,
        *,
        first_step: int = 10,
        num_steps: int = 3,
        host_memory: HostMemory | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """``then`` is called once the file is there.

        ``host_memory`` is that of an emulated device, which is not charged for the events.

        Steps count from 1 over the whole training, as ``model.step`` does.
        """
        self._folder = Path(folder)
        self._first_step = first_step
        self._last_step = first_step + num_steps - 1
        self._memory, self._then = host_memory, then
        self._profile: Any = None

    def begin(self, run: Hooks) -> None:
        self._run = run

    def before_step(self, step: int) -> None:
        if step != self._first_step or self._profile is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        if self._memory is not None:
            self._memory.begin()
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it says where it starts and stops
        self._profile = profile(activities=activities)
        self._profile.start()
        num_steps = self._last_step - self._first_step + 1
        self._profile.add_metadata_json(POSITION, str(self._run.model.position))
        self._profile.add_metadata_json(NUM_STEPS, str(num_steps))
        self._run.model.name_in_trace(is_traced=True)

    def after_step(self, step: int, loss: float | None) -> None:
        if step >= self._last_step and self._profile is not None:
            self._write()

    def end(self, error: BaseException | None) -> None:
        if error is None and self._profile is not None:  # fewer steps than were asked for
            self._write()

    def _write(self) -> None:
        self._run.model.name_in_trace(is_traced=False)
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._run.model.rank}.json"
        self._profile.export_chrome_trace(str(path))
        self._profile = None
        if self._memory is not None:
            self._memory.end()
        self._then()
        self._run.forget_peak_memory()
