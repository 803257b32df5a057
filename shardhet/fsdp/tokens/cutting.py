"""Cuts the arguments of a call to this rank's tokens of its context group's samples."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardhet.fsdp.microbatch.signature import Arguments, hash_of
from shardhet.records.context import token_spans
from shardhet.records.layout import Span

POSITIONS, MASK, LABELS = "position_ids", "attention_mask", "labels"  # as transformers has them
NO_LABEL = -100
CHECKSUM_END = 2**48  # exact in float64


@dataclass(frozen=True, slots=True)
class TokenCut:
    """Which tokens of the samples of a forward each member has."""

    spans_by_member: tuple[tuple[Span, ...], ...]
    member: int  # this rank
    documents_by_row: tuple[tuple[Span, ...], ...] | None  # None: each sample is one

    @property
    def numels(self) -> list[int]:
        """The number of tokens of each member."""
        return [sum(span.numel for span in spans) for spans in self.spans_by_member]

    @property
    def own(self) -> tuple[Span, ...]:
        """This rank's tokens."""
        return self.spans_by_member[self.member]

    @property
    def num_tokens(self) -> int:
        """Those of a sample."""
        return sum(self.numels)

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor that has all of them in ``dim``."""
        return torch.cat([tensor.narrow(dim, s.start, s.numel) for s in self.own], dim)

    def documents(self, start: int, num_rows: int) -> list[tuple[int, tuple[Span, ...]]]:
        """What the samples from ``start`` on consist of: rows that are alike, and how many."""
        if self.documents_by_row is None:
            return [(num_rows, (Span(0, self.num_tokens),))]
        rows = self.documents_by_row[start : start + num_rows]
        if len(set(rows)) == 1:  # also where other dimensions are joined with the samples
            return [(num_rows, rows[0])]
        if len(rows) != num_rows:
            raise ValueError(
                f"context groups: attention has {num_rows} rows for {len(rows)} samples of "
                "unlike documents or padding. Keep samples in its first dimension."
            )
        return [(len(list(same)), each) for each, same in groupby(rows)]


class TokenCutter:
    """Cuts calls of a model for one member of a context group."""

    def __init__(self, module: nn.Module, shares: Sequence[float], member: int) -> None:
        self._shares, self._member = shares, member
        self._module = module
        inside = getattr(module, "get_base_model", lambda: module)()  # below PEFT's
        self._loss = getattr(inside, "loss_function", None)
        self._forward: Callable[..., Any] = module.forward
        self._names = list(inspect.signature(inside.forward).parameters)
        self.now: TokenCut | None = None  # of the last forward
        self.checksum = 0.0  # of its samples

    def filled(self, arguments: Arguments) -> Arguments:
        """The arguments with the positions of tokens, and in the mask a number for each
        document (0: padding), where the model takes these.
        """
        args, kwargs, loss_inputs = arguments
        first = _first(arguments)
        if first is None:
            return arguments
        names = list(inspect.signature(self._forward).parameters)[: len(args)]
        if any(name in names for name in (POSITIONS, MASK, LABELS)):
            args, kwargs = (), {**dict(zip(names, args, strict=True)), **kwargs}
        shape = first.shape[:2]
        positions, mask = kwargs.get(POSITIONS), kwargs.get(MASK)
        if MASK in self._names and mask is None:
            mask = torch.ones(shape, dtype=torch.long, device=first.device)
            if positions is not None:  # transformers: packed documents begin anew
                mask[:, 1:] += (positions.diff(dim=-1) != 1).cumsum(-1)
            kwargs = {**kwargs, MASK: mask}
        if POSITIONS in self._names and positions is None:
            at = torch.arange(shape[1], device=first.device)
            kwargs = {**kwargs, POSITIONS: at.expand(shape)}
        return args, kwargs, loss_inputs

    def cut(self, arguments: Arguments, check: Callable[[Arguments], None]) -> Arguments:
        """This rank's tokens of the arguments; labels that the model shifts are shifted.

        ``check`` raises if the model cannot be computed by tokens.
        """
        args, kwargs, loss_inputs = self.filled(arguments)
        first = _first(arguments)
        self.now = None
        if first is None or not len(first):
            return arguments
        num_tokens, mask = first.shape[1], kwargs.get(MASK) if MASK in self._names else None
        spans = tuple(token_spans(num_tokens, self._shares))
        documents = None if mask is None else documents_in(mask)
        self.now = now = TokenCut(spans, self._member, documents)
        self.checksum = float((hash_of(first) + 31 * num_tokens) % CHECKSUM_END)
        if mask is not None:
            kwargs = {**kwargs, MASK: torch.ones_like(mask)}
        labels = kwargs.get(LABELS)
        if isinstance(labels, Tensor) and self.shifts_labels:
            kwargs = {**kwargs, "shift_labels": shifted(labels)}

        def of(tensor: Tensor) -> Tensor:
            has_tokens = tensor.dim() > 1 and tensor.shape[1] == num_tokens
            return now.of(tensor, 1) if has_tokens else tensor

        check((args, kwargs, loss_inputs))
        cut: Arguments = tree_map_only(Tensor, of, (args, kwargs, loss_inputs))
        return cut

    @property
    def shifts_labels(self) -> bool:
        """Whether the model's own loss is of the next token at each position."""
        return getattr(self._loss, "__name__", "") == "ForCausalLMLoss"

    def own_tokens(self, tensor: Tensor) -> Tensor:
        """This rank's tokens of what has one entry for each token, [samples, tokens, ...]."""
        cut = TokenCut(tuple(token_spans(tensor.shape[1], self._shares)), self._member, None)
        return cut.of(tensor, 1)


def shifted(labels: Tensor) -> Tensor:
    """The label of the next token at each place, and none at the last."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=NO_LABEL)


def documents_in(mask: Tensor) -> tuple[tuple[Span, ...], ...] | None:
    """The runs of equal numbers in each row, [samples, tokens]; None if all rows are one."""
    if mask.dim() != 2:
        raise ValueError(
            f"context groups: {MASK} has shape {tuple(mask.shape)} but must be [samples, "
            "tokens], with a number for each document and 0 for padding."
        )
    if not bool((mask != mask[:, :1]).any()):
        return None
    rows = []
    for row in mask.tolist():
        at, found, numbers = 0, [], []
        for number, run in groupby(row):
            found.append(Span(at, at := at + len(list(run))))
            numbers += [number] * bool(number)
        if len(set(numbers)) < len(numbers):
            raise ValueError(
                f"context groups: {MASK} leaves out tokens within a document. Drop them, or "
                "pad at the ends of samples."
            )
        rows.append(tuple(found))
    return tuple(rows)


def _first(arguments: Arguments) -> Tensor | None:
    """The first tensor with tokens."""
    leaves = tree_leaves(arguments)
    return next((e for e in leaves if isinstance(e, Tensor) and e.dim() > 1), None)
