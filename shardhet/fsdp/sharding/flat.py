"""A flat tensor of a unit: its shard, gather, unsharded storage, gradient and reduction.

For a flat tensor that this rank both stores a part of and computes with: when each buffer is
alive, who writes and reads it, and who waits for whom:

    tensor               alive                       written by            read by
    flat_shard           always                      optimizer (compute)   gather
    cast of the shard    unshard .. wait_all_sent    gather                peers
                         (on an accelerator that
                         computes: a part of the
                         unsharded storage)
    unsharded storage    unshard .. reshard          gather, peers         compute
                         (resident: over steps)
    whole gradient       1st backward turn ..        compute               reduce, peers
                         end of its reduction
    part of the sum      reduce .. zero_grad         reduce, compute       optimizer (compute)
                                                     (sums of rounds)

    gather before it writes the unsharded storage   waits for compute_event: earlier kernels
                                                    that read it, the optimizer's writes
    compute before it reads parameters              waits for the gather (wait_for_unshard)
    optimizer before it writes the shard            waits for peers to have read it
                                                    (CommContext.wait_all_sent)
    reduce before it reads the whole gradient and   waits for compute (FlatGradient.reduce),
    writes its part of the sum                      of whose pool the memory of both is
    compute before it reads the part of the sum     waits for reduce (FlatGradient.finish),
                                                    and only then lends the buffer again

The parameters are views of the unsharded storage, so tensors that autograd saved stay valid
when the storage is freed and later refilled.  A rank that stores a whole tensor needs no second
copy: its shard *is* the unsharded tensor; where a frozen one stays unsharded over steps, the
shard becomes a part of it.  ``flat_grad`` has the states of the gradient, and ``persistence``
what is different where the plan says ``optimizer_on_host``, and which tensors stay unsharded
over steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.comm.calls import Pending
from shardhet.comm.collectives import all_gather_uneven
from shardhet.fsdp.microbatch.batching import storage_of
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.flat_grad import FlatGradient
from shardhet.fsdp.sharding.persistence import FrozenRows, Persistence, RowsOnHost
from shardhet.records.layout import FlatLayout, Span

WAS_FROZEN = (
    ": requires_grad was changed after HetFSDP was built. Freeze and unfreeze parameters "
    "before wrapping the model. To train some only later, wrap them trainable, and set their "
    ".grad to None after backward until then."
)


@dataclass(frozen=True)
class ParamSlot:
    """One parameter and every place in the module tree that refers to it."""

    fqns: tuple[str, ...]  # several for a tied parameter; the first is its name
    owners: tuple[tuple[nn.Module, str], ...]  # (module, attribute), one per fqn
    shape: torch.Size
    is_trainable: bool

    @cached_property
    def fqn(self) -> str:
        """The name of the parameter, as optimizers use it."""
        return self.fqns[0]

    @property
    def current(self) -> nn.Parameter:
        """The parameter that the modules hold now."""
        module, attribute = self.owners[0]
        param = module._parameters[attribute]
        assert param is not None
        return param

    def put(self, param: nn.Parameter) -> None:
        """Make the modules hold ``param``."""
        for module, attribute in self.owners:
            module._parameters[attribute] = param


class FlatTensor:
    """Parameters of one unit that share a dtype and are all trainable or all frozen."""

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        layout: FlatLayout,
        *,
        comm: CommContext,
        orig_dtype: torch.dtype,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        on_host: bool = False,
        unit_fqn: str = "",
    ) -> None:
        self.slots = tuple(slots)
        self._unit_fqn = unit_fqn
        self.is_trainable = slots[0].is_trainable
        self.orig_dtype = orig_dtype
        converts = orig_dtype.is_floating_point and param_dtype is not None
        self.param_dtype = param_dtype if converts and param_dtype else orig_dtype
        self.reduce_dtype = reduce_dtype or orig_dtype
        self.comm = comm  # another one from a ``redistribute`` on
        self._position = comm.all_gather_channel.position
        # None: it is trainable, so that it is gathered for every use.
        self.persistence: Persistence | None = None
        if not self.is_trainable:
            self.persistence = Persistence(slots[0].fqn, unit_fqn, comm, self._counted)
        self.grad = FlatGradient(unit_fqn, self.reduce_dtype)
        self.cuts: list[tuple[Span, ...]] = []  # the rows of every parameter, by position
        self._take_over(layout, on_host=on_host)
        rows = nn.Parameter if self.is_trainable else FrozenRows
        self.sharded_params = [
            rows(self._box(self.flat_shard, i), requires_grad=self.is_trainable)
            for i in range(len(slots))
        ]
        self._unsharded = self._whole()
        # .data has its own version counter: autograd must not take a refill of the storage for
        # a change of tensors that it saved in forward.
        self.unsharded_params = [
            nn.Parameter(view, requires_grad=self.is_trainable)
            for view in _params_in(self._unsharded.data, layout, slots)
        ]
        for i, slot in enumerate(slots):
            _keep_kind(slot.current, self.sharded_params[i], self.unsharded_params[i])
        if not self._is_shard_itself:
            self._unsharded.untyped_storage().resize_(0)
        if self.persistence is not None:
            self.persistence.follow_rows(self.flat_shard)
        for i, slot in enumerate(self.slots if self.is_trainable else ()):
            refuse = partial(_refuse_grad, slot.fqn)
            self.sharded_params[i].register_post_accumulate_grad_hook(refuse)
            add = partial(self.grad.add, i, slot.fqn)
            self.unsharded_params[i].register_post_accumulate_grad_hook(add)

        self._gather: Pending | None = None
        self._gathered: Any = None  # the event at its end, where streams wait and not the host

    # Layout #

    def _take_over(self, layout: FlatLayout, *, on_host: bool) -> None:
        """Store a shard of ``layout`` from now on, without values but in the gaps."""
        self.layout = layout
        self.cuts[:] = layout.cuts()
        self.rows = [cut[self._position] for cut in self.cuts]
        own = layout.shard_spans[self._position]
        self._boxes = [
            (_within(own, span), (rows.numel, *slot.shape[1:]))
            for span, rows, slot in zip(layout.param_spans, self.rows, self.slots, strict=True)
        ]
        numel, dtypes = layout.shard_numels[self._position], (self.orig_dtype, self.param_dtype)
        self.on_host = RowsOnHost(numel, *dtypes, comm=self.comm) if on_host else None
        self.flat_shard = (
            self.comm.empty(numel, self.orig_dtype)
            if self.on_host is None
            else self.on_host.shard
        )
        for gap in layout.gap_spans:
            part = _within(own, gap)
            self.flat_shard[part.start : part.stop].zero_()
        gradient = None
        if self.on_host is not None and self.is_trainable:
            gradient = self.on_host.gradient(self.reduce_dtype)
        self.grad.follow(layout, self._position, self.comm, gradient)

    def _whole(self) -> Tensor:
        """The unsharded tensor, [layout.numel], which is the shard where that is all of it."""
        shard, numel = self.sent, self.layout.numel
        self._is_shard_itself = shard.numel() == numel and self.param_dtype == shard.dtype
        if not self._is_shard_itself:
            shard = torch.empty(numel, dtype=self.param_dtype, device=self.comm.device)
        self.unsharded_storage = storage_of(shard)  # of the parameters
        return shard

    @torch.no_grad()
    def redistribute(self, layout: FlatLayout, whole: Tensor, *, on_host: bool) -> None:
        """Store the rows of ``layout`` from now on; ``whole``, [numel], has their values.

        Between steps, without gradients.  The parameters stay the same objects.
        """
        self._take_over(layout, on_host=on_host)
        own = layout.shard_spans[self._position]
        self.flat_shard.copy_(whole[own.start : own.stop])
        if self.persistence is not None:
            self.persistence.end()
        for i, param in enumerate(self.sharded_params):
            param.data = self._box(self.flat_shard, i)
        self._unsharded = self._whole()
        views = _params_in(self._unsharded.data, layout, self.slots)
        for param, view in zip(self.unsharded_params, views, strict=True):
            param.data = view
        if not self._is_shard_itself:
            self._unsharded.untyped_storage().resize_(0)
        if self.persistence is not None:
            self.persistence.follow_rows(self.flat_shard)

    @property
    def sent(self) -> Tensor:
        """What the device has of this rank's rows; on the host, in the dtype of the gather."""
        return self.flat_shard if self.on_host is None else self.on_host.sent

    def rows_on_device(self) -> Tensor:
        """This rank's rows as they are stored, where collectives can read them."""
        return self.flat_shard if self.on_host is None else self.on_host.on_device()

    # Geometry #

    def local_shards(self, shard: Tensor) -> list[Tensor]:
        """The rows of every parameter in ``shard``, a tensor like this rank's shard."""
        return [self._box(shard, i) for i in range(len(self.slots))]

    def _box(self, shard: Tensor, param: int) -> Tensor:
        """The rows of parameter ``param`` in ``shard``, [rows, ...]; a scalar is one row."""
        part, shape = self._boxes[param]
        return shard[part.start : part.stop].view(shape)

    @torch.no_grad()
    def store_rows(self, param: int, full: Tensor) -> None:
        """Copy this rank's rows of ``full``, a whole parameter, into the shard."""
        rows = self.rows[param]
        whole = full.reshape(1) if full.dim() == 0 else full
        self._box(self.flat_shard, param).copy_(whole[rows.start : rows.stop])

    # Parameters #

    @property
    def versions(self) -> tuple[int, int]:
        """How often the program has written the rows, and the whole parameters."""
        return self.flat_shard._version, self.unsharded_params[0]._version

    def unshard(self) -> None:
        """Start the gather, unless who computes holds it; others only send."""
        comm, persistence, on_host = self.comm, self.persistence, self.on_host
        receivers = comm.receivers if persistence is None else persistence.to_reach()
        if receivers is None:
            return
        if on_host is not None:
            on_host.copy_to_device()
        if persistence is not None:
            persistence.begin()
        is_alone = comm.all_gather_channel.group is None  # then the gather copies and casts
        if is_alone and self._is_shard_itself:
            return
        is_receiver = self._position in receivers
        has_rows = persistence is not None and persistence.has_rows
        with comm.on_stream(comm.all_gather_stream):
            # Memory allocated on this stream may have been freed by the last reshard while
            # kernels of the compute stream still read it; the optimizer wrote the shard there.
            comm.all_gather_stream.wait_event(comm.compute_event)
            if is_receiver and not (self._is_shard_itself or has_rows):
                nbytes = self.layout.numel * self.param_dtype.itemsize
                self._unsharded.untyped_storage().resize_(nbytes)
            if on_host is not None:
                on_host.wait_on(comm.all_gather_stream)
            shard = self.flat_shard if is_alone or on_host is None else on_host.sent
            if shard.dtype != self.param_dtype and not is_alone:
                shard = self._cast(shard, is_receiver=is_receiver)
            self._gather = all_gather_uneven(
                self._unsharded if is_receiver else None,
                shard,
                self.layout.shard_numels,
                channel=comm.channels_of(self._unit_fqn)[0],
                receivers=receivers,
            )
            if comm.host_runs_ahead:
                # Recorded now: later it would come after the next gather of the stream too,
                # and no gather would overlap compute.
                self._gathered = comm.end_of(self._gather)

    def _cast(self, shard: Tensor, *, is_receiver: bool) -> Tensor:
        """This rank's rows in the dtype in which they are gathered."""
        if self.comm.is_on_host or not is_receiver:
            return shard.to(self.param_dtype)
        # On an accelerator the gather waits for the sends too, so they may read the output.
        own = self.layout.shard_spans[self._position]
        return self._unsharded[own.start : own.stop].copy_(shard)

    def wait_for_unshard(self) -> None:
        """Wait until the compute stream may read the parameters; give them to the modules."""
        comm = self.comm
        if self._gather is not None:
            comm.current_stream().wait_event(self._gathered or comm.end_of(self._gather))
            comm.keep_until_sent(self._gather)
            if self.persistence is not None:
                self.persistence.note_gather(self._gather)
            self._gather = self._gathered = None
        elif self.on_host is not None:
            self.on_host.wait_on(comm.current_stream())
        if comm.is_receiver:
            _show(self.slots, self.unsharded_params)

    def reshard(self) -> None:
        """Free the unsharded storage, unless it stays; the modules hold the shards again."""
        self.show_shards()
        if self._is_shard_itself:
            return
        if (persistence := self.persistence) is not None:
            if persistence.may_take_rows(self.flat_shard):
                _put_rows_inside(self, persistence)
            if persistence.is_here or persistence.has_rows:
                return
        self._unsharded.untyped_storage().resize_(0)

    def _counted(self) -> list[Tensor]:
        # The unsharded ones too: a write to them, on one rank alone, does not last.
        return [self.flat_shard, *self.sharded_params, *self.unsharded_params]

    def show_shards(self) -> None:
        """Make the modules hold this rank's rows."""
        _show(self.slots, self.sharded_params)


