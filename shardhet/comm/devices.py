"""Where a tensor lives, and the streams, events and memory counters of its device.

Everything that treats an accelerator differently from the host asks here, so that tests can
put an emulated accelerator in its place (see ``tests/emulation``).
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import dlpack


def of_this_rank() -> torch.device:
    """This rank's accelerator, made the current device; the CPU if there is none.

    It is the current device if the program has chosen another than the first, and else that of
    LOCAL_RANK.  Apple's has no streams, over which units would be gathered.
    """
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "mps":
        return torch.device("cpu")
    chosen, found = torch.accelerator.current_device_index(), torch.accelerator.device_count()
    index = chosen or int(os.environ.get("LOCAL_RANK", "0"))
    if index >= found:
        raise ValueError(
            f"local rank {index}: this process sees {found} {kind.type} devices, from 0 on. "
            f"Start at most {found} ranks per host, or say which device it has (device=)."
        )
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def is_on_host(of: Tensor | torch.device) -> bool:
    """Whether a tensor lives, or a device computes, in the memory of the host."""
    device = of.device if isinstance(of, Tensor) else of
    return device.type == "cpu"


def module_of(device: torch.device) -> Any:
    """The module with the device's streams, events and memory counters, as ``torch.cuda``."""
    return torch.get_device_module(device)


def pin(tensor: Tensor, nbytes: int, device: torch.device) -> Callable[[], None] | None:
    """Lock ``nbytes`` from the start of a host tensor in memory, for copies to ``device``.

    Returns what unlocks them; None if the system refuses.
    """
    if device.type != "cuda":
        return None
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    if runtime is None:
        return None
    if int(runtime.cudaHostRegister(address, nbytes, 0)) != 0:
        _forget_last_error(device)
        return None

    index = torch.cuda.current_device() if device.index is None else device.index

    def unpin() -> None:
        # Whichever thread collects garbage: in others than the one that trains the device is
        # the first, on which CUDA would make a context.
        with torch.cuda.device(index):
            runtime.cudaHostUnregister(address)

    return unpin


def unrecorded(tensor: Tensor) -> Tensor:
    """The same memory, in a tensor that the allocator of its device does not know.

    Of a tensor that it knows torch records that a message of NCCL uses it (``record_stream``).
    Its memory, once freed, is then not given out again before the host has seen the end of
    all messages that were launched until then.  A host that runs ahead does not look at them,
    and would fill the device (pytorch/pytorch, issue 132292).  Whoever frees the memory of what
    is returned has to let the stream that it was allocated on wait for the message.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    # From its start: the allocator of cudaMallocAsync asks for what it has given out.
    known = nothing.set_(tensor.untyped_storage())
    capsule = dlpack.to_dlpack(known)  # type: ignore[attr-defined]  # re-exported by torch
    whole = dlpack.from_dlpack(capsule)
    start = tensor.storage_offset() * tensor.dtype.itemsize
    return whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _forget_last_error(device: torch.device) -> None:
    """Take back the error that the runtime keeps of a call that has failed.

    The next kernel that torch launches from this thread would raise it as its own.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def give_back_cached(device: torch.device) -> None:
    """Return what no tensor uses from the allocator to the driver: libraries may need it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that carries the group's tensors on ``device``.

    That of NCCL is "nccl", however torch talks to it: from 2.15 it has "nccl2", its default,
    and "nccl-lazy" beside the one of before.
    """
    name: str = group._get_backend(device).name()
    return "nccl" if name.startswith("nccl") else name


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group has a backend for tensors on ``device``."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def backends_for(device: torch.device) -> str:
    """What to give ``init_process_group`` so that host and ``device`` can both communicate."""
    if is_on_host(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
