"""Puts an emulated accelerator into this process, for good: every rank of a program has one.

``sitecustomize.py`` with ``import tests.emulated.everywhere`` on the path of all processes.
"""

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from shardhet.apps.launch import joining
from shardhet.comm import devices
from shardhet.comm.transport import wants_gloo
from tests.emulated.accelerator import Accelerator

_stack = ExitStack()
accelerator = Accelerator()


def _choose_device(*_: Any) -> torch.device:
    """In place of the choice of a GPU; the ranks of a program, not those that start them."""
    _stack.enter_context(accelerator.installed())
    return accelerator.device


_init_process_group = dist.init_process_group


def _init(backends: str) -> None:
    assert backends == ("gloo" if wants_gloo() else "cpu:gloo,cuda:nccl")
    _init_process_group("gloo")


joining.choose_device = _choose_device
dist.init_process_group = _init  # type: ignore[assignment]
devices.backends_for = lambda _device: "cpu:gloo,cuda:nccl"
