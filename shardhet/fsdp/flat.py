"""One flat tensor of a unit through its lives: shard, gather, unsharded, gradient, reduction.

What is alive when, for a flat tensor that this rank stores a part of and computes with:

    flat_shard         always; the optimizer writes it between steps
    unsharded storage  from unshard() to reshard(); the parameters are views of it, so what
                       autograd saved stays valid when it is freed and later refilled
    unsharded_grad     from the unit's first backward turn until its reduction is finished
    sharded_grad       from the end of the reduction until zero_grad

A rank that stores all of it needs no second copy: its shard *is* the unsharded tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shardhet.comm.collectives import all_gather_uneven, reduce_scatter_uneven
from shardhet.comm.messages import Pending
from shardhet.fsdp.comm import CommContext
from shardhet.records.layout import FlatLayout, Span


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """One parameter and every place in the module tree where it hangs."""

    fqns: tuple[str, ...]  # several for a tied parameter; the first one counts
    owners: tuple[tuple[nn.Module, str], ...]  # (module, attribute), one per fqn
    shape: torch.Size
    is_trainable: bool

    @property
    def fqn(self) -> str:
        """The name under which optimizers see it."""
        return self.fqns[0]

    @property
    def current(self) -> nn.Parameter:
        """What the modules see in its place now."""
        module, attribute = self.owners[0]
        param = module._parameters[attribute]
        assert param is not None
        return param

    def put(self, param: nn.Parameter) -> None:
        """Let the modules see ``param`` in its place."""
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
    ) -> None:
        self.slots = tuple(slots)
        self.layout = layout
        self.is_trainable = slots[0].is_trainable
        self.orig_dtype = orig_dtype
        converts = orig_dtype.is_floating_point and param_dtype is not None
        self.param_dtype = param_dtype if converts and param_dtype else orig_dtype
        self.reduce_dtype = reduce_dtype or self.param_dtype
        self._comm = comm
        self._position = comm.gather_channel.position

        own_numel = layout.shard_numels[self._position]
        self.rows = [layout.rows(i, self._position) for i in range(len(slots))]
        self._boxes = [self._own_part(span) for span in layout.param_spans]
        self.flat_shard = comm.empty(own_numel, orig_dtype)
        for gap in layout.gap_spans:
            part = self._own_part(gap)
            self.flat_shard[part.start : part.stop].zero_()
        self.sharded_params = [
            nn.Parameter(self._box(self.flat_shard, i), requires_grad=self.is_trainable)
            for i in range(len(slots))
        ]
        if self.is_trainable:
            for slot, param in zip(slots, self.sharded_params, strict=True):
                param.register_post_accumulate_grad_hook(partial(_refuse_grad, slot.fqn))

        self._owners = tuple(i for i, numel in enumerate(layout.shard_numels) if numel)
        self._is_whole = own_numel == layout.numel  # this rank stores all of it
        self._is_shard_itself = self._is_whole and self.param_dtype == orig_dtype
        self._unsharded = self.flat_shard
        if not self._is_shard_itself:
            self._unsharded = torch.empty(
                layout.numel, dtype=self.param_dtype, device=comm.device
            )
        # .data has a version counter of its own: refilling the storage must not tell autograd
        # that tensors it saved in forward were changed.
        self.unsharded_params = [
            nn.Parameter(
                self._unsharded_part(self._unsharded.data, i), requires_grad=self.is_trainable
            )
            for i in range(len(slots))
        ]
        if not self._is_shard_itself:
            self._unsharded.untyped_storage().resize_(0)
        if self.is_trainable:
            for i, param in enumerate(self.unsharded_params):
                param.register_post_accumulate_grad_hook(partial(self._accumulate, i))

        self._gather: Pending | None = None
        self._unsharded_grad: Tensor | None = None  # [layout.numel]
        # By parameter, of the microbatches so far: views of _unsharded_grad, or what autograd
        # made on a rank that is alone, which has no such buffer and keeps them for its shard.
        self._sums: dict[int, Tensor] = {}
        self._is_accumulating = False
        self.has_grad = [False] * len(slots)  # of this rank, as reduce() found it
        self._reduction: Pending | None = None
        self._reduced: Tensor | None = None  # [own numel], reduce_dtype

    # Geometry #

    def _own_part(self, span: Span) -> Span:
        """Where in this rank's shard the part of ``span`` that it stores lies."""
        own = self.layout.shard_spans[self._position]
        part = span.intersect(own)
        return Span(part.start - own.start, part.stop - own.start) if part.numel else Span(0, 0)

    def _box(self, shard: Tensor, param: int) -> Tensor:
        """Parameter ``param``'s rows in ``shard``, [rows, ...]; scalars are one row."""
        part = self._boxes[param]
        shape = (self.rows[param].numel, *self.slots[param].shape[1:])
        return shard[part.start : part.stop].view(shape)

    @property
    def _is_private(self) -> bool:
        """Whether one rank alone contributes to and stores the gradient in this step."""
        return len(self._owners) == 1 and self._comm.receivers == self._owners

    @property
    def _is_alone(self) -> bool:
        """Whether this is that rank."""
        return self._is_whole and self._is_private

    @torch.no_grad()
    def store_rows(self, param: int, full: Tensor) -> None:
        """Keep this rank's rows of ``full``, a whole parameter."""
        rows = self.rows[param]
        whole = full.reshape(1) if full.dim() == 0 else full
        self._box(self.flat_shard, param).copy_(whole[rows.start : rows.stop])

    # Parameters #

    @property
    def unsharded_address(self) -> int:
        """Where the unsharded storage is now."""
        return self._unsharded.untyped_storage().data_ptr()

    def unshard(self) -> None:
        """Start gathering; on a rank that computes nothing, start sending."""
        comm = self._comm
        if comm.gather_channel.group is None and self._is_shard_itself:
            return
        with comm.on_stream(comm.all_gather_stream):
            # Memory allocated on this stream may have been freed by the last reshard while
            # kernels of the compute stream still read it; the optimizer wrote the shard there.
            comm.all_gather_stream.wait_event(comm.compute_event)
            if comm.is_receiver and not self._is_shard_itself:
                numel, itemsize = self.layout.numel, self.param_dtype.itemsize
                self._unsharded.untyped_storage().resize_(numel * itemsize)
            is_alone = comm.gather_channel.group is None  # then the copy changes the dtype
            shard = self.flat_shard if is_alone else self.flat_shard.to(self.param_dtype)
            self._gather = all_gather_uneven(
                self._unsharded if comm.is_receiver else None,
                shard,
                self.layout.shard_numels,
                channel=comm.gather_channel,
                receivers=comm.receivers,
            )

    def wait_for_unshard(self) -> None:
        """Until the compute stream may read the parameters (and the modules see them)."""
        comm = self._comm
        if self._gather is not None:
            with comm.on_stream(comm.all_gather_stream):
                self._gather.wait()
                event = comm.record_event(comm.all_gather_stream)
            comm.current_stream().wait_event(event)
            comm.keep_until_sent(self._gather)
            self._gather = None
        if comm.is_receiver:
            for slot, param in zip(self.slots, self.unsharded_params, strict=True):
                slot.put(param)

    def reshard(self) -> None:
        """Free the unsharded storage; the modules see the shards again."""
        self.show_shards()
        if not self._is_shard_itself:
            self._unsharded.untyped_storage().resize_(0)

    def show_shards(self) -> None:
        """Let the modules see this rank's row boxes."""
        for slot, param in zip(self.slots, self.sharded_params, strict=True):
            slot.put(param)

    # Gradients #

    def begin_backward(self) -> None:
        """Get ready to accumulate gradients of this rank's microbatches."""
        if not self.is_trainable or self._is_accumulating:
            return
        self._is_accumulating = True
        if not self._is_alone:
            comm = self._comm
            self._unsharded_grad = comm.buffers.lend(
                self.layout.numel, dtype=self.reduce_dtype, device=comm.device
            )

    def _accumulate(self, index: int, param: Tensor) -> None:
        # Called by autograd right after it has set param.grad, while that is still in cache.
        if not self._is_accumulating:
            raise RuntimeError(
                f"{self.slots[index].fqn}: a gradient arrived outside of model.backward(). "
                f"Call model.backward(loss_sum, num_tokens) instead of loss.backward()."
            )
        grad = param.grad
        if grad is None:  # it goes into something that sends no gradient back
            return
        total = self._sums.get(index)
        if total is None:
            if self._unsharded_grad is None:
                total = grad.to(self.reduce_dtype)
            else:
                total = self._unsharded_part(self._unsharded_grad, index)
                total.copy_(grad)
            self._sums[index] = total
        elif total is not grad:
            total.add_(grad)
        # Autograd itself adds what comes next, where it can.
        param.grad = total if total.dtype == param.dtype else None

    def _unsharded_part(self, flat: Tensor, param: int) -> Tensor:
        span = self.layout.param_spans[param]
        return flat[span.start : span.stop].view(self.slots[param].shape)

    def _end_accumulating(self) -> None:
        self._is_accumulating = False
        for param in self.unsharded_params:
            param.grad = None

    def reduce(self) -> None:
        """Start summing the gradients of all computing ranks into the shards' owners."""
        comm = self._comm
        self._end_accumulating()
        self.has_grad = [i in self._sums for i in range(len(self.slots))]
        grad = self._unsharded_grad
        if grad is not None:
            self._sums = {}
            for gap in self.layout.gap_spans:
                grad[gap.start : gap.stop].zero_()
            for i, has_grad in enumerate(self.has_grad):
                if not has_grad:
                    self._unsharded_part(grad, i).zero_()
        own_numel = self.layout.shard_numels[self._position]
        if self._is_private:  # so there is no reduction, on any rank
            if not own_numel:
                self._reduced = torch.empty(0, dtype=self.reduce_dtype, device=comm.device)
            return
        comm.reduce_scatter_stream.wait_stream(comm.current_stream())
        with comm.on_stream(comm.reduce_scatter_stream):
            self._reduced = torch.empty(own_numel, dtype=self.reduce_dtype, device=comm.device)
            self._reduction = reduce_scatter_uneven(
                self._reduced,
                grad,
                self.layout.shard_numels,
                channel=comm.reduce_channel,
                contributors=comm.receivers,
                scratch=comm.buffers,
            )

    def finish_reduce(self) -> None:
        """Until this rank's part of the sum is there and nobody reads its gradients."""
        comm = self._comm
        if self._reduction is not None:
            with comm.on_stream(comm.reduce_scatter_stream):
                self._reduction.wait()
                self._reduction.wait_sent()
                event = comm.record_event(comm.reduce_scatter_stream)
            comm.current_stream().wait_event(event)
            self._reduction = None
            if self._unsharded_grad is not None:
                # Only now: peers and the reduce stream were reading it.
                comm.buffers.take_back(self._unsharded_grad)
        self._unsharded_grad = None

    @torch.no_grad()
    def set_sharded_grads(self, has_grad: Sequence[bool]) -> None:
        """Give the shards their gradients, added to those there; None where no rank has one."""
        reduced, self._reduced = self._reduced, None
        sums, self._sums = self._sums, {}
        self.has_grad = [False] * len(self.slots)
        if reduced is None and not sums:
            return  # the unit is never visited
        flat_grad = None if reduced is None else reduced.to(self.orig_dtype)
        for i, param in enumerate(self.sharded_params):
            if param.requires_grad != self.is_trainable:
                raise RuntimeError(
                    f"{self.slots[i].fqn}: requires_grad was changed after HetFSDP was made. "
                    f"Freeze and unfreeze parameters before wrapping the model."
                )
            if not has_grad[i]:
                continue
            if flat_grad is None:
                grad = sums[i].to(self.orig_dtype).view_as(param)
            else:
                grad = self._box(flat_grad, i)
            if param.grad is None:
                param.grad = grad
            else:
                param.grad += grad

    def drop_grads(self) -> None:
        """Forget gradients of an unfinished or invalid step."""
        if self._unsharded_grad is not None:
            self._comm.buffers.take_back(self._unsharded_grad)
        self._unsharded_grad = None
        self._end_accumulating()
        self._sums = {}
        self._reduced = None
        self.has_grad = [False] * len(self.slots)


def _refuse_grad(fqn: str, sharded_param: Tensor) -> None:
    # Autograd never reaches the shards, unless a module's parameter is used without calling it.
    sharded_param.grad = None
    raise RuntimeError(
        f"{fqn} is used outside of the forward of its unit, where this rank sees only its own "
        f"rows. Use it inside, or make the module that uses it a unit: HetFSDP(units=[...])."
    )
