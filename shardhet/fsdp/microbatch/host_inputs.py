"""Inputs of recomputed units in the memory of the host, from forward to backward.

    tensor         where    alive                                    written by   read by
    input          device   .. next unit's turn in forward           the model    unit, copy out
    slab           host     while the plan is followed               copy out     copy in
    input, again   device   turn before the own .. own, in backward  copy in      unit

    copy out               waits for compute, when the unit's forward begins
    compute, next turn     waits for the copy out; then the input is let go
    copy in                waits for compute, when the turn before the unit's own begins in
                           backward: for the copy out, and for what used its memory before
    compute, own turn      waits for the copy in

Copies have streams of their own, and the host waits for none of them.  Each microbatch has a
place of its own in the slab, because only what is contiguous there is copied without a detour.
The last input of forward is used in backward as it is, if no other turn has begun meanwhile.
A stage of a pipeline has several rounds in flight, each with a slab of its own; the last input
of a round comes back during the phase before its backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardhet.comm import devices
from shardhet.comm.copy_streams import Copy, CopyStream
from shardhet.comm.devices import HostAllocator
from shardhet.fsdp.microbatch.batching import BatchAxis, Rule, memory_order
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.records.layout import Span

ALIGNMENT = 512  # bytes


class StagingBuffer:
    """Memory of the host that is dealt out anew in each forward, in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._memory = HostAllocator(device)
        self._block = self._memory.empty(0, torch.uint8)
        self._used_bytes = 0  # of this forward

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._block.numel()

    @property
    def is_too_small(self) -> bool:
        """Whether the forward so far needs more, as when samples are longer than before."""
        return self._used_bytes > self.nbytes

    def reserve(self, nbytes: int) -> None:
        """Make it large enough; nothing may be in it."""
        nbytes = max(nbytes, self._used_bytes)
        if nbytes > self.nbytes:
            self._block = self._memory.empty(0, torch.uint8)  # freed before the next is made
            self._block = self._memory.empty(nbytes, torch.uint8)

    def begin(self) -> None:
        """Deal out from the start again."""
        self._used_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """The next [nbytes]; of other memory, which is not pinned, if there is no room."""
        start = self._used_bytes
        self._used_bytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self.is_too_small:
            return torch.empty(nbytes, dtype=torch.uint8)
        return self._block[start : start + nbytes]


class HostInput:
    """One tensor that is an input of visits."""

    def __init__(
        self,
        tensor: Tensor,
        rule: BatchAxis,
        spans: Sequence[Span],
        staging: StagingBuffer,
        fqn: str,
    ) -> None:
        self.nbytes = tensor.numel() * tensor.dtype.itemsize
        self._fqn = fqn  # of the first unit that it is an input of
        self._rule, self._spans = rule, spans
        self._tensor: Tensor | None = tensor  # None while it is on the host only
        self._version: int | None = tensor._version  # None: it is a copy
        self._shape, self._strides, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._places = [_place(piece, staging) for piece in self._pieces(tensor)]
        self._copy: Copy | None = None  # the latest, out or in

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        num_samples = self._spans[-1].stop
        return [self._rule.view(tensor, span, num_samples) for span in self._spans]

    def copy_out(self, copy_stream: CopyStream, comm: CommContext) -> None:
        """Launch the copy to the host."""
        assert self._tensor is not None
        pairs = list(zip(self._places, self._pieces(self._tensor), strict=True))

        def make() -> None:
            for place, piece in pairs:
                place.copy_(piece, non_blocking=True)

        event = comm.record_event(comm.current_stream())
        self._copy = copy_stream.launch(
            make, after=event, writes=self._places, nbytes=self.nbytes
        )

    def leave(self, comm: CommContext) -> None:
        """Let go of the tensor; its memory is used again after the copy."""
        self.check_is_unchanged()
        self.drop(comm)

    def copy_in(self, copy_stream: CopyStream, comm: CommContext) -> None:
        """Launch the copy to the device, unless it is there."""
        if self._tensor is not None:
            return
        self._tensor = torch.empty_strided(
            self._shape, self._strides, dtype=self._dtype, device=comm.device
        )
        self._version = None
        pairs = list(zip(self._pieces(self._tensor), self._places, strict=True))
        is_on_host = devices.is_on_host(comm.device)

        def make() -> None:
            for piece, place in pairs:
                piece.copy_(place, non_blocking=True)
                if is_on_host:  # whoever reads it once more notices
                    place.fill_(torch.nan)

        event = comm.record_event(comm.current_stream())
        self._copy = copy_stream.launch(
            make, after=event, writes=[self._tensor], nbytes=self.nbytes
        )

    def on_device(self, comm: CommContext) -> Tensor:
        """The tensor, once it has been copied in."""
        assert self._tensor is not None
        if self._version is None and self._copy is not None:
            self._copy.wait_on(comm.current_stream())
            self._copy = None
            self._tensor.requires_grad_()
        self.check_is_unchanged()
        return self._tensor

    def drop(self, comm: CommContext) -> None:
        """Let go of the tensor, whatever is being copied."""
        if self._copy is not None:
            # The copy still reads or writes memory that goes back to the compute stream's pool.
            self._copy.wait_on(comm.current_stream())
        self._tensor = self._copy = None

    def check_is_unchanged(self) -> None:
        """Raise ``RuntimeError`` if someone has changed it in place."""
        if self._version not in (None, getattr(self._tensor, "_version", None)):
            raise RuntimeError(
                f"unit {self._fqn!r}: its input is changed in place after the unit has read "
                "it, but backward needs what it was. Make that operation out of place."
            )


