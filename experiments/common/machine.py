"""What a number was measured on."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
# Published files that are not in the repository: cephalo/ and others.
SHARED_DATA = Path(
    os.environ.get("SHARDHET_SHARED_DATA", REPOSITORY.parent / "shared" / "data")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A machine, its load and the versions on it."""

    date: str  # UTC
    commit: str  # with "-dirty" where programs differ from it
    cpu: str
    num_cores: int
    memory_gib: float
    load_before: float  # runnable processes, mean of the minute before: 0 on a quiet machine
    system: str
    python: str
    torch: str

    @classmethod
    def here(cls) -> "Environment":
        """This machine now."""
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            commit=commit_of(REPOSITORY),
            cpu=_cpu_model(),
            num_cores=len(os.sched_getaffinity(0)),
            memory_gib=round(memory_bytes / 2**30, 1),
            load_before=round(os.getloadavg()[0], 2),
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
            torch=version("torch"),
        )

    @property
    def stamp(self) -> dict[str, Any]:
        """For rows of a file whose cases are measured on several days."""
        return {
            "cpu": self.cpu,
            "commit": self.commit,
            "date": self.date,
            "load_before": self.load_before,
        }

    def as_markdown(self, how: str = "") -> str:
        """One line for a README; ``how`` is said where no ranks of torch ran."""
        return (
            f"{self.date}, commit `{self.commit}`; {self.cpu}, {self.num_cores} cores, "
            f"{self.memory_gib} GiB, {self.system}, load before {self.load_before}; "
            f"Python {self.python}, "
            f"{how or f'torch {self.torch}, gloo over loopback, one thread a rank'}."
        )


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    value_by_key = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    name = value_by_key.get("model name", platform.processor() or "unknown CPU")
    family, model = value_by_key.get("cpu family", "?"), value_by_key.get("model", "?")
    return f"{name} (family {family} model {model})"


def commit_of(tree: Path) -> str:
    """The commit of a tree, and whether programs differ from it; "unknown" outside of git."""
    commands = ("rev-parse --short=12 HEAD", "status --porcelain -- *.py *.toml")
    try:
        commit, changed = (
            subprocess.run(
                ["git", *command.split()], cwd=tree, capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit
