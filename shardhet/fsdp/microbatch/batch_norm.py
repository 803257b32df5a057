"""Running statistics of batch norm, equal to those of one process that ran all microbatches.

Plain PyTorch updates a batch norm's buffers once per microbatch, one after the other.  Here the
microbatches are on different ranks, so each rank only notes the statistics of its own.  At the
end of a training forward every rank applies all of them in the order of the samples:

    running = (1 - momentum) * running + momentum * statistics of a microbatch

Recomputations and probes note nothing.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shardhet.comm.calls import HostCopy, to_device
from shardhet.comm.channel import Channel
from shardhet.records.plan import Plan

# Of one call: the index of its norm, and its statistics, mean and unbiased variance.
_Noted = tuple[int, Tensor]  # [2 * channels]


class BatchNorms:
    """All batch norms of a model."""

    def __init__(self, module: nn.Module) -> None:
        self._is_frozen = False
        self._norms: list[tuple[str, Any]] = [
            (fqn, each) for fqn, each in module.named_modules() if isinstance(each, _BatchNorm)
        ]
        self._noted: list[tuple[int, list[_Noted]]] | None = None  # (first sample, calls)
        for i, (fqn, each) in enumerate(self._norms):
            if isinstance(each, nn.SyncBatchNorm):
                raise ValueError(
                    f"{fqn}: a SyncBatchNorm sums over ranks in every microbatch, but ranks "
                    "may have different numbers of microbatches. Use BatchNorm, whose "
                    "statistics are those of one microbatch."
                )
            forward = partial(self._forward, i, each, each.forward)
            each.forward = forward

    def __len__(self) -> int:
        return len(self._norms)

    def warn(self, plan: Plan, *, position: int) -> None:
        """Warn, at the first position, that statistics are those of the plan's microbatches."""
        sizes_by_rank = [rank.microbatch_sizes for rank in plan.ranks]
        if self._norms and position == 0 and sum(map(len, sizes_by_rank)) > 1:
            names = ", ".join(fqn for fqn, _ in self._norms)
            warnings.warn(
                f"{names}: a batch norm takes the statistics of one microbatch at a time, here "
                f"of {[list(sizes) for sizes in sizes_by_rank]} samples by position of the "
                "plan, so results depend on the plan.",
                stacklevel=3,
            )

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A context in which no sample's result depends on the other samples."""
        self._is_frozen = True
        try:
            yield
        finally:
            self._is_frozen = False

    @contextmanager
    def noting(self, first_sample: int, *, is_repeated: bool) -> Iterator[None]:
        """A context for a microbatch that begins at ``first_sample`` of the global batch."""
        if not self._norms:
            yield
            return
        if is_repeated:
            before, self._noted = self._noted, None
            try:
                yield
            finally:
                self._noted = before
            return
        if self._noted is not None:
            self._noted.append((first_sample, []))
        yield

    def begin(self) -> None:
        """Begin a training forward."""
        self._noted = []

    def drop(self) -> None:
        """Drop the noted statistics."""
        self._noted = None

    @torch.no_grad()
    def apply(self, channel: Channel) -> None:
        """Update the buffers equally on every rank.  Collective if there are batch norms."""
        noted, self._noted = self._noted or [], None
        if not self._norms:
            return
        calls = [(first, each) for first, calls in noted for each in calls]
        mine = [(first, i, norm) for i, (first, (norm, _)) in enumerate(calls)]
        # One copy of all to the host, and one back: the host would wait for each of many.
        seen = [values for _, (_, values) in calls]
        values = HostCopy(torch.cat(seen)).read() if seen else None
        rows = channel.exchange_objects((mine, values))
        found = sorted(
            (
                pair
                for places, of_all in rows
                for pair in zip(places, self._split(of_all, places), strict=True)
            ),
            key=lambda each: each[0],
        )
        if not found:
            return
        ordered = [place for place, _ in found]
        device = self._norms[ordered[0][-1]][1].running_mean.device
        whole = to_device(torch.cat([piece for _, piece in found]), device)
        together: dict[int, Tensor] = {}  # of a microbatch, by norm
        for (*_, index), piece in zip(ordered, self._split(whole, ordered), strict=True):
            if index in together:
                self._update(together)
                together = {}
            together[index] = piece
        self._update(together)

    def _split(self, values: Tensor | None, places: Sequence[tuple[int, ...]]) -> Any:
        """The part of ``values`` of each call: mean and variance, end to end."""
        sizes = [2 * self._norms[index][1].running_mean.numel() for *_, index in places]
        return () if values is None else values.split(sizes)

    def _update(self, seen_by_norm: Mapping[int, Tensor]) -> None:
        """Update the buffers of different norms, each with the statistics of one call."""
        norms = [(self._norms[index][1], seen) for index, seen in seen_by_norm.items()]
        # .data: by version counters these would be taken for writes of the program.
        for norm, _ in norms:
            norm.num_batches_tracked.data.add_(1)
        for momentum, some in groupby(norms, key=lambda each: _momentum(each[0])):
            running, seen = list[Tensor](), list[Tensor]()
            for norm, values in some:
                running += [norm.running_mean.data, norm.running_var.data]
                seen += values.to(norm.running_mean).chunk(2)
            torch._foreach_mul_(running, 1 - momentum)
            torch._foreach_add_(running, seen, alpha=momentum)

    def _forward(
        self, index: int, norm: Any, forward: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._is_frozen:
            return _normalised(norm, args[0] if args else kwargs["input"])
        if not norm.training or norm.running_mean is None:
            return forward(*args, **kwargs)
        names = ("running_mean", "running_var", "num_batches_tracked")
        buffers = {name: norm._buffers[name] for name in names}
        momentum, norm.momentum = norm.momentum, 1.0
        for name in names:
            norm._buffers[name] = torch.zeros_like(buffers[name])
        try:
            output = forward(*args, **kwargs)
            mean, var = norm._buffers["running_mean"], norm._buffers["running_var"]
        finally:
            norm.momentum = momentum
            norm._buffers.update(buffers)
        if self._noted:
            self._noted[-1][1].append((index, torch.cat([mean, var])))
        return output


def _momentum(norm: Any) -> float:
    if norm.momentum is None:  # a cumulative average
        return 1.0 / float(norm.num_batches_tracked)
    return float(norm.momentum)


def _normalised(norm: Any, x: Tensor) -> Tensor:
    """As in evaluation; with mean 0 and variance 1 if there are no running statistics."""
    mean, var = norm.running_mean, norm.running_var
    if mean is None:
        mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return F.batch_norm(x, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps)
