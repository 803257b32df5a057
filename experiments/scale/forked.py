"""Many ranks on a small machine: forks of one server that has imported torch already.

Sixty-four processes that import torch one by one take minutes on two cores, and a third of a
gibibyte each.  Forks start in milliseconds and share the pages of what was imported.
"""

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore

from experiments.common import GROUP_TIMEOUT, start_ranks

Result = TypeVar("Result")

HOST = "127.0.0.1"
PRELOADED = ["torch.distributed.tensor", "torch._dynamo", "experiments.common", "shardhet.fsdp"]

_CONTEXT = multiprocessing.get_context("forkserver")


def run_many_ranks(fn: Callable[..., Result], world_size: int, *args: Any) -> list[Result]:
    """As ``run_ranks`` of experiments.common."""
    _CONTEXT.set_forkserver_preload(PRELOADED)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    join = partial(_join_over_tcp, store.port, world_size)
    return start_ranks(_CONTEXT, join, fn, world_size, *args)


def _join_over_tcp(store_port: int, world_size: int, rank: int) -> None:
    store = TCPStore(HOST, store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
