"""The gradient of a flat tensor, from the first microbatch of backward to the shard."""

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.comm.calls import Pending
from shardhet.comm.collectives import reduce_scatter_uneven
from shardhet.comm.failure import LostPeerError
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.persistence import GradientOnHost
from shardhet.records.layout import FlatLayout


class GradState(Enum):
    """The state of a flat tensor's gradient on one rank, in a round or in several."""

    NONE = auto()  # at the start, and after take() or drop()
    ACCUMULATING = auto()  # after begin(), on receivers: microbatches add, if there are any
    REDUCING = auto()  # after reduce(): peers and the reduce stream read it
    REDUCED = auto()  # after finish(): only this rank's part of the sum is left.  A later round
    # begins to accumulate again, and its part is added.


class FlatGradient:
    """The gradient of a flat tensor, as far as one rank holds it.

    A computing rank holds the whole gradient, ``[layout.numel]``, while it accumulates and
    reduces; a storing rank holds its part of the sum from the reduction on.  If one rank alone
    computes and stores (``is_alone``), it has no whole buffer and no reduction: the sums that
    autograd makes for each parameter are the gradient.

    ``finish`` gives the whole gradient back, also on a rank without rows of it.
    ``ScheduleExecutor`` calls it before it launches the next reduction, before the unit's own
    next turn of backward, and after the last.

    With ``on_host`` its part of the sum is copied to the host when a reduction ends.
    """

    def __init__(self, unit_fqn: str, reduce_dtype: torch.dtype) -> None:
        self.state = GradState.NONE
        self._unit_fqn, self._dtype = unit_fqn, reduce_dtype
        self._whole: Tensor | None = None  # [layout.numel], lent by the buffer pool
        # By parameter, the sum over the microbatches so far: a view of _whole, or the tensor
        # that autograd made on a rank that is alone.
        self._sums: dict[int, Tensor] = {}
        self._reduction: Pending | None = None
        self._reduced: Tensor | None = None  # [own numel], of the round in progress
        self._total: Tensor | None = None  # [own numel], of all rounds

    def follow(
        self,
        layout: FlatLayout,
        position: int,
        comm: CommContext,
        on_host: GradientOnHost | None = None,
    ) -> None:
        """Be that of ``layout`` from now on; there is no gradient now."""
        # By parameter: whether this rank had a gradient when reduce() was called, in any round.
        self.has_grad = [False] * len(layout.param_spans)
        self._layout, self._comm = layout, comm
        self._own_numel = layout.shard_numels[position]
        self._owners = tuple(i for i, numel in enumerate(layout.shard_numels) if numel)
        self._is_whole = self._own_numel == layout.numel
        self._on_host = on_host  # its part of the sum instead, if it is there

    @property
    def is_private(self) -> bool:
        """Whether one and the same rank alone computes and stores the gradient in this step."""
        return len(self._owners) == 1 and self._comm.receivers == self._owners

    @property
    def is_alone(self) -> bool:
        """Whether the gradient is private and this is the rank that has it, on the device."""
        return self._is_whole and self.is_private and self._on_host is None

    def begin(self) -> None:
        """NONE (or REDUCED, in a round before) -> ACCUMULATING; nothing if ACCUMULATING."""
        if self.state is GradState.ACCUMULATING:
            return
        self.state = GradState.ACCUMULATING
        if not self.is_alone:
            comm = self._comm
            self._whole = comm.buffers.lend(
                self._layout.numel, dtype=self._dtype, device=comm.device
            )

    def add(self, index: int, fqn: str, param: Tensor) -> None:
        """Add ``param.grad`` right after autograd has set it, while it is still in cache."""
        if self.state is not GradState.ACCUMULATING:
            raise RuntimeError(
                f"{fqn}: a gradient arrived outside of model.backward(). Call "
                "model.backward(loss_sum, num_tokens) instead of loss.backward()."
            )
        grad = param.grad
        if grad is None:  # the operation that used it returned no gradient
            return
        if grad.is_sparse:  # nn.Embedding(sparse=True); other ranks have other rows
            grad = param.grad = grad.to_dense()
        total = self._sums.get(index)
        if total is None:
            if self._whole is None:
                total = grad.to(self._dtype)
            else:
                span = self._layout.param_spans[index]
                total = self._whole[span.start : span.stop].view(grad.shape)
                total.copy_(grad)
            self._sums[index] = total
        elif total is not grad:
            total.add_(grad)
        # If the dtypes agree, autograd adds the next gradient to the total in place.
        param.grad = total if total.dtype == param.dtype else None

    def reduce(self) -> None:
        """ACCUMULATING (or NONE, without samples) -> REDUCING: launch the reduce-scatter."""
        comm = self._comm
        self.state = GradState.REDUCING
        self.has_grad = [had or i in self._sums for i, had in enumerate(self.has_grad)]
        if self._whole is not None:
            self._zero_what_nothing_wrote(self._whole)
            self._sums = {}
        if self.is_private:  # no rank takes part in a reduction
            if not self._own_numel:
                self._reduced = torch.empty(0, dtype=self._dtype, device=comm.device)
            elif self._on_host is not None:
                self._reduced = self._whole
            return
        # In the compute stream's pool, like the whole gradient: activations may have its memory
        # once .grad is dropped.  A pool of the reduce stream would keep it.
        self._reduced = torch.empty(self._own_numel, dtype=self._dtype, device=comm.device)
        # The compute stream wrote the gradient, and used what the part's memory was before; the
        # reduce stream reads the one and writes the other.
        comm.reduce_scatter_stream.wait_stream(comm.current_stream())
        with comm.on_stream(comm.reduce_scatter_stream):
            self._reduction = reduce_scatter_uneven(
                self._reduced,
                self._whole,
                self._layout.shard_numels,
                channel=comm.channels_of(self._unit_fqn)[1],
                contributors=comm.receivers,
                scratch=comm.buffers,
            )

    def finish(self) -> None:
        """REDUCING -> REDUCED: wait for this rank's part and for readers of its gradients."""
        comm, stream = self._comm, self._comm.current_stream()
        if self._reduction is not None:
            stream = comm.reduce_scatter_stream
            with comm.on_stream(stream):
                self._reduction.complete()
        event = comm.record_event(stream)
        # .grad is read, and the memory of both is given out again, on the compute stream.
        comm.current_stream().wait_event(event)
        if self._reduction is not None and self._whole is not None:
            # Not earlier: peers and the reduce stream were reading it.
            comm.buffers.take_back(self._whole)
        self._reduction = None
        self._add_to_total(event)
        self._whole = None
        self.state = GradState.REDUCED

    def _add_to_total(self, event: Any) -> None:
        """Add what was reduced when ``event`` is reached to the total of the rounds."""
        reduced, self._reduced = self._reduced, None
        if reduced is None:
            return
        if self._on_host is not None:
            held, is_lent, buffers = [reduced], reduced is self._whole, self._comm.buffers

            def free() -> None:
                each = held.pop()
                if is_lent:
                    buffers.take_back(each)

            stream = self._comm.current_stream()
            self._on_host.add(reduced, after=event, stream=stream, drop=free)
        elif self._total is None:
            self._total = reduced
        else:
            self._total.add_(reduced)

    def multiply(self, factor: float) -> None:
        """Multiply what the rounds so far have summed up; nothing is being reduced."""
        held = [each for each in (self._whole, self._total) if each is not None]
        # Without a whole buffer the sums are tensors of their own.
        for each in held if self._whole is not None else (*held, *self._sums.values()):
            each.mul_(factor)
        if self._on_host is not None:
            self._on_host.multiply(factor)

    def take(self) -> tuple[Tensor | None, dict[int, Tensor]]:
        """REDUCED -> NONE: this rank's part of the sum, [own numel], or a lone rank's sums.

        Returns (None, {}) if the unit was not visited in this step, and this rank has rows.
        """
        total = self._total if self._on_host is None else self._on_host.take()
        if total is None and not self._own_numel:  # others may have, in another stage
            device = self._comm.device if self._on_host is None else None
            total = torch.empty(0, dtype=self._dtype, device=device)
        taken = total, self._sums
        self._reduced = self._total = None
        self._sums = {}
        self._end()
        return taken

    def drop(self) -> None:
        """Any state -> NONE: drop the gradient of an unfinished or invalid step."""
        if self._reduction is not None and self._comm.host_runs_ahead:
            with suppress(LostPeerError):
                self.finish()  # the streams wait, the host does not
        if self._reduction is None and self._whole is not None:
            self._comm.buffers.take_back(self._whole)
        # Peers may still read what is being reduced, so that buffer is not lent again.
        self._whole = self._reduction = None
        if self._on_host is not None:
            self._on_host.drop()
        self.take()

    def _end(self) -> None:
        self.state = GradState.NONE
        self.has_grad = [False] * len(self.has_grad)

    def _zero_what_nothing_wrote(self, whole: Tensor) -> None:
        spans = enumerate(self._layout.param_spans)
        missing = [span for i, span in spans if i not in self._sums]
        for span in (*self._layout.gap_spans, *missing):
            whole[span.start : span.stop].zero_()


def forget_autograds(params: Sequence[nn.Parameter]) -> None:
    """Clear ``.grad`` of unsharded parameters, to which autograd would keep adding."""
    for param in params:
        param.grad = None
