"""Many ranks on a small machine: forks of one server that has imported torch already.

Sixty-four processes that import torch one by one take minutes on two cores, and a third of a
gibibyte each.  Forks start in milliseconds and share the pages of what was imported.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

Result = TypeVar("Result")

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)
PRELOADED = ["torch.distributed.tensor", "torch._dynamo", "experiments.common", "shardhet.fsdp"]

_CONTEXT = multiprocessing.get_context("forkserver")


def run_many_ranks(fn: Callable[..., Result], world_size: int, *args: Any) -> Result:
    """``fn(rank, *args)`` on every rank of a fresh gloo world; what rank zero returned.

    ``fn`` must be a module-level function.  Raises ``RuntimeError`` with the traceback of a
    rank that failed.
    """
    _CONTEXT.set_forkserver_preload(PRELOADED)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        _CONTEXT.Process(
            target=_run_rank, args=(fn, rank, world_size, store.port, sender, args), daemon=True
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    try:
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()  # ours; the end of file then tells when the rank is gone
        return _first_result([receiver for receiver, _ in pipes])
    finally:
        for process in ranks:
            if process.pid is not None:
                process.join(5)
                process.kill()


def _first_result(receivers: list[Connection]) -> Any:
    results = {}
    while len(results) < len(receivers):
        waiting = [each for i, each in enumerate(receivers) if i not in results]
        for receiver in wait(waiting):
            rank = receivers.index(receiver)
            try:
                result, failure = receivers[rank].recv()
            except EOFError:
                result, failure = None, "it ended without a message."
            if failure is not None:
                raise RuntimeError(f"rank {rank} of {len(receivers)}: {failure}")
            results[rank] = result
    return results[0]


def _run_rank(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store_port: int,
    sender: Connection,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        store = TCPStore(HOST, store_port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        result = fn(rank, *args)
        dist.barrier()  # nobody leaves while a peer still talks to it
        sender.send((result if rank == 0 else None, None))
        dist.destroy_process_group()
    except BaseException:
        sender.send((None, traceback.format_exc()))
