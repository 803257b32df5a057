"""Tracer: records chosen steps with torch.profiler, one file per rank, for Perfetto.

The trace shows the runtime's computations and waits by name, as "forward blocks.2 [1]" (unit,
microbatch) or "wait_gather blocks.3".
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shardhet.config.train import TraceConf
from shardhet.fsdp import HetFSDP
from shardhet.training.emulation import HostMemory

POSITION, NUM_STEPS = "shardhet_position", "shardhet_num_steps"  # keys of a trace file


class Tracer:
    """Records the steps that ``conf`` names; call it before and after every step."""

    def __init__(
        self, conf: TraceConf, model: HetFSDP, path: Path, host_memory: HostMemory
    ) -> None:
        self._first_step = conf.first_step
        self._last_step = conf.first_step + conf.num_steps - 1
        self._model = model
        self._path = path
        self._profile: Any = None
        self._memory = host_memory

    def before_step(self, step: int) -> None:
        """Start recording at the first of the steps."""
        if step != self._first_step:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._memory.begin()
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it says where it starts and stops
        self._profile = profile(activities=activities)
        self._profile.start()
        self._profile.add_metadata_json(POSITION, str(self._model.position))
        self._profile.add_metadata_json(NUM_STEPS, str(self._last_step - self._first_step + 1))
        self._model.name_in_trace(is_traced=True)

    def after_step(self, step: int) -> bool:
        """Write the file after the last of the steps; returns whether it did."""
        if step != self._last_step or self._profile is None:
            return False
        self._model.name_in_trace(is_traced=False)
        self._profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._path))
        self._profile = None
        self._memory.end()
        return True
