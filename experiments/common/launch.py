"""Processes that answer: ranks of a gloo world on this machine, and others."""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

Result = TypeVar("Result")

GROUP_TIMEOUT = timedelta(minutes=5)
HOST = "127.0.0.1"
SECONDS_TO_LEAVE = 5.0  # for a process that has answered
PR_SET_PDEATHSIG = 1  # prctl(2)

SPAWNED = multiprocessing.get_context("spawn")
# Forks of one server that has imported torch.  Sixty-four processes that import it one by one
# take minutes on two cores, and a third of a gibibyte each; forks start in milliseconds and
# share the pages of what was imported.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch._dynamo", "experiments.common.launch", "shardhet.fsdp"]
)


def run_ranks(
    fn: Callable[..., Result], world_size: int, *args: Any, context: BaseContext = SPAWNED
) -> list[Result]:
    """``fn(rank, *args)`` of every rank of a fresh gloo world with one thread a rank.

    ``fn`` must be a module-level function.
    Raises ``RuntimeError`` with the traceback of the first rank to fail.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    join_world = partial(join, store.port, world_size)
    return start_ranks(context, join_world, fn, world_size, *args)


def join(port: int, world_size: int, rank: int) -> None:
    """Open the gloo group of a world whose store listens at ``port`` of this machine."""
    store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )


def start_ranks(
    context: BaseContext,
    join: Callable[[int], None],
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
) -> list[Result]:
    """As ``run_ranks``; ``join(rank)`` opens the group."""
    args_by_rank = [(rank, join, fn, args) for rank in range(world_size)]
    results: list[Any] = [None] * world_size
    with started(context, _run_rank, args_by_rank, grace_s=SECONDS_TO_LEAVE) as processes:
        for rank, answer in answers([receiver for _, receiver in processes]):
            results[rank], failure = answer or (None, "it ended without a message.")
            if failure is not None:
                raise RuntimeError(f"rank {rank} of {world_size}: {failure}")
    return results


def _run_rank(
    sender: Connection,
    rank: int,
    join: Callable[[int], None],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        join(rank)
        result = fn(rank, *args)
        dist.barrier()  # nobody leaves while a peer still talks to it
        sender.send((result, None))
        dist.destroy_process_group()
    except BaseException:
        sender.send((None, traceback.format_exc()))


# Any processes


@contextmanager
def started(
    context: BaseContext,
    fn: Callable[..., None],
    args_by_process: Sequence[tuple[Any, ...]],
    *,
    grace_s: float,
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Processes that call ``fn(sender, *args)``, each with the end where its messages arrive.

    They are killed on leaving, after ``grace_s`` seconds to end by themselves.
    """
    pipes = [context.Pipe(duplex=False) for _ in args_by_process]
    processes = [
        context.Process(target=_begin, args=(fn, sender, args))  # type: ignore[attr-defined]
        for (_, sender), args in zip(pipes, args_by_process, strict=True)
    ]
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()  # ours; the end of file then tells when the process is gone
        yield [(each, receiver) for each, (receiver, _) in zip(processes, pipes, strict=True)]
    finally:
        for process in processes:
            if process.pid is not None:
                process.join(grace_s)
                process.kill()
                process.join()


def answers(
    receivers: Sequence[Connection], *, timeout_s: float | None = None, grace_s: float = 0.0
) -> Iterator[tuple[int, Any]]:
    """The first message of each process with its number, as they come.

    None of one that ended without.  With ``timeout_s``, whoever takes longer is left out, and
    so is who takes ``grace_s`` longer than another.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = dict(enumerate(receivers))
    while waiting:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready = wait(list(waiting.values()), left_s)
        if not ready:
            return
        for number in [i for i, receiver in waiting.items() if receiver in ready]:
            try:
                message = waiting.pop(number).recv()
            except (EOFError, OSError):
                message = None
            if deadline_s is not None:
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
            yield number, message


def _begin(fn: Callable[..., None], sender: Connection, args: tuple[Any, ...]) -> None:
    _end_with_parent()
    fn(sender, *args)


def _end_with_parent() -> None:
    """Let the system kill this process when who started it is gone, killed or not: it would go
    on computing, beside whatever is measured next.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it was gone before
        os._exit(1)
