"""A part in a process of its own, under a time limit, whose numbers come as they are made.

A part that fails, runs out of memory, hangs or kills its process leaves what it had measured
by then, and the parts after it a clean device.

    this process  <--rows, then done or failed--  the part  <-->  its ranks, if it has any
                  --after the limit: SIGKILL to the part's whole process group-->
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from experiments.gpu.results import Recorder, Row

SECONDS_TO_LEAVE = 5.0  # for a process that has delivered everything


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
) -> Outcome:
    """``fn(*args, record)`` in a fresh process; ``on_row`` gets what it records at once."""
    start_s = time.monotonic()
    context = _context(is_cuda=is_cuda)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(fn, args, part, sender), name=part)
    process.start()
    sender.close()  # ours; the end of file then tells when the process is gone
    result, failure = None, None
    try:
        while True:
            left_s = limit_s - (time.monotonic() - start_s)
            if left_s <= 0 or not receiver.poll(left_s):
                failure = f"not finished after {limit_s:.0f} s, so it was ended."
                break
            kind, value = receiver.recv()
            if kind == "row":
                on_row(value)
                continue
            result, failure = (value, None) if kind == "done" else (None, value)
            break
    except (EOFError, OSError):
        process.join(SECONDS_TO_LEAVE)
        failure = f"its process ended with exit code {process.exitcode} and no message."
    finally:
        _end(process, is_over=failure is None)
    return Outcome(result=result, failure=failure, seconds=time.monotonic() - start_s)


def _context(*, is_cuda: bool) -> Any:  # of multiprocessing; their classes differ
    if is_cuda:
        # A driver that was asked anything before a fork, if only how many devices there are,
        # does not work after it, and nobody promises that imports ask nothing.
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "experiments.common"])
    return context


def _end(process: BaseProcess, *, is_over: bool) -> None:
    if is_over:
        process.join(SECONDS_TO_LEAVE)
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too, if any are left
    process.kill()  # if it had no time to open its group
    process.join()


def _work(fn: Callable[..., Any], args: tuple[Any, ...], part: str, sender: Connection) -> None:
    os.setsid()  # a process group of its own, which can be killed as a whole
    try:
        result = fn(*args, Recorder(part, lambda row: sender.send(("row", row))))
        sender.send(("done", result))
    except BaseException:
        sender.send(("failed", traceback.format_exc()))
