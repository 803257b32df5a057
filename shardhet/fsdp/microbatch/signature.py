"""The arguments of a call of a model: which of them hold samples, and how to pass fewer."""

import inspect
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from shardhet.comm import devices
from shardhet.comm.calls import to_device
from shardhet.fsdp.microbatch.batching import CountRows, Rows, flatten, rows_by_leaf, unflatten

Arguments = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]
BatchDims = int | Mapping[str, int | None]

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, slice, range, type, Enum, FunctionType,
    BuiltinFunctionType, partial, torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format,
)  # fmt: skip
# Values of these types choose what a model does; of a number, whether it is 0.
CHOOSING = (
    type(None), bool, str, bytes, Enum, torch.dtype, FunctionType, BuiltinFunctionType
)  # fmt: skip


LOSS_INPUTS = "loss_inputs"  # the name of all of them
CHECKSUM_END = 2**48  # exact in float64
MIXER = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, odd (Knuth, TAOCP 3, section 6.4)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_plain(leaf: Any) -> bool:
    """Whether the argument has no state that a call could change."""
    return isinstance(leaf, PLAIN)


def choice_of(value: Any) -> Hashable:
    """What of a value may choose what a model does with its tensors."""
    if isinstance(value, CHOOSING):
        return value
    kind: Any = type(value)
    return (kind, value != 0) if isinstance(value, int | float) else kind


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The arguments of one call of a model, flattened."""

    leaves: tuple[Any, ...]
    spec: TreeSpec  # of (args, kwargs, loss_inputs)
    names: tuple[str, ...]  # by leaf: the argument that it belongs to
    batch_dims: tuple[int | None, ...]  # by leaf: the dimension that holds the batch, if any
    are_named: tuple[bool, ...]  # by leaf: whether the user named its argument in batch_dim
    num_samples: int
    rows: tuple[Rows | None, ...]  # by leaf: those of each sample, if it is ragged
    is_ragged: bool = False  # whether the model has ragged arguments
    is_behind: bool = False  # whether other ranks have rows of ragged ones, and this one none
    cut_from: "ModelCall | None" = None  # by ``in_rounds``
    of_loss: tuple[Hashable, ...] = ()  # what may choose what ``loss_fn`` does

    @classmethod
    def of(
        cls,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loss_inputs: tuple[Any, ...],
        batch_dim: BatchDims,
        *,
        ragged: Mapping[str, CountRows],
        planned: int,
    ) -> "ModelCall":
        """The call of ``forward``; its first tensor determines the number of samples.

        Tensors without rows mean that there are no samples, unless they are ``ragged``.
        ``planned`` is what the plan gives this rank.  Raises ``ValueError`` if only some have
        no rows and it is not clear.
        """
        leaves, spec = flatten((args, dict(kwargs), loss_inputs))
        names = _names(forward, args, kwargs, loss_inputs)
        dims = [None if name in ragged else _dim_of(name, batch_dim) for name in names]
        lengths = [
            (name, leaf.shape[dim])
            for name, leaf, dim in zip(names, leaves, dims, strict=True)
            if isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim
        ]
        short = [leaf for leaf in leaves if isinstance(leaf, Tensor)] if any(dims) else []
        if short and not lengths:
            raise ValueError(
                f"model(...): no argument has the dimension that batch_dim says, {batch_dim}; "
                f"their shapes are {[tuple(each.shape) for each in short]}."
            )
        num_samples = lengths[0][1] if lengths else 0
        empty = next((name for name, length in lengths if not length), None)
        if empty is not None and num_samples > planned:
            num_samples = 0  # the first one has no samples at all
        if empty is not None and num_samples:
            raise ValueError(
                f"model(...): argument {empty!r} has no rows but {lengths[0][0]!r} has "
                f"{num_samples}. If this rank has no samples, give no argument any; if one of "
                f"them never has samples, pass HetFSDP(batch_dim={{{empty!r}: None}})."
            )
        unseen = [type(x).__name__ for x in leaves if not isinstance(x, (Tensor, *PLAIN))]
        if unseen and not lengths:
            raise ValueError(
                f"model(...): its arguments are objects ({', '.join(unseen)}) whose tensors "
                "HetFSDP cannot see, and nothing else has samples. Pass tensors, or tuples, "
                "dicts or plain dataclasses of them."
            )
        named = [isinstance(batch_dim, Mapping) and name in batch_dim for name in names]
        rows = rows_by_leaf(ragged, names, leaves, num_samples)
        return cls(
            tuple(leaves),
            spec,
            tuple(names),
            tuple(dims),
            tuple(named),
            num_samples,
            tuple(rows),
            bool(ragged),
        )

    def brought(self, device: torch.device, dtype: torch.dtype | None) -> "ModelCall":
        """The call with its tensors on ``device``, none of them copied twice, and arguments in
        floating point in ``dtype``, as with FSDP2's ``cast_forward_inputs``.
        """
        copies: dict[tuple[int, bool], Tensor] = {}

        def bring(name: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            casts = dtype is not None and leaf.is_floating_point() and name != LOSS_INPUTS
            key = (id(leaf), casts)
            if key not in copies:
                there = _on(device, leaf, name)
                copies[key] = there.to(dtype) if casts else there
            return copies[key]

        return replace(self, leaves=tuple(map(bring, self.names, self.leaves)))

    @property
    def key(self) -> Hashable:
        """Equal for calls of one kind, whatever the lengths of their tensors."""
        looks = [
            (leaf.dtype, leaf.dim(), factor == 1)
            if isinstance(leaf, Tensor)
            else choice_of(leaf)
            for leaf, _, factor in self._factors()
        ]
        ragged = tuple(each and any(each) for each in self.rows)
        return (str(self.spec), *looks, self.of_loss, ragged, self.is_behind)

    @property
    def has_rows(self) -> bool:
        """Whether any sample has rows of a ragged argument."""
        return any(map(any, filter(None, self.rows)))

    @property
    def lengths(self) -> tuple[Any, ...]:
        """By leaf: the shape of a tensor, without the dimension that holds the samples."""
        return tuple(
            tuple(n for i, n in enumerate(leaf.shape) if not (factor and i == dim))
            if isinstance(leaf, Tensor)
            else None
            for leaf, dim, factor in self._factors()
        )

    def _factors(self) -> Iterator[tuple[Any, int | None, int]]:
        """Each leaf with its batch dimension, and that one's length for one sample."""
        if self.num_samples:
            yield from zip(self.leaves, self.batch_dims, self.candidates(), strict=True)

    def checksums(self, device: torch.device) -> Tensor:
        """Numbers for the samples: their sum, and that with each times its place, from 1 on.

        Plain values and tensors without samples count with every sample.  [2] on ``device``,
        modulo ``CHECKSUM_END``.
        """
        if not self.num_samples:
            return torch.zeros(2, dtype=torch.float64, device=device)
        total = torch.zeros(self.num_samples, dtype=torch.int64, device=device)
        for leaf, dim, factor in self._factors():
            if isinstance(leaf, bool | int | float | complex | str | bytes):
                total = total * 31 + zlib.crc32(repr(leaf).encode())
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                continue
            if not leaf.numel():
                continue
            values, number = as_real(leaf.detach()), 1
            if factor and dim is not None:
                values, number = values.movedim(dim, 0), self.num_samples
            total = total * 31 + hash_rows(values.reshape(number, -1))
        places = torch.arange(1, self.num_samples + 1, device=device)
        sums = torch.stack([total.sum(), (total * places).sum()])
        return (sums % CHECKSUM_END).double()

    @property
    def objects(self) -> list[str]:
        """Names of arguments that have a state of their own, such as KV caches."""
        return [
            f"{name} ({type(leaf).__name__})"
            for name, leaf in zip(self.names, self.leaves, strict=True)
            if not isinstance(leaf, Tensor) and not is_plain(leaf)
        ]

    def digests(self) -> list[Any]:
        """By leaf: a hash of the values of a tensor, and None for anything else."""
        return [
            hash_of(leaf) if isinstance(leaf, Tensor) and leaf.layout is torch.strided else None
            for leaf in self.leaves
        ]

    def with_all(self) -> Arguments:
        """The arguments as given, or as ``passed`` says."""
        return self.passed(self.leaves)

    def passed(self, leaves: Sequence[Any]) -> Arguments:
        """The arguments, given their leaves.  A ragged one in floating point without rows is
        None, as transformers' processors have it, so that what computes with it is not called.
        """
        passed = [
            None if rows is not None and leaf.is_floating_point() and not len(leaf) else leaf
            for leaf, rows in zip(leaves, self.rows, strict=True)
        ]
        args, kwargs, loss_inputs = unflatten(passed, self.spec)
        return args, kwargs, loss_inputs

    def in_rounds(self, num_rounds: int, planned: int, *, caller: str) -> list[Arguments]:
        """The arguments of every round, of which each has up to ``planned`` samples.

        A tensor is cut if its batch dimension is as long as the samples.  Raises ``ValueError``
        if there are too many samples, or if it is a multiple of that and ``batch_dim`` does not
        name it.
        """
        if num_rounds == 1 or not self.num_samples:
            args, kwargs, loss_inputs = unflatten(self.leaves, self.spec)
            return [(args, kwargs, loss_inputs)] * num_rounds
        if self.num_samples > num_rounds * planned:
            raise ValueError(
                f"{caller}: this rank got {self.num_samples} samples but has "
                f"{planned} in each of {num_rounds} rounds of the plan. Pass those of "
                "plan.sample_indices(model.position)."
            )
        factors = self.candidates()
        for name, is_named, factor in zip(self.names, self.are_named, factors, strict=True):
            if factor > 1 and not is_named:
                raise ValueError(
                    f"{caller}: argument {name!r} has {factor} rows a sample, or none "
                    f"of its own. Say HetFSDP(batch_dim={{{name!r}: 0}}), or None for no "
                    "samples, or call model(...) and model.backward for each round."
                )
        borders = [min(i * planned, self.num_samples) for i in range(num_rounds + 1)]
        rounds = []
        for start, stop in pairwise(borders):
            leaves = [
                _part(leaf, dim or 0, start * factor, stop * factor) if factor else leaf
                for leaf, dim, factor in zip(self.leaves, self.batch_dims, factors, strict=True)
            ]
            for i, rows in enumerate(self.rows):
                if rows:
                    leaves[i] = leaves[i][sum(rows[:start]) : sum(rows[:stop])]
            args, kwargs, loss_inputs = unflatten(leaves, self.spec)
            rounds.append((args, kwargs, loss_inputs))
        return rounds

    def check_cut(self, are_batched: Sequence[bool]) -> None:
        """Raise ``ValueError`` if ``in_rounds`` has cut an argument that the model uses whole.

        ``are_batched`` is what was found by leaf.
        """
        factors = self.candidates() if self.num_samples else ()
        for name, factor, is_batched in zip(self.names, factors, are_batched, strict=False):
            if factor and not is_batched:
                raise ValueError(
                    f"forward_backward: argument {name!r} has as many rows as this rank has "
                    "samples, so every round has some of them, but the model uses it as one "
                    f"for all samples. Say HetFSDP(batch_dim={{{name!r}: None}})."
                )

    def candidates(self) -> list[int]:
        """By leaf: the length of its batch dimension divided by the number of samples; 0 if it
        has no such dimension or the length is no multiple.
        """
        found = []
        for leaf, dim in zip(self.leaves, self.batch_dims, strict=True):
            fits = isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim
            factor, rest = divmod(leaf.shape[dim], self.num_samples) if fits else (0, 0)
            found.append(0 if rest else factor)
        return found


def lists_of_entries(call: ModelCall) -> list[str]:
    """Names of arguments that are lists with a dict for each sample, as DETR's targets."""
    args, kwargs, _ = unflatten(call.leaves, call.spec)
    named = {f"argument {i}": each for i, each in enumerate(args)} | kwargs
    return [
        name
        for name, each in named.items()
        if isinstance(each, list) and len(each) == call.num_samples
        if all(isinstance(entry, Mapping) for entry in each)
    ]


def tokens_of(leaves: Sequence[Any]) -> int:
    """The tokens of a sample, if the first tensor holds indices of them; else 1."""
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    is_text = first is not None and first.dim() > 1 and not first.is_floating_point()
    return first.shape[1] if first is not None and is_text else 1


def _part(tensor: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Its rows with a version of their own: what writes to them in place, in another round than
    theirs, is no write to what their backward reads.
    """
    part = tensor.narrow(dim, start, stop - start)
    return part if part.requires_grad else part.data


def _on(device: torch.device, tensor: Tensor, name: str) -> Tensor:
    """The tensor on ``device``; raises ``ValueError`` if it is on another accelerator."""
    if tensor.device == device or devices.is_on_host(tensor):
        return tensor if tensor.device == device else to_device(tensor, device)
    raise ValueError(
        f"model(...): argument {name!r} is on {tensor.device} but this rank trains on "
        f"{device}. Pass it on the host, from where it is copied, or on model.device."
    )


def hash_of(tensor: Tensor) -> Any:
    """A hash of the values, computed where they are; 0 for none."""
    values = as_real(tensor.detach()).contiguous()
    return torch.hash_tensor(values).tolist() if values.numel() else 0


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, in memory."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def hash_rows(rows: Tensor) -> Tensor:
    """A number for the bytes of every row of ``rows``, [samples, elements], in int64."""
    words = rows.contiguous().view(_WORDS[rows.element_size()]).long()
    odd = 2 * torch.arange(words.shape[1], device=words.device) + 1
    sums = ((words ^ (words >> 29)) * (odd * MIXER)).sum(1)
    return sums ^ (sums >> 29)


def _dim_of(name: str, batch_dim: BatchDims) -> int | None:
    return batch_dim.get(name, 0) if isinstance(batch_dim, Mapping) else batch_dim


def _names(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_inputs: tuple[Any, ...],
) -> list[str]:
    """The name of its argument for every leaf of ``args``, ``kwargs`` and ``loss_inputs``."""
    params = list(inspect.signature(forward).parameters.values())
    names: list[str] = []
    for i, arg in enumerate(args):
        is_known = i < len(params) and params[i].kind is not inspect.Parameter.VAR_POSITIONAL
        names += [params[i].name if is_known else f"argument {i}"] * len(flatten(arg)[0])
    for name, value in kwargs.items():
        names += [name] * len(flatten(value)[0])
    return names + [LOSS_INPUTS] * len(flatten(loss_inputs)[0])