def _show(slots: Sequence[ParamSlot], params: Sequence[nn.Parameter]) -> None:
    for slot, param in zip(slots, params, strict=True):
        for module, attribute in slot.owners:  # as ``put``, twice for each turn
            module._parameters[attribute] = param


def _keep_kind(given: nn.Parameter, sharded: nn.Parameter, whole: nn.Parameter) -> None:
    """Let what stands for a parameter have its class, and the same attributes."""
    whole.__dict__ = sharded.__dict__
    whole.__class__ = type(given)
    if sharded.requires_grad:  # frozen rows have a class of ours
        sharded.__class__ = type(given)


def _params_in(whole: Tensor, layout: FlatLayout, slots: Sequence[ParamSlot]) -> list[Tensor]:
    """Every parameter in ``whole``, [layout.numel]."""
    pairs = zip(layout.param_spans, slots, strict=True)
    return [whole[span.start : span.stop].view(slot.shape) for span, slot in pairs]


def _put_rows_inside(flat: FlatTensor, persistence: Persistence) -> None:
    """Let the rows be their part of the unsharded storage, which has their values."""
    if flat.on_host is None and flat.param_dtype == flat.orig_dtype:
        # .data: a gather that writes here must not be taken for a change of rows.
        own, whole = flat.layout.shard_spans[flat._position], flat._unsharded.data
        flat.flat_shard = whole[own.start : own.stop]
        for box, param in zip(
            flat.local_shards(flat.flat_shard), flat.sharded_params, strict=True
        ):
            param.data = box
        persistence.take_rows()


