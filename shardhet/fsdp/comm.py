"""Streams, channels and buffers that all units of one HetFSDP share.

Streams follow FSDP2's design.  On CPU they are torch's stand-ins, which do nothing, so that
one code path serves both.
"""

from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardhet.comm.buffers import BufferPool, host_empty
from shardhet.comm.channel import Channel
from shardhet.comm.messages import Pending

MAX_UNSENT_GATHERS = 4


class CommContext:
    """What the units need in order to talk to other ranks."""

    def __init__(
        self, device: torch.device, gather_channel: Channel, reduce_channel: Channel
    ) -> None:
        self.device = device
        self.gather_channel = gather_channel
        self.reduce_channel = reduce_channel
        self._handle = torch.get_device_module(device)
        if device.index not in (None, self._handle.current_device()) and device.type != "cpu":
            raise ValueError(
                f"the model is on {device} but the current device is "
                f"{self._handle.current_device()}. Call torch.cuda.set_device({device.index}) "
                f"before init_process_group."
            )
        high_priority = -1  # or the small copies in and out are queued behind compute
        # The gather of the next unit overlaps the compute of the current one.
        self.all_gather_stream = self._handle.Stream(priority=high_priority)
        # The reduction of one unit overlaps the backward of the next.
        self.reduce_scatter_stream = self._handle.Stream(priority=high_priority)
        # On the compute stream, after the last use of unsharded memory that was freed and
        # after the optimizer's writes; the gather stream waits for it before it writes.
        self.compute_event = self._handle.Event()
        # Who computes in this step: they receive parameters and contribute gradients.
        self.receivers: tuple[int, ...] = ()
        transport = gather_channel.transport
        # What peers are to read lies where they can, or it would have to be copied there.
        self._allocate = host_empty if transport is None else transport.empty
        self.buffers = BufferPool(self._allocate)
        self._unsent: deque[Pending] = deque()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], arbitrary content, on the device and where peers can read it."""
        if self.device.type == "cpu":
            return self._allocate(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    @property
    def is_receiver(self) -> bool:
        """Whether this rank computes in this step."""
        return self.gather_channel.position in self.receivers

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` the current one inside the context."""
        context: AbstractContextManager[Any] = self._handle.stream(stream)
        return context

    def current_stream(self) -> Any:
        """The stream that the caller computes on."""
        return self._handle.current_stream()

    def record_event(self, stream: Any) -> Any:
        """An event after all that ``stream`` was given so far."""
        event = self._handle.Event()
        event.record(stream)
        return event

    def mark_device_time(self) -> Any:
        """A timed event after all that the compute stream was given so far."""
        event = self._handle.Event(enable_timing=True)
        event.record(self.current_stream())
        return event

    def mark_compute(self) -> None:
        """Let gathers launched from now on wait for all that was given to compute so far."""
        self.compute_event = self.record_event(self.current_stream())

    def keep_until_sent(self, gather: Pending) -> None:
        """Hold a gather whose peers may still be taking this rank's shard.

        A few may be outstanding, so that a fast rank is not held up by a slow receiver; each
        may hold a copy of the shard in the travelling dtype, so not more.
        """
        self._unsent.append(gather)
        while self._unsent and (
            len(self._unsent) > MAX_UNSENT_GATHERS or self._unsent[0].is_sent()
        ):
            self._let_go_of_oldest()

    def wait_all_sent(self) -> None:
        """Until no peer reads this rank's shards any more, so the optimizer may write them."""
        while self._unsent:
            self._let_go_of_oldest()
        # The optimizer writes the shards on the compute stream.
        self.current_stream().wait_event(self.record_event(self.all_gather_stream))

    def _let_go_of_oldest(self) -> None:
        # A copy of the shard was allocated on the gather stream, so that is where the caching
        # allocator hands it out again as soon as it is freed: that stream waits for the
        # transport to have read it, not the compute stream, which never sees the copy.
        with self.on_stream(self.all_gather_stream):
            self._unsent.popleft().wait_sent()
