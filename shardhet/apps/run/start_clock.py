"""Times a restart: from the start of this process to the end of its first step."""

import os
import time
from pathlib import Path

START_FIELD = 19  # of /proc/self/stat after the name of the command: proc(5), starttime


class StartClock:
    """Measures the parts of a start, one after the other."""

    def __init__(self) -> None:
        """The part that ends now is the start of the interpreter, and imports."""
        self._last_s = time.monotonic()
        self._parts_s = {"start the process": process_age_s()}

    def end(self, part: str) -> None:
        """``part`` has taken the time since the part before."""
        now_s = time.monotonic()
        self._parts_s[part] = now_s - self._last_s
        self._last_s = now_s

    @property
    def total_s(self) -> float:
        """Seconds since the process was started."""
        return sum(self._parts_s.values())

    @property
    def text(self) -> str:
        """``9.8 s: 4.0 to start the process, 2.1 to join the others``."""
        parts = ", ".join(f"{value:.1f} to {name}" for name, value in self._parts_s.items())
        return f"{self.total_s:.1f} s: {parts}"

    @property
    def values(self) -> dict[str, float]:
        """Seconds by name, as metrics."""
        parts = {f"went_on/{name.replace(' ', '_')}_s": s for name, s in self._parts_s.items()}
        return {"went_on/total_s": self.total_s, **parts}


def process_age_s() -> float:
    """Seconds since the system started this process; 0 where it does not say."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    started = int(stat.rpartition(")")[2].split()[START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
