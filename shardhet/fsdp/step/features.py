"""Features of the samples of all ranks, with gradients, for losses that compare samples.

A contrastive loss compares each sample with all others, so it cannot be computed from a rank's
own.  Each rank computes the terms of its own samples from the features of all:

    image, text = model(pixels, tokens)            # [own, D] each
    images, texts = map(shardhet.gather_features, (image, text))  # [all, D], in plan order
    own = model.own_samples                        # their places among all
    targets = torch.arange(own.start, own.stop)
    loss_sum = cross_entropy(image @ texts.T, targets, reduction="sum") + ...
    model.backward(loss_sum, len(own))

In backward the gradients for all features are summed over ranks and each rank takes its rows:
a reduce-scatter, which a rank without samples takes part in too.  Autograd runs the nodes of
gathers in the reverse order of their calls, before any unit's, so all ranks do.
"""

from math import prod
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from shardhet.comm.channel import Channel
from shardhet.comm.collectives import reduce_scatter_uneven, whole_of
from shardhet.comm.peers import Peers
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.step.rounds import Round, StepInProgress


class _Shape(NamedTuple):
    """What one gather moves."""

    rows: tuple[int, ...]  # by position
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numels(self) -> list[int]:
        return [rows * prod(self.row_shape) for rows in self.rows]


class FeatureGathers:
    """The gathers of features since the last forward of one model."""

    # Those of the model that was called last.
    latest: "ClassVar[ref[FeatureGathers] | None]" = None

    def __init__(
        self, comm: CommContext, control: Channel, peers: Peers, step: StepInProgress
    ) -> None:
        self.has_parts = False  # whether the plan has several rounds, or stages
        self.has_groups = False
        self._comm = comm
        self._control = control
        self._peers = peers
        self.anchor = torch.zeros((), device=comm.device, requires_grad=True)
        self._step = step
        self._round: Round | None = None  # whose features are gathered
        self.open: list[_Shape] = []  # whose gradients have not been reduced

    def gather(self, features: Tensor) -> Tensor:
        """See ``gather_features``."""
        with self._peers.guard("gather_features"):
            if self.has_groups:
                raise ValueError(
                    "gather_features: the plan has context groups, of which no device has "
                    "features of whole samples. Give a plan without context groups."
                )
            if self._step.is_in_forward:
                raise RuntimeError(
                    "gather_features was called inside the model, where a rank without samples "
                    "computes nothing. Return the features, and call it between model(...) and "
                    "model.backward."
                )
            if self.has_parts and torch.is_grad_enabled():
                raise ValueError(
                    "gather_features: the plan has several rounds, or stages, of which each "
                    "has features of its own samples only. Give a plan of one round without "
                    "stages, or disable gradients."
                )
            if not features.dim():
                raise ValueError(
                    "gather_features: a single number has no rows. Pass a tensor with one row "
                    "per sample."
                )
            self._control.enter("gather_features")
            if self._round is not self._step.round:
                self._round, self.open = self._step.round, []
            needs_grad = torch.is_grad_enabled() and features.requires_grad
            mine = (features.shape[0], tuple(features.shape[1:]), features.dtype, needs_grad)
            rows, shapes, dtypes, flags = zip(
                *self._control.exchange_objects(mine), strict=True
            )
            if len({*shapes}) > 1 or len({*dtypes}) > 1:
                raise ValueError(
                    f"gather_features: ranks pass rows of shapes {shapes} and dtypes {dtypes}. "
                    "Pass rows of one shape and dtype on every rank."
                )
            shape = _Shape(rows, features.shape[1:], features.dtype)
            if not any(flags):
                return self.all_gather(shape, features)
            self.open.append(shape)
            gathered: Tensor = _Gathered.apply(  # type: ignore[no-untyped-call]
                self.anchor, features, self, len(self.open) - 1
            )
            return gathered

    def all_gather(self, shape: _Shape, features: Tensor) -> Tensor:
        """The rows of all ranks, [sum(shape.rows), *shape.row_shape].  Collective."""
        own = features.detach().contiguous().view(-1)
        whole = whole_of(own, shape.numels, self._comm.gather_channel)
        return whole.view(-1, *shape.row_shape)

    def reduce(self, index: int, grad: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' ``grad``.  Collective."""
        self.finish(index)
        return self._reduce(self.open.pop(), grad)

    def finish(self, index: int = -1) -> None:
        """Take part in the reductions of gathers after this one, for which this rank has no
        gradients.  Collective.
        """
        if self._round is not self._step.round:  # a forward without backward
            self.open = []
        while len(self.open) > index + 1:
            self._reduce(self.open.pop(), None)

    def _reduce(self, shape: _Shape, grad: Tensor | None) -> Tensor:
        comm, position = self._comm, self._control.position
        if grad is None:
            grad = torch.zeros(sum(shape.numels), dtype=shape.dtype, device=comm.device)
        own = grad.new_empty(shape.numels[position])
        reduce_scatter_uneven(
            own,
            grad.contiguous().view(-1),
            shape.numels,
            channel=comm.reduce_channel,
            contributors=range(self._control.world_size),
            scratch=comm.buffers,
        ).complete()
        return own.view(-1, *shape.row_shape)


class _Gathered(torch.autograd.Function):
    """A gather as a node of the graph, also where this rank's features need no gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, features: Tensor, gathers: FeatureGathers, index: int
    ) -> Tensor:
        ctx.gathers, ctx.index = gathers, index
        return gathers.all_gather(gathers.open[index], features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, ctx.gathers.reduce(ctx.index, grads[0]), None, None


def gather_features(features: Tensor) -> Tensor:
    """Return the rows of all ranks' ``features``, [all samples, ...], in the plan's order.

    For losses that compare samples with each other.  Gradients flow back to every rank's own
    rows.  Collective: call it between ``model(...)`` and ``model.backward`` on every rank, also
    on those without samples, which pass the empty features that the model has returned.
    ``model.own_samples`` says which rows are this rank's.  Its loss is the sum of their terms,
    and its number of tokens theirs.  A rank that computes the mean over all samples passes it
    times its own number: ``model.backward(mean * len(features), len(features))``.

    Args:
        features: [own samples, ...], of one dtype and row shape on every rank.

    Raises ``RuntimeError`` on every rank if no model was called before, or from inside of one,
    and ``ValueError`` if rows of ranks differ in shape or dtype, or, with gradients, if the
    plan has several rounds, or stages.
    """
    latest = FeatureGathers.latest
    gathers = None if latest is None else latest()
    if gathers is None:
        raise RuntimeError("gather_features: no HetFSDP model was called yet. Call it first.")
    return gathers.gather(features)
