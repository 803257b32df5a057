"""Where rows of a flat tensor are kept, if not as usual: on the host, or unsharded for good.

[Note: Rows on the host]
Those of ``RankPlan.optimizer_on_host``:

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
    compute before it frees  waits for the copy (CopyStream.hold)

What is gathered in another dtype is cast on the device: processors would take longer for it
than for the optimizer's step.

[Note: Residents]
A frozen flat tensor of a resident unit (``Plan.resident_units``) is gathered before its first
use, on all ranks that compute the unit by the plan, and none of them frees it over steps:

    on ranks that hold it    unshard() launches nothing, reshard() frees nothing
                             its own rows become a part of the unsharded storage, if their
                             dtype is that of the gather and nobody else has them
    on other ranks           of other stages, whose probes need it, and those that compute only
                             outside of training: gathered for every use

It is gathered again when a rank has written rows: version counters tell, before each forward,
and ranks agree on it.  ``param.data`` has a version counter of its own, so once somebody has
asked for it the tensor is gathered for every forward.
"""

from collections.abc import Callable, Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from shardhet.comm.calls import Pending
from shardhet.comm.channel import Channel
from shardhet.comm.copy_streams import Copy
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.records.plan import Plan, is_matched

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


class FrozenRows(nn.Parameter):
    """This rank's rows of a frozen parameter, which know whether ``.data`` was read."""

    has_left: bool = False  # somebody may write through ``.data``, which no counter counts

    @property
    def data(self) -> Tensor:
        """The rows without autograd; they are not trusted to stay as they are from now on."""
        self.has_left = True
        rows: Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return rows

    @data.setter
    def data(self, rows: Tensor) -> None:
        torch.Tensor.data.__set__(self, rows)  # type: ignore[attr-defined]


class Persistence:
    """Which ranks hold a frozen flat tensor unsharded from one use to the next."""

    def __init__(
        self,
        fqn: str,
        unit_fqn: str,
        comm: CommContext,
        counted: Callable[[], Sequence[Tensor]],  # what has its versions counted
    ) -> None:
        """``fqn`` is that of its first parameter."""
        self._fqn, self._unit_fqn = fqn, unit_fqn
        self.comm = comm
        self._counted = counted
        self._holders = frozenset[int]()  # positions; equal on all ranks
        self._versions: list[int] = []  # when it was gathered
        self._has_warned = False
        self.has_rows = False  # whether this rank's rows are a part of the unsharded storage
        self._num_uses = 0  # of rows that are apart, if nobody else has them
        self._gather: Pending | None = None

    def follow_rows(self, shard: Tensor) -> None:
        """Note that the rows are apart, in ``shard``, which nobody else has yet."""
        self.has_rows, self._num_uses = False, num_uses(shard)

    def note_gather(self, gather: Pending) -> None:
        """Note what may still read the rows."""
        self._gather = gather

    def may_take_rows(self, shard: Tensor) -> bool:
        """Whether nobody else has the rows, or reads them, and they are what was gathered."""
        if self.has_rows or not (self.is_here and self._holders and shard.numel()):
            return False
        is_read = self._gather is not None and not self._gather.is_sent()
        return not is_read and num_uses(shard) == self._num_uses and not self.has_changed()

    def take_rows(self) -> None:
        """Note that the rows are a part of the unsharded storage from now on."""
        self.has_rows, self._gather = True, None
        self._note_versions()

    @property
    def _is_resident(self) -> bool:
        return is_matched(self._unit_fqn, self.comm.resident_units)

    @property
    def _computing(self) -> tuple[int, ...]:
        return self.comm.computing_of(self._unit_fqn)

    @property
    def is_here(self) -> bool:
        """Whether this rank keeps the unsharded storage."""
        return self._is_resident and self.comm.all_gather_channel.position in self._computing

    def to_reach(self) -> Sequence[int] | None:
        """The positions that a gather is for; None if all that compute hold the tensor."""
        comm = self.comm
        if not self._is_resident:
            return comm.receivers
        lacking = ({*comm.receivers} | {*self._computing}) - self._holders
        return tuple(sorted(lacking)) or None

    def begin(self) -> None:
        """Note a gather to all that ``to_reach`` names, on this rank or among others."""
        if self._is_resident and not self._holders:
            self._holders = frozenset(self._computing)
            self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [each._version for each in self._counted()]

    @property
    def is_held(self) -> bool:
        """Whether some rank keeps it, as far as this one knows."""
        return bool(self._holders)

    def has_changed(self) -> bool:
        """Whether this rank's rows may have been written since they were gathered."""
        if not self._holders:
            return False
        counted = self._counted()
        has_left = any(getattr(each, "has_left", False) for each in counted)
        if has_left and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._fqn}, or a parameter beside it: its .data was read, and what is "
                "written through it cannot be noticed. So these frozen parameters of unit "
                f"{self._unit_fqn!r} are gathered again for every forward. Read "
                "param.detach() instead.",
                stacklevel=2,
            )
        return has_left or self._versions != [each._version for each in counted]

    def check_unwritten(self) -> None:
        """Raise ``RuntimeError`` if rows that backward computes with have been written."""
        if not (self.has_rows and self._holders):
            return
        if self._versions != [each._version for each in self._counted()]:
            raise RuntimeError(
                f"{self._fqn}, or a parameter beside it: it was written between forward and "
                f"backward, and unit {self._unit_fqn!r} computes its backward with it "
                "(resident_units). Write to frozen parameters between steps."
            )

    def end(self) -> None:
        """Let the next use gather the tensor again.  The same on all ranks."""
        self._holders = frozenset()


def forget_changed(of_frozen: Sequence[Persistence], control: Channel) -> None:
    """Gather again, from the next use on, what any rank has changed.  Collective.

    All ranks call it, once any has said that it has changed rows.
    """
    mine = [i for i, each in enumerate(of_frozen) if each.has_changed()]
    for i in set().union(*control.exchange_objects(mine)):
        of_frozen[i].end()


def share_holders(of_frozen: Sequence[Persistence], control: Channel) -> None:
    """Let every stage know what the ranks of others hold.  Collective.

    Before all ranks gather units that are those of one stage.
    """
    mine = [i for i, each in enumerate(of_frozen) if each.is_held]
    for i in set().union(*control.exchange_objects(mine)):
        of_frozen[i].begin()


def check_resident_units(plan: Plan, frozen: Sequence[str], fqns: Sequence[str]) -> None:
    """Raise ``ValueError`` for patterns of ``plan.resident_units`` that name no frozen unit.

    ``frozen`` are the units with a frozen parameter among all ``fqns``; "" is the root.
    """
    for pattern in plan.resident_units:
        named = [fqn for fqn in fqns if is_matched(fqn, (pattern,))]
        if set(named).isdisjoint(frozen):
            found = f"units {', '.join(named[:3])} have no frozen parameter"
            raise ValueError(
                f"plan: resident_units has {pattern!r} but "
                f"{found if named else 'no unit is named so'}. Freeze parameters before "
                "wrapping the model, or leave the pattern out."
            )
