"""Numbers on their way between host and device, while both go on with their work."""

import torch
from torch import Tensor


class HostCopy:
    """A tensor of the device, on the host as soon as the device has made it.

    norm = HostCopy(model.clip_grad_norm_(1.0))
    optimizer.step()                    # the device has this to do ...
    print(norm.read())                  # ... while the host waits for what came before
    """

    def __init__(self, tensor: Tensor) -> None:
        """Copy what ``tensor`` will hold when the current stream has come here."""
        # Into pinned memory, or the host would wait here.
        self._copy = tensor.detach().to("cpu", non_blocking=True)
        self._copied_event = torch.get_device_module(tensor.device).Event()
        self._copied_event.record()

    def read(self) -> Tensor:
        """The values.  The host waits until the device has got to the copy, no further."""
        self._copied_event.synchronize()
        return self._copy


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` of the host on ``device``, in the order of its current stream.

    From ordinary memory the host would wait until the device has done all it was given.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
