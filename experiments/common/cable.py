"""Ranks in two networks of one machine, which a cable joins that the system slows."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore

from experiments.common.emulated_link import LATENCY, EmulatedLink, emulated_link
from experiments.common.launch import FORKED, start_ranks
from shardhet.comm.calls import SWITCH

Result = TypeVar("Result")
TIMEOUT_S = 900.0
DEVICE = "CABLE_DEVICE"  # the variable with the name of the cable's device


def run_over_cable(
    fn: Callable[..., Result],
    numbers: tuple[int, int],
    mbit_per_s: float,
    *args: Any,
    latency: str = LATENCY,
) -> list[Result]:
    """``fn(rank, *args)`` of every rank; ``numbers`` of them are at each end of the cable.

    ``mbit_per_s`` holds in each direction, behind a queue of ``latency``.  The two sides share
    no memory.  Raises ``OSError`` if the system lets nobody make networks, and
    ``RuntimeError`` as ``run_ranks`` does.
    """
    world_size = sum(numbers)
    with emulated_link(numbers[0], mbit_per_s, latency) as link:
        store = TCPStore(link.address, 0, is_master=True, wait_for_workers=False)
        reach = partial(_reach, link, store.port, world_size)
        return start_ranks(FORKED, reach, fn, world_size, *args)


def _reach(link: EmulatedLink, port: int, world_size: int, rank: int) -> None:
    """Go to the rank's side of the cable and open the group."""
    link.enter(rank)
    os.environ.update({"GLOO_SOCKET_IFNAME": link.device, SWITCH: "gloo", DEVICE: link.device})
    store = TCPStore(link.address, port, is_master=False, wait_for_workers=False)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )
