"""Cuts the arguments of a call to this rank's tokens of its context group's samples."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardhet.fsdp.microbatch.signature import CHECKSUM_END, Arguments, hash_rows
from shardhet.records.layout import Span
from shardhet.records.stages import token_spans

POSITIONS, MASK, LABELS = "position_ids", "attention_mask", "labels"  # as transformers has them
NO_LABEL = -100


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

    def documents(self, samples: Span, num_rows: int) -> list[tuple[int, tuple[Span, ...]]]:
        """What these samples consist of, of which attention has so many rows: how many rows
        are alike, and what they are.
        """
        if self.documents_by_row is None:
            return [(num_rows, (Span(0, self.num_tokens),))]
        rows = self.documents_by_row[samples.start : samples.stop]
        if len(set(rows)) == 1:  # also where other dimensions are joined with the samples
            return [(num_rows, rows[0])]
        if samples.numel != num_rows:
            raise ValueError(
                f"context groups: attention has {num_rows} rows for {samples.numel} samples "
                "of unlike documents or padding. Keep samples in its first dimension."
            )
        return [(len(list(same)), each) for each, same in groupby(rows)]


class TokenCutter:
    """Cuts calls of a model for one member of a context group."""

    def __init__(self, module: nn.Module, shares: Sequence[float], member: int) -> None:
        self._shares, self._member = shares, member
        inside = getattr(module, "get_base_model", lambda: module)()  # below PEFT's
        self._loss = getattr(inside, "loss_function", None)
        self._forward: Callable[..., Any] = module.forward
        config = getattr(inside, "config", None)
        self._looks_for_documents = hasattr(config, "_attn_implementation")
        self._names = list(inspect.signature(inside.forward).parameters)
        self.now: TokenCut | None = None  # of the last forward
        self.checksum = 0.0  # of its samples

    def filled(self, arguments: Arguments) -> Arguments:
        """The arguments with the positions of tokens, where the model takes these; and with a
        mask, by which transformers does not look for documents among positions that are cut.

        It has 1 for tokens and 0 for padding, or for each document a number below 0.
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
        if self._looks_for_documents and MASK in self._names and mask is None:
            mask = torch.full(shape, -1, device=first.device)
            if positions is not None:  # whose positions begin anew
                mask[:, 1:] -= (positions.diff(dim=-1) != 1).cumsum(-1)
            kwargs = {**kwargs, MASK: mask}
        if POSITIONS in self._names and positions is None:
            at = torch.arange(shape[1], device=first.device)
            kwargs = {**kwargs, POSITIONS: at.expand(shape)}
        return args, kwargs, loss_inputs

    def cut(self, arguments: Arguments, check: Callable[[Arguments, bool], None]) -> Arguments:
        """This rank's tokens of the arguments; labels that the model shifts are shifted.

        ``check`` raises if the model cannot be computed by tokens, given whether any sample
        begins with padding.
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
        number = int(hash_rows(first.detach().reshape(1, -1)))
        self.checksum = float((number + 31 * num_tokens) % CHECKSUM_END)
        if mask is not None:
            kwargs = {**kwargs, MASK: torch.ones_like(mask)}
        labels = kwargs.get(LABELS)
        if isinstance(labels, Tensor) and self.shifts_labels:
            kwargs = {"shift_labels": shifted(labels), **kwargs}

        def of(tensor: Tensor) -> Tensor:
            dims = [i for i, length in enumerate(tensor.shape) if length == num_tokens]
            if not dims or (dims == [0] and len(first) == num_tokens):  # as many samples
                return tensor
            if 1 not in dims:
                raise ValueError(
                    f"context groups: an argument has shape {tuple(tensor.shape)}, with the "
                    f"{num_tokens} tokens of a sample elsewhere than in its second dimension. "
                    "Pass [samples, tokens, ...], and masks of documents as such."
                )
            return now.of(tensor, 1)

        whole = args, kwargs, loss_inputs
        cut: Arguments = tree_map_only(Tensor, of, whole)
        check(whole, mask is not None and not bool(mask[:, 0].all()))
        return cut

    @property
    def shifts_labels(self) -> bool:
        """Whether the model's own loss is of the next token at each position."""
        return getattr(self._loss, "__name__", "") == "ForCausalLMLoss"

    def own_tokens(self, tensor: Tensor, are_labels: bool) -> Tensor:
        """See ``HetFSDP.own_tokens``."""
        if not len(tensor):
            return tensor
        cut = TokenCut(tuple(token_spans(tensor.shape[1], self._shares)), self._member, None)
        return cut.of(shifted(tensor) if are_labels and self.shifts_labels else tensor, 1)

    def check_number(self, num_tokens: float, num_samples: int) -> None:
        """Raise ``ValueError`` if a loss is said to be of more tokens than this rank has."""
        most = 0 if self.now is None else num_samples * self.now.numels[self._member]
        if num_tokens > most:
            raise ValueError(
                f"model.backward: {num_tokens:g} tokens but this rank has {most} of those that "
                "its context group computes together. Count model.own_tokens(labels), or have "
                "the model return (loss_sum, num_tokens)."
            )


def shifted(labels: Tensor) -> Tensor:
    """The label of the next token at each place, and none at the last."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=NO_LABEL)


def documents_in(mask: Tensor) -> tuple[tuple[Span, ...], ...] | None:
    """The runs of equal numbers in each row, [samples, tokens], where all above 0 are one; None
    if each row is one run.
    """
    if mask.dim() != 2:
        raise ValueError(
            f"context groups: {MASK} has shape {tuple(mask.shape)} but must be [samples, "
            "tokens], with 0 for padding. Pass the positions of packed documents as "
            f"{POSITIONS}."
        )
    mask = mask.long().clamp(max=1)
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
