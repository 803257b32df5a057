"""CPU time of processes limited from outside, by Linux control groups of either version.

The kernel lets the processes of a group run for ``cores * PERIOD`` in every period, so any
program is slowed down, whatever it is written in.  It needs the right to make groups, which
root has, and some containers do not; ``find_controller`` says why not.

A quota is an upper bound only.  Two cores shared by 0.9, 0.45, 0.225 and 0.225 of a core gave
the first group 0.74 to 0.79 of a core, because it shared its core in turns with another one
(idle machine, four busy loops).  With weights it got 0.85 to 0.88; with weights and every
process kept on one core, where that can be done, 0.89 to 0.90.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardhet.training.emulation import packed

MOUNTS = Path("/proc/mounts")
PERIOD_US = 10_000  # short beside a step, so that a rank is slow all the time and not in turns
LEAST_QUOTA_US = 1_000  # the kernel's own minimum
WEIGHT_PER_CORE = 4_000  # a quarter of a core weighs as much as any other process
LEAST_WEIGHT = 2
PREFIX = "shardhet_experiment"
SECONDS_TO_LEAVE = 5.0  # for processes that have ended but are still being buried


class NoControlGroupsError(RuntimeError):
    """This process may not limit others; the message says why."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Where groups with a CPU quota can be made."""

    folder: Path
    version: int  # of control groups: 1 or 2

    def make_group(self, name: str, cores: float, *, only_core: int | None = None) -> "Group":
        """A group whose processes together get ``cores`` of a core's time, on any core or on
        one alone.
        """
        quota_us = round(cores * PERIOD_US)
        if quota_us < LEAST_QUOTA_US:
            raise ValueError(
                f"cores: {cores} but at least {LEAST_QUOTA_US / PERIOD_US} can be given. Raise "
                "it, or make the others faster."
            )
        group = Group(self.folder / name, only_core)
        group.folder.mkdir()
        weight = max(LEAST_WEIGHT, round(cores * WEIGHT_PER_CORE))
        if self.version == 2:
            (group.folder / "cpu.weight").write_text(str(weight))
            (group.folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group.folder / "cpu.shares").write_text(str(weight))
            (group.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group.folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        return group


@dataclass(frozen=True, slots=True)
class Group:
    """One control group; it can be sent to the process that is to join it."""

    folder: Path
    only_core: int | None = None

    def join(self) -> None:
        """Put this process and all its threads under the group's quota."""
        self._add(os.getpid())
        if self.only_core is not None:
            _keep_on({self.only_core})

    def leave(self) -> None:
        """Put this process back where it has no quota of ours."""
        Group(self.folder.parent)._add(os.getpid())
        if self.only_core is not None:
            _keep_on(set(range(os.cpu_count() or 1)))

    def remove(self) -> None:
        """Take the group away; processes that are left in it go back to its parent.

        This one may use all cores again; others stay where they were kept.
        """
        if self.folder.exists() and str(os.getpid()) in self._pids():
            self.leave()
        deadline_s = time.monotonic() + SECONDS_TO_LEAVE
        while self.folder.exists():
            for pid in self._pids():
                with suppress(OSError):  # it ends at this moment
                    Group(self.folder.parent)._add(int(pid))
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def _pids(self) -> list[str]:
        return (self.folder / "cgroup.procs").read_text().split()

    def _add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))


@contextmanager
def quotas(cores: Sequence[float]) -> Iterator[list[Group]]:
    """One group per entry, which are gone afterwards.

    Raises ``NoControlGroupsError`` where they cannot be made.
    """
    controller = find_controller()
    _remove_orphans(controller)
    groups: list[Group] = []
    try:
        for i, (each, core) in enumerate(zip(cores, packed(cores), strict=True)):
            name = f"{PREFIX}_{os.getpid()}_{i}"
            groups.append(controller.make_group(name, each, only_core=core))
        yield groups
    finally:
        for group in groups:
            group.remove()


def _keep_on(cores: set[int]) -> None:
    """Let this process's threads run on these cores only."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ends at this moment
            os.sched_setaffinity(int(thread.name), cores)


def find_controller() -> Controller:
    """Where this process may make groups; raises ``NoControlGroupsError`` with the reason."""
    reasons = []
    for controller in _mounted():
        if (reason := _reason_against(controller)) is None:
            return controller
        reasons.append(f"{controller.folder}: {reason}")
    raise NoControlGroupsError(
        "no control group with a CPU quota can be made here ("
        + ("; ".join(reasons) or "none is mounted with the cpu controller")
        + "). Run as root, outside of a container or in a privileged one."
    )


def _mounted() -> list[Controller]:
    found = []
    for line in MOUNTS.read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            found.append(Controller(Path(folder), 1))
        elif kind == "cgroup2" and "cpu" in (Path(folder) / "cgroup.controllers").read_text():
            found.append(Controller(Path(folder), 2))
    return found


def _reason_against(controller: Controller) -> str | None:
    group = Group(controller.folder / f"{PREFIX}_{os.getpid()}_trial")
    try:
        if controller.version == 2:
            (controller.folder / "cgroup.subtree_control").write_text("+cpu")
        try:
            controller.make_group(group.folder.name, 0.5)
        finally:
            group.remove()
    except OSError as error:
        return str(error)
    return None


def _remove_orphans(controller: Controller) -> None:
    """Groups of runs that were killed."""
    for folder in controller.folder.glob(f"{PREFIX}_*"):
        pid = folder.name.removeprefix(f"{PREFIX}_").split("_")[0]
        if not Path(f"/proc/{pid}").exists():
            Group(folder).remove()
