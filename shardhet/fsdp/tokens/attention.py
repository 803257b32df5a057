"""Attention of a context group: this rank's tokens see the keys and values of all members.

Everything else in a unit is computed token by token.  While a unit of a step runs,
``F.scaled_dot_product_attention``, which torch's modules and transformers' "sdpa" call, is
that of ``InGroup``: it gathers keys and values, and in backward sums up their gradients in the
order of members.  All members call it equally often and in one order: they run the same code
for the same microbatches.  A unit that all of them recompute gathers once more; where only some
do, these keep what they have received.

Probes, and calls outside of steps, are not among them: they see what they are given.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from shardhet.comm.channel import Channel
from shardhet.comm.collectives import own_of_sum, whole_of
from shardhet.comm.devices import BufferPool
from shardhet.comm.groups import part_of
from shardhet.fsdp.microbatch.surroundings import VisitContext
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.tokens.cutting import TokenCut, TokenCutter
from shardhet.records.layout import Span
from shardhet.records.plan import Plan

attention = F.scaled_dot_product_attention


@contextmanager
def attending_by(function: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``function`` is in place of ``F.scaled_dot_product_attention``."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = function
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The context group of this rank, which is alone if the plan has it in none."""

    channel: Channel  # among its members
    cutter: TokenCutter
    # Whether this rank recomputes a unit and not all members do: it keeps what it received.
    keeps: Callable[[str], bool]

    @classmethod
    def of(
        cls, plan: Plan, module: nn.Module, comm: CommContext, control: Channel
    ) -> "ContextGroup":
        """That of a plan with groups.  Collective: all ranks make all, in plan order."""
        own = plan.context_group(control.position)
        member, channel = own.index(control.position), Channel(None, (0,), 0)
        for group in plan.context_groups or ():
            part = part_of(
                comm.all_gather_channel,
                group,
                purpose="tokens",
                control=control,
                device=comm.device,
            )
            if part is not None:
                ranks = tuple(part.rank_by_position[i] for i in group)
                channel = Channel(part.group, ranks, member)

        def keeps(unit_fqn: str) -> bool:
            recomputed = [plan.ranks[i].recomputes(unit_fqn) for i in own]
            return recomputed[member] and not all(recomputed)

        shares = plan.token_shares(control.position)
        return cls(channel, TokenCutter(module, shares, member), keeps)

    def around(self, samples: Sequence[Span], *, keeps: bool = False) -> "InGroup":
        """What surrounds a visit of a unit, whose microbatches have these samples."""
        assert self.cutter.now is not None
        sizes = {span.start: span.numel for span in samples}
        return InGroup(self.channel, self.cutter.now, sizes, keeps=keeps)