def _within(own: Span, span: Span) -> Span:
    """The position, within the shard of ``own``, of the part of ``span`` that is in it."""
    part = span.intersect(own)
    return Span(part.start - own.start, part.stop - own.start) if part.numel else Span(0, 0)


def _refuse_grad(fqn: str, sharded_param: Tensor) -> None:
    # Autograd reaches a shard only if a parameter is used without calling its module.
    sharded_param.grad = None
    raise RuntimeError(
        f"{fqn} is used outside of the forward of its unit, where this rank sees only its own "
        f"rows. Use it inside, or make the module that uses it a unit: HetFSDP(units=[...])."
    )


def check_intact(flat: FlatTensor) -> None:
    """Raise if its parameters or rows were replaced by others, or were frozen or unfrozen."""
    storage = flat.flat_shard.untyped_storage().data_ptr()
    pairs = zip(flat.slots, flat.sharded_params, flat.unsharded_params, strict=True)
    for slot, param, unsharded in pairs:
        for module, attribute in slot.owners:
            held = module._parameters.get(attribute)
            if held is not param and held is not unsharded:
                raise RuntimeError(
                    f"{slot.fqn}: a module holds another parameter in its place, or none, "
                    "since HetFSDP was built, which would not be used. Write into the one "
                    "that is there (with torch.no_grad(): param.copy_(...)), or change the "
                    "model before wrapping it."
                )
        is_there = not param.numel() or (param.untyped_storage().data_ptr() == storage)
        if not is_there:
            raise RuntimeError(
                f"{slot.fqn}: its data were replaced (param.data = ..., "
                "vector_to_parameters), which HetFSDP does not see. Write into it: "
                "with torch.no_grad(): param.copy_(...)."
            )
        # Without gradients it does not matter: peft's disable_adapter() freezes.
        if torch.is_grad_enabled() and param.requires_grad != flat.is_trainable:
            raise RuntimeError(slot.fqn + WAS_FROZEN)
