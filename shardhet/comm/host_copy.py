"""Copies between host and device that neither has to wait for."""

import torch
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.failure import LostPeerError
from shardhet.comm.progress import progress


class HostCopy:
    """An asynchronous host copy of a device tensor, ready once the device has computed it.

    norm = HostCopy(model.clip_grad_norm_(1.0))
    optimizer.step()                    # the device works on this ...
    print(norm.read())                  # ... while the host waits only for what came before
    """

    def __init__(self, tensor: Tensor) -> None:
        """Copy the value that ``tensor`` has at this point of the current stream."""
        # The copy goes to pinned memory; otherwise the host would wait here.
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._copied_event = devices.module_of(tensor.device).Event()
        self._copied_event.record()
        self.value: Tensor | None = None  # once it was read

    def read(self) -> Tensor:
        """Return the values.  The host waits until the device has made the copy, no longer.

        Raises ``LostPeerError`` if the run has ended meanwhile: a communicator that is aborted
        lets the device go on, with whatever is in its buffers.
        """
        self._copied_event.synchronize()
        if progress.failure is not None:
            raise LostPeerError(progress.failure.message)
        self.value = self._copy
        return self._copy


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the host tensor ``tensor`` to ``device``, in the order of its current stream.

    The copy is made from pinned memory: with pageable memory, the host would wait until the
    device has finished all queued work.
    """
    if devices.is_on_host(device):
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
