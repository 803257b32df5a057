"""Processes that are forks of this one, which has imported every package but started no thread.

An import of transformers takes seconds, a fork milliseconds; and a case that goes wrong takes
nothing with it but its own forks.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from experiments.common import GROUP_TIMEOUT, _end_with_parent

GRACE_S = 30.0  # for the other ranks, after one has ended
_CONTEXT = multiprocessing.get_context("fork")


def run_forks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float,
    stays: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """``fn(*args)`` of each fork, None of those that died or hung.

    With ``stays`` they are the ranks of a gloo world, and it says whether a rank with that
    result waits for the others; one that has failed leaves at once, as a program would.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store" if stays else None
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _CONTEXT.Process(
                target=_run,
                args=(rank, world_size, store, sender, partial(fn, *args), stays),
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()  # ours; the end of file then tells when the fork is gone
            return _collect([receiver for receiver, _ in pipes], timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(receivers: list[Connection], timeout_s: float) -> list[Any]:
    deadline_s = time.monotonic() + timeout_s
    results: list[Any] = [None] * len(receivers)
    waiting = dict(enumerate(receivers))
    while waiting:
        ready = wait(list(waiting.values()), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, receiver in waiting.items() if receiver in ready]:
            try:
                results[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
            except (EOFError, OSError):
                results[rank] = None
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    return results


def _run(
    rank: int,
    world_size: int,
    store: str | None,
    sender: Connection,
    call: Callable[[], Any],
    stays: Callable[[Any], bool] | None,
) -> None:
    torch.set_num_threads(1)
    _end_with_parent()
    if store is not None:
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
        )
    result = call()
    sender.send_bytes(pickle.dumps(result))
    if stays is not None and stays(result):
        time.sleep(GRACE_S)  # killed before that; no rank leaves while a peer talks to it
    os._exit(0)
