"""A part in a process of its own, under a time limit, whose numbers come as they are made.

A part that fails, runs out of memory, hangs or kills its process leaves what it had measured
by then, and the parts after it a clean device.

    this process  <--rows, then done or failed--  the part  <-->  its ranks, if it has any
                  --after the limit: SIGKILL, and its ranks end with it-->
"""

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from experiments.common.launch import FORKED, SECONDS_TO_LEAVE, SPAWNED, started
from experiments.gpu.results import Recorder, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a part ended."""

    result: Any = None
    failure: str | None = None  # None: it finished
    seconds: float = 0.0

    @property
    def cause(self) -> str:
        """The last line of the failure, which in a traceback is the exception."""
        lines = (self.failure or "").strip().splitlines()
        return lines[-1] if lines else ""


def run_limited(
    fn: Callable[..., Any],
    *args: Any,
    part: str,
    limit_s: float,
    is_cuda: bool,
    on_row: Callable[[Row], None],
    num_beside: int = 0,
) -> Outcome:
    """``fn(*args, record)`` in a fresh process; ``on_row`` gets what it records at once.

    With ``num_beside`` others it takes its part of the cores: on an H200 with 16 cores, losses
    on the CPU that take seconds alone were not ready after a minute, when seven parts used
    all of them.
    """
    start_s = time.monotonic()
    # A driver that was asked anything before a fork, if only how many devices there are, does
    # not work after it, and nobody promises that imports ask nothing.
    context = SPAWNED if is_cuda else FORKED
    # A rehearsal runs beside whatever the machine is doing.
    num_threads = max(1, (os.cpu_count() or 1) // (1 + num_beside)) if is_cuda else 1
    arguments = (fn, args, part, num_threads)
    processes = started(context, _work, [arguments], grace_s=SECONDS_TO_LEAVE)
    with processes as [(process, receiver)]:
        kind, value = "row", None
        try:
            while kind == "row":
                left_s = limit_s - (time.monotonic() - start_s)
                if left_s <= 0 or not receiver.poll(left_s):
                    kind, value = (
                        "failed",
                        f"not finished after {limit_s:.0f} s, so it was ended.",
                    )
                    break
                kind, value = receiver.recv()
                if kind == "row":
                    on_row(value)
        except (EOFError, OSError):
            process.join(SECONDS_TO_LEAVE)
            code = process.exitcode
            kind, value = "failed", f"its process ended with exit code {code} and no message."
    seconds = time.monotonic() - start_s
    if kind == "failed":
        return Outcome(failure=value, seconds=seconds)
    return Outcome(result=value, seconds=seconds)


def _work(
    sender: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    part: str,
    num_threads: int,
) -> None:
    torch.set_num_threads(num_threads)
    try:
        result = fn(*args, Recorder(part, lambda row: sender.send(("row", row))))
        sender.send(("done", result))
    except BaseException:
        sender.send(("failed", traceback.format_exc()))
