"""Processes that are forks of this one, which has imported every package but started no thread.

An import of transformers takes seconds, a fork milliseconds; and a case that goes wrong takes
nothing with it but its own forks.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Collection
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from experiments.common.launch import GROUP_TIMEOUT, answers, started
from experiments.common.results import console
from experiments.other_peoples_models.records import Family

torch.set_num_threads(1)  # a fork of a process with threads may hang
GRACE_S = 30.0  # for the other ranks, after one has ended
_FORKS = multiprocessing.get_context("fork")


def import_for(families: Collection[Family]) -> None:
    """The packages of these families, and each model class on the way."""
    import torch._dynamo
    import torch.distributed.tensor

    import shardhet.fsdp

    assert torch.distributed.tensor
    assert torch._dynamo
    assert shardhet.fsdp
    if any(family.source == "transformers" for family in families):
        import_module("transformers")
        import_module("peft")
    for family in families:
        try:
            family.make()
        except ImportError as error:
            console.print(f"{family.name}: {error}", markup=False)


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
    results: list[Any] = [None] * world_size
    with tempfile.TemporaryDirectory() as folder:
        args_by_rank = [
            (rank, world_size, folder, fn, args, stays) for rank in range(world_size)
        ]
        with started(_FORKS, _run, args_by_rank, grace_s=0.0) as processes:
            receivers = [receiver for _, receiver in processes]
            for rank, result in answers(receivers, timeout_s=timeout_s, grace_s=GRACE_S):
                results[rank] = result
    return results


def _run(
    sender: Connection,
    rank: int,
    world_size: int,
    folder: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    stays: Callable[[Any], bool] | None,
) -> None:
    torch.set_num_threads(1)
    if stays is not None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
        )
    result = fn(*args)
    sender.send(result)
    if stays is not None and stays(result):
        time.sleep(GRACE_S)  # killed before that; no rank leaves while a peer talks to it
    os._exit(0)
