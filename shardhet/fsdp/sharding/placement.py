"""A rank's rows of a flat tensor in the memory of its host (``RankPlan.optimizer_on_host``).

    tensor             where    alive                       written by        read by
    flat_shard         host     always                      optimizer (host)  copy to the device
    sent               device   always                      copy to device    gather
    reduced part       device   reduce .. two copies later  reduce            copy to the host
    gradient's rows    host     always                      copy to the host  optimizer (host)

    copy to the device       waits for compute_event: earlier gathers that read ``sent``
    gather                   waits for the copy of its own rows (RowsOnHost.wait_on)
    optimizer                waits for all copies that read its rows (CommContext.wait_all_sent)
    copy to the host         waits for its reduction
    host before it reads     waits for the copy (GradientOnHost.take)
    compute before it frees  waits for the copy (CopyLane.hold)

What is gathered in another dtype is cast on the device: processors would take longer for it
than for the optimizer's step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardhet.comm.lanes import Copy
from shardhet.fsdp.sharding.comm import CommContext

MAX_PLACES = 2  # for a gradient on the host: one that is kept, and one to add to it


class RowsOnHost:
    """This rank's rows of a flat tensor in the memory of the host."""

    def __init__(
        self, numel: int, dtype: torch.dtype, sent_dtype: torch.dtype, *, comm: CommContext
    ) -> None:
        self.shard = comm.host_memory.empty(numel, dtype)
        self.sent = comm.empty(numel, sent_dtype)
        self._comm = comm
        self._copy: Copy | None = None
        self._num_changes = -1  # of rows, when they were copied last

    def copy_to_device(self) -> None:
        """Launch the copy, once after each change."""
        comm, shard, sent = self._comm, self.shard, self.sent
        if self._num_changes == comm.num_changes_of_rows or not shard.numel():
            return
        self._num_changes = comm.num_changes_of_rows

        def make() -> None:
            if sent.dtype == shard.dtype:
                sent.copy_(shard, non_blocking=True)
            else:
                sent.copy_(shard.to(sent.device, non_blocking=True))

        nbytes = shard.numel() * shard.dtype.itemsize
        self._copy = comm.to_device.launch(
            make, after=comm.compute_event, writes=[sent], nbytes=nbytes
        )

    def wait_on(self, stream: Any) -> None:
        """Let ``stream`` wait until the device has the rows."""
        if self._copy is not None:
            self._copy.wait_on(stream)

    def on_device(self) -> Tensor:
        """A copy of the rows."""
        shard = self.shard
        return self._comm.empty(shard.numel(), shard.dtype).copy_(shard)

    def gradient(self, reduce_dtype: torch.dtype) -> "GradientOnHost":
        """Where the gradient's rows go after their reduction."""
        numel, dtype = self.shard.numel(), self.shard.dtype
        return GradientOnHost(numel, comm=self._comm, dtype=dtype, reduce_dtype=reduce_dtype)


class GradientOnHost:
    """This rank's rows of the gradient of a flat tensor, from the end of each reduction on."""

    def __init__(
        self, numel: int, *, comm: CommContext, dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> None:
        self._numel = numel
        self._comm = comm
        self._dtype = dtype  # of the rows
        self._reduce_dtype = reduce_dtype
        self._places: list[tuple[Tensor, int]] = []  # pinned, and its uses by this object alone
        self._is_short = False  # of places
        self._total: Tensor | None = None  # of the rounds so far
        self._copy: Copy | None = None
        self._add_place()

    def add(
        self, reduced: Tensor, *, after: Any, stream: Any, drop: Callable[[], None]
    ) -> None:
        """Launch the copy of what was reduced once ``after`` is reached; add it to the total.

        ``reduced`` is of the pool of ``stream``; ``drop`` gives its memory back.
        """
        comm, is_first = self._comm, self._total is None
        if self._total is None:
            self._total = self._empty()
        total, device = self._total, reduced.device
        if not reduced.numel():
            return

        def make() -> None:
            if is_first:
                total.copy_(reduced.to(total.dtype), non_blocking=True)
            else:  # added on the device: the host need not wait for it, and would take longer
                reduced.add_(total.to(device, non_blocking=True))
                total.copy_(reduced, non_blocking=True)

        nbytes = reduced.numel() * total.dtype.itemsize * (1 if is_first else 2)
        self._copy = comm.to_host.launch(
            make, after=after, writes=[total] if is_first else [], nbytes=nbytes
        )
        comm.to_host.hold(self._copy, stream, drop)

    def _add_place(self) -> None:
        wider = max(self._dtype, self._reduce_dtype, key=lambda each: each.itemsize)
        place = self._comm.host_memory.empty(self._numel, wider)
        self._places.append((place, num_uses(place)))

    def _empty(self) -> Tensor:
        """Memory for the total, in the dtype of the sums while rounds are added up."""
        dtype = self._dtype if self._comm.num_rounds == 1 else self._reduce_dtype
        for place, num in self._places:
            if num_uses(place) == num:
                return place.view(dtype)[: self._numel]
        # Someone keeps the gradients of a step before, which are added to.  Not pinned: that
        # takes long, and may never end while a collective is running.
        self._is_short = True
        return torch.empty(self._numel, dtype=dtype)

    def multiply(self, factor: float) -> None:
        """Multiply the total so far."""
        if self._total is not None:
            self._wait()
            self._total.mul_(factor)

    def take(self) -> Tensor | None:
        """The total, which the host may read; the next one begins."""
        if self._total is not None:
            self._wait()
        if self._is_short and len(self._places) < MAX_PLACES:
            self._add_place()  # the step's collectives are launched, and end without this host
        self._is_short = False
        total, self._total = self._total, None
        return total

    def drop(self) -> None:
        """Forget the total; what is still being copied comes before the next copies."""
        self._total = self._copy = None
        self._is_short = False

    def _wait(self) -> None:
        if self._copy is not None:
            self._copy.wait()
            self._copy = None
            self._comm.to_host.release()


def num_uses(tensor: Tensor) -> int:
    """How many tensors share the memory of this one, and a constant."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses
