"""Copies between a device and the memory of its host, beside compute.

[Note: Copies on the CPU]
Where the device is the CPU, host and device are the same memory, and a copy that nobody waits
for would go unnoticed.  So a copy is made there when it is waited for and not before, and what
it will write is filled with NaN until then.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.channel import progress
from shardhet.comm.failure import LostPeerError

MAX_HELD = 2  # tensors that are kept alive for a copy that reads them


class Copy:
    """A copy in flight."""

    def __init__(self, copy_stream: "CopyStream", event: Any) -> None:
        self._lane = copy_stream
        self._event = event  # after it, on an accelerator

    def wait_on(self, stream: Any) -> None:
        """Let ``stream`` wait until the copy has been made; on the CPU, the host does."""
        if self._event is None:
            self._lane.make_up_to(self)
        else:
            stream.wait_event(self._event)

    def wait(self) -> None:
        """Let the host wait until the copy has been made.

        Raises ``LostPeerError`` if the run has ended meanwhile: a communicator that is aborted
        lets the device go on, with whatever is in its buffers.
        """
        if self._event is None:
            self._lane.make_up_to(self)
            return
        self._event.synchronize()
        if progress.failure is not None:
            raise LostPeerError(progress.failure.message)


class CopyStream:
    """Copies in one direction, one after the other, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.num_copies = self.num_bytes = 0
        self._handle = devices.module_of(device)
        self._stream = self._handle.Stream(priority=-1)
        self._is_put_off = devices.is_on_host(device)  # see [Note: Copies on the CPU]
        self._put_off: deque[tuple[Copy, Callable[[], None]]] = deque()
        self._last: Copy | None = None
        self._held: deque[tuple[Copy, Any, Callable[[], None]]] = deque()

    def launch(
        self, make: Callable[[], None], *, after: Any, writes: Sequence[Tensor], nbytes: int
    ) -> Copy:
        """Launch the copies that ``make`` makes, of ``nbytes``, once ``after`` is reached.

        ``writes`` are the tensors of which nothing is kept.
        """
        self.num_copies += 1
        self.num_bytes += nbytes
        if self._is_put_off:
            for tensor in writes:
                tensor.fill_(torch.nan)
            copy = Copy(self, None)
            self._put_off.append((copy, make))
        else:
            with self._handle.stream(self._stream):
                self._stream.wait_event(after)
                make()
                event = self._handle.Event()
                event.record(self._stream)
            copy = Copy(self, event)
        self._last = copy
        return copy

    def hold(self, copy: Copy, stream: Any, drop: Callable[[], None]) -> None:
        """Call ``drop``, which frees what ``copy`` reads, some copies later.

        ``stream``, of which the memory was allocated, waits for the copy before that.
        """
        self._held.append((copy, stream, drop))
        self.release(MAX_HELD)

    def wait_all(self) -> None:
        """Let the host wait until all copies have been made."""
        if self._last is not None:
            self._last.wait()
            self._last = None
        self.release()

    def make_up_to(self, copy: Copy) -> None:
        """On the CPU, make the copies that were launched up to this one."""
        with torch.no_grad():  # as when it was launched
            while self._put_off and any(each is copy for each, _ in self._put_off):
                self._put_off.popleft()[1]()

    def release(self, keeping: int = 0) -> None:
        """Free what copies read, but for the last ones."""
        while len(self._held) > keeping:
            copy, stream, drop = self._held.popleft()
            copy.wait_on(stream)
            drop()
