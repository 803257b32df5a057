"""Puts an emulated accelerator into this process, for good: every rank of a program has one.

``sitecustomize.py`` with ``import tests.emulated.everywhere`` on the path of all processes.
"""

import socket
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from shardhet.apps.launch import joining
from shardhet.comm import devices
from shardhet.comm.calls import wants_gloo
from shardhet.profiler import describe
from shardhet.records.cluster import Cluster
from tests.emulated.accelerator import Accelerator

_stack = ExitStack()
accelerator = Accelerator()


def _choose_device(*_: Any) -> torch.device:
    """In place of the choice of a GPU; the ranks of a program, not those that start them."""
    _stack.enter_context(accelerator.installed())
    return accelerator.device


_init_process_group = dist.init_process_group


def _init(backends: str | None = None) -> None:
    if backends is None:  # a program of one's own
        _choose_device()
    else:
        assert backends == ("gloo" if wants_gloo() else "cpu:gloo,cuda:nccl")
    _init_process_group("gloo")


def _cluster_here() -> Cluster:
    kind = {
        "kind": "emulated",
        "source": "made up",
        "memory_capacity_bytes": "16 GiB",
        "memory_bandwidth_bytes_per_s": "1 GB/s",
        "peak_flops_per_s": {"float32": "10 GFLOP/s"},
    }
    host = {
        "host": socket.gethostname(),
        "devices": [{"kind": "emulated", "count": dist.get_world_size()}],
    }
    document = {"version": 1, "nodes": [host], "kinds": [kind]}
    return Cluster.from_document(document, source="here")


describe.cluster_here = _cluster_here
joining.choose_device = _choose_device
dist.init_process_group = _init  # type: ignore[assignment]
devices.backends_for = lambda _device: "cpu:gloo,cuda:nccl"
