"""Budgets of devices that were out of memory, with which a run plans again.

A rank that is out of memory writes what its device is planned for from now on into the run
folder, and ends, which ends all ranks.  Whoever has started them, torchrun or ``shardhet
train``, starts them again.  Each then reads the limit of its own device, and all plan with all
limits.
"""

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from shardhet.apps.launch.run_folder import RunFolder, write_whole
from shardhet.comm.channel import progress
from shardhet.comm.peers import Shortage, is_out_of_memory
from shardhet.records.cluster import DeviceSpec
from shardhet.training.emulation import HostMemory
from shardhet.training.hooks.hooks import Hook
from shardhet.training.peak_memory import PeakMemory

logger = logging.getLogger(__name__)


class PlansAgainError(RuntimeError):
    """This rank was out of memory, and its device has a lower budget at the next start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What a device is planned for after it was out of memory, and why."""

    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class OwnMemoryLimit:
    """The limit of one rank's device in the run folder, whatever its rank at other starts."""

    folder: RunFolder
    device: DeviceSpec
    local_rank: int

    @property
    def path(self) -> Path:
        """Of the card, if the driver names it, or of the device of this number on its host."""
        device = self.device
        name = device.uuid or f"{device.host} {self.local_rank} {device.kind}"
        return self.folder.memory_limits_dir / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}.json"

    def read(self) -> MemoryLimit | None:
        """The limit, if the device was out of memory before."""
        if not self.path.exists():
            return None
        return MemoryLimit(**json.loads(self.path.read_text(encoding="utf-8")))


class LowersLimit(Hook):
    """Lowers the limit of a device whose memory does not suffice for a step."""

    def __init__(self, limit: OwnMemoryLimit, rank: int, peak_memory: PeakMemory) -> None:
        """``rank`` is told."""
        self._limit, self._rank, self._peak_memory = limit, rank, peak_memory

    def end(self, error: BaseException | None) -> None:
        """Raise ``PlansAgainError`` if the run ends because of memory."""
        if error is None or not is_out_of_memory(error):
            return
        shortage, doing = Shortage.of(error, self._peak_memory.read()), progress.doing
        HostMemory(self._peak_memory).begin()  # no emulated device limits what follows
        device, path = self._limit.device, self._limit.path
        why = f"rank {self._rank} ({device}) was out of memory in {doing}, {shortage.text}"
        path.parent.mkdir(parents=True, exist_ok=True)
        limit = MemoryLimit(nbytes=shortage.limit_bytes, why=why)
        write_whole(path, json.dumps(asdict(limit), indent=1) + "\n")
        raise PlansAgainError(why) from error