@dataclass(eq=False)
class KeptInputs:
    """The inputs of one visit until its backward."""

    by_place: dict[int, HostInput]  # by index among the visit's tensors
    own: Sequence[HostInput]  # those that no earlier visit has as an input
    is_dropped: bool = False


class _Round:
    """What is kept of one round in flight."""

    def __init__(self, device: torch.device) -> None:
        self.staging = StagingBuffer(device)
        self.kept: list[KeptInputs] = []  # of visits whose backward is to come
        # By what autograd knows tensors by: one that feeds many units is copied once.
        self.by_edge: dict[tuple[object, int], HostInput] = {}


class InputsOnHost:
    """What a rank keeps in the memory of its host of the rounds in flight."""

    def __init__(self, comm: CommContext, in_flight: int = 1) -> None:
        self.copies_out, self.copies_in = CopyStream(comm.device), CopyStream(comm.device)
        self._comm = comm
        self._rounds = [_Round(comm.device) for _ in range(in_flight)]
        self._now = self._rounds[0]  # that computes
        self._leaving: list[HostInput] = []  # of the last visit

    @property
    def number(self) -> int:
        """The number of the next visit whose inputs are kept here."""
        return len(self._now.kept)

    @property
    def nbytes(self) -> int:
        """Bytes that are set aside on the host."""
        return sum(each.staging.nbytes for each in self._rounds)

    def reserve(self, nbytes: int) -> None:
        """Have room for so many bytes of each round, while none is in flight."""
        if any(nbytes > each.staging.nbytes for each in self._rounds):
            self.wait()
            for each in self._rounds:
                each.staging.reserve(nbytes)

    def wait(self) -> None:
        """Let the host wait for all copies, so that what stages them may be freed."""
        self.copies_out.wait_all()
        self.copies_in.wait_all()

    # Rounds #

    def enter(self, number: int) -> None:
        """Begin or go on with a round of the step."""
        now = self._rounds[number % len(self._rounds)]
        if now is not self._now:
            self.begin_turn()
            self._now = now

    def expect(self, number: int) -> None:
        """Launch the copies with which the backward of another round begins."""
        of_round = self._rounds[number % len(self._rounds)]
        if of_round is not self._now:
            self._launch_in(of_round.kept[-1:])

    # Forward #

    def begin_turn(self) -> None:
        """Let go of the inputs of the visit before."""
        for each in self._leaving:
            each.leave(self._comm)
        self._leaving = []

    def keep(
        self, fqn: str, tensors: Sequence[Tensor], rules: Sequence[Rule], spans: Sequence[Span]
    ) -> KeptInputs:
        """Copy a visit's inputs to the host, when its forward begins."""
        now, by_place = self._now, dict[int, HostInput]()
        for i, (tensor, rule) in enumerate(zip(tensors, rules, strict=True)):
            if not isinstance(rule, BatchAxis) or not _may_leave(tensor):
                continue
            node, output = get_gradient_edge(tensor)[:2]
            found = now.by_edge.get((node, output))
            if found is None:
                found = HostInput(tensor, rule, spans, now.staging, fqn)
                found.copy_out(self.copies_out, self._comm)
                now.by_edge[node, output] = found
                self._leaving.append(found)
            by_place[i] = found
        kept = KeptInputs(by_place, tuple(self._leaving))
        now.kept.append(kept)
        return kept

    # Backward #

    def reach(self, number: int) -> None:
        """Begin a backward turn; ``number`` was that of the next visit before its forward."""
        while len(self._now.kept) > number + 1:  # autograd has skipped these
            self._drop(self._now.kept[-1])
        self._launch_in(self._now.kept[max(0, number - 1) : number])

    def _launch_in(self, visits: Sequence[KeptInputs]) -> None:
        for kept in visits:
            for each in kept.by_place.values():
                each.copy_in(self.copies_in, self._comm)

    def come_back(self, kept: KeptInputs) -> dict[int, Tensor]:
        """The inputs of a visit on the device, by place."""
        self._launch_in([kept])
        return {i: each.on_device(self._comm) for i, each in kept.by_place.items()}

    def finish(self, kept: KeptInputs) -> None:
        """Let go of what no earlier visit needs."""
        if not kept.is_dropped:
            self._drop(kept)

    def _drop(self, kept: KeptInputs) -> None:
        assert self._now.kept[-1] is kept
        self._now.kept.pop()
        kept.is_dropped = True
        for each in kept.own:
            each.drop(self._comm)
        self._leaving = []

    # Between rounds #

    def end_round(self) -> None:
        """Drop what is left of the round, and have more room from now on if it needed that."""
        now = self._now
        while now.kept:
            self._drop(now.kept[-1])
        now.by_edge.clear()
        if now.staging.is_too_small:
            self.wait()
            now.staging.reserve(0)
        now.staging.begin()

    def drop(self) -> None:
        """Drop all rounds."""
        for each in self._rounds:
            self._now = each
            self.end_round()
        self._now = self._rounds[0]


def _place(piece: Tensor, staging: StagingBuffer) -> Tensor:
    """Memory of the slab for ``piece``, in the order in which the device has it."""
    taken = staging.take(piece.numel() * piece.dtype.itemsize).view(piece.dtype)
    order = memory_order(piece.stride())
    shape = [piece.shape[dim] for dim in order]
    return taken.view(shape).permute([order.index(dim) for dim in range(piece.dim())])


def _may_leave(tensor: Tensor) -> bool:
    """Whether the tensor's memory is free once autograd and the model let go of it."""
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
    # A leaf is the caller's; what is expanded is small.
    is_made = tensor.requires_grad and tensor.grad_fn is not None and tensor.numel() > 0
    return is_plain and is_made and torch._debug_has_internal_overlap(tensor) != 1