class InGroup(VisitContext):
    """Attention among the members, in the forward of a unit and where it is repeated."""

    def __init__(
        self, channel: Channel, cut: TokenCut, sizes: Mapping[int, int], *, keeps: bool
    ) -> None:
        self._channel, self._cut, self._sizes, self._keeps = channel, cut, sizes, keeps
        # By microbatch, keys and values of all members, for where backward repeats forward.
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def in_function(self, start: int, is_repeated: bool) -> Iterator[None]:
        """Replace attention."""
        kept = self._kept.pop(start, None) if is_repeated else None
        if self._keeps and not is_repeated:
            self._kept[start] = []
        is_fast = mha.get_fastpath_enabled()
        mha.set_fastpath_enabled(False)  # it computes attention without calling the function
        try:
            with attending_by(partial(self._attend, start, kept)):
                yield
        finally:
            mha.set_fastpath_enabled(is_fast)

    def _attend(
        self,
        start: int,
        kept: list[tuple[Tensor, Tensor]] | None,
        query: Tensor,  # [..., tokens, channels]
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        num_own = self._cut.numels[self._cut.member]
        if attn_mask is not None or {x.shape[-2] for x in (query, key, value)} != {num_own}:
            raise ValueError(
                "context groups: attention with a mask of its own, as of a window, or not "
                "among the tokens of samples. Give this model a plan without context groups."
            )
        arrived = kept.pop(0) if kept is not None else None
        gather: Callable[..., tuple[Tensor, Tensor]] = _Gathered.apply
        key, value = gather(key, value, arrived, self._cut, self._channel)
        if self._keeps and kept is None:
            self._kept[start].append((key.detach(), value.detach()))
        attend = partial(attention, dropout_p=dropout_p, **options)
        rows, at = [], 0
        with attending_by(attention):  # which torch calls once more for a mask
            found = self._cut.documents(Span(start, start + self._sizes[start]), len(query))
            for number, documents in found:
                own = slice(at, at := at + number)
                some = (query[own], key[own], value[own])
                rows.append(_attend_rows(attend, *some, self._cut.own, documents, is_causal))
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def _attend_rows(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: tuple[Span, ...],
    documents: tuple[Span, ...],
    is_causal: bool,
) -> Tensor:
    """Attention of the tokens ``own`` within each of the documents of a sample.

    A query sees the keys from the start of its document up to itself.  No mask is made for all
    pairs: kernels know one that is causal and ends with the last key.
    """
    found, at = [], 0
    for span in own:
        for document in documents:
            first, last = max(span.start, document.start), min(span.stop, document.stop)
            if first >= last:
                continue
            stop, mask = (last if is_causal else document.stop), None
            if is_causal and first > document.start:
                mask = causal_lower_right(last - first, stop - document.start)
            keys = slice(document.start, stop)
            found.append(
                attend(
                    query[..., at : at + last - first, :],
                    key[..., keys, :],
                    value[..., keys, :],
                    attn_mask=mask,
                    is_causal=is_causal and mask is None,
                )
            )
            at += last - first
    return torch.cat(found, dim=-2)


class _Gathered(torch.autograd.Function):
    """Keys and values of all tokens, in the order of the sample."""

    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,
        value: Tensor,
        arrived: tuple[Tensor, Tensor] | None,
        cut: TokenCut,
        channel: Channel,
    ) -> Any:
        pair = key, value
        ctx.cut, ctx.channel, ctx.shapes = cut, channel, [each.shape for each in pair]
        if arrived is not None:
            return tuple(each.view_as(each) for each in arrived)
        splits = _splits(ctx.shapes, cut)
        whole = whole_of(torch.cat([each.reshape(-1) for each in pair]), splits, channel)
        parts = [
            _shaped(part, ctx.shapes, numel)
            for part, numel in zip(whole.split(splits), cut.numels, strict=True)
        ]
        return tuple(_in_order(of_members, cut) for of_members in zip(*parts, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cut, splits = ctx.cut, _splits(ctx.shapes, ctx.cut)
        pieces = [
            torch.cat([grad.narrow(-2, s.start, s.numel) for s in spans], -2).reshape(-1)
            for spans in cut.spans_by_member
            for grad in grads
        ]
        own = own_of_sum(torch.cat(pieces), splits, ctx.channel, BufferPool())
        return *_shaped(own, ctx.shapes, cut.numels[cut.member]), None, None, None


def _splits(shapes: Sequence[torch.Size], cut: TokenCut) -> list[int]:
    """The elements of keys and values together of each member, given the shapes of one's."""
    of_token = sum(shape.numel() // shape[-2] for shape in shapes)
    return [of_token * numel for numel in cut.numels]


def _shaped(flat: Tensor, shapes: Sequence[torch.Size], num_tokens: int) -> list[Tensor]:
    """Keys and values of so many tokens, one after the other in ``flat``."""
    wanted = [torch.Size((*shape[:-2], num_tokens, shape[-1])) for shape in shapes]
    parts = flat.split([shape.numel() for shape in wanted])
    return [part.view(shape) for part, shape in zip(parts, wanted, strict=True)]


def _in_order(parts: Sequence[Tensor], cut: TokenCut) -> Tensor:
    """The members' tokens in the order of the sample."""
    chunks = [
        chunk
        for part, spans in zip(parts, cut.spans_by_member, strict=True)
        for chunk in zip(spans, part.split([span.numel for span in spans], -2), strict=True)
    ]
    return torch.cat([each for _, each in sorted(chunks, key=lambda c: c[0].start)], -2)
