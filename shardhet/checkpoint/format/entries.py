"""What a checkpoint holds, by name, and which rank writes which rows: no tensors, no files.

Names are those that ``torch.distributed.checkpoint`` gives to
``{"model": model_state_dict, "optim": optimizer_state_dict}``, so that its other users can
read what is written here, and the reverse:

    model.<fqn>                      a parameter or buffer
    optim.state.<fqn>.<name>         a state of the optimizer, like the parameter, a scalar, or
                                     of another shape if one rank has the whole parameter
    optim.param_groups.<i>.<option>  an option of a group; "params" are its fqns
    extra.<n>                        a tensor of ``extra``
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.records.layout import Span

MODEL, STATE, GROUPS, EXTRA = "model.", "optim.state.", "optim.param_groups.", "extra."


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The rows of a parameter, or a whole buffer, that a rank holds."""

    fqns: tuple[str, ...]
    global_shape: tuple[int, ...]
    dtype: str  # as torch writes it: "torch.float32"
    rows: Span
    is_buffer: bool


@dataclass(frozen=True, slots=True)
class HeldState:
    """One state of the optimizer for one parameter: rows like the parameter's, a scalar, or a
    piece of another shape.
    """

    dtype: str | None  # None: a Python number, or a text (``optimizer_state``)
    scalar: bool | int | float | complex | str | None = None  # None: rows or a piece
    shape: tuple[int, ...] | None = None  # of a piece

    @property
    def has_rows(self) -> bool:
        """Whether it is rows like the parameter's."""
        return self.scalar is None and self.shape is None

    @property
    def is_piece(self) -> bool:
        """Whether it is, or belongs to, a state of another shape, of who has the parameter."""
        return self.shape is not None or isinstance(self.scalar, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContents:
    """What one rank holds; exchanged among ranks before anything is written."""

    position: int
    path: str
    step: int | None
    parts: tuple[HeldPart, ...]
    states: Mapping[str, Mapping[str, HeldState]]  # by fqn and name
    groups: tuple[Mapping[str, Any], ...]  # options, and the fqns as "params"
    optimizer: str | None  # its class


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of an entry, written by the rank at ``position``."""

    position: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A named tensor, or a named plain value."""

    name: str
    keys: tuple[str | int, ...]  # the way to it in a nested state dict
    chunks: tuple[Chunk, ...]
    shape: tuple[int, ...] | None = None  # None: a plain value
    dtype: str | None = None  # None: a plain value
    aliases: tuple["Entry", ...] = ()  # the same bytes under other names
    value: Any = None  # of a plain value, or of a tensor that is one number


def check_agree(holdings: Sequence[RankContents]) -> None:
    """Raise ``CheckpointError`` unless the ranks save the same thing."""
    for holding in holdings:
        for what in ("path", "step", "groups", "optimizer"):
            mine, theirs = getattr(holdings[0], what), getattr(holding, what)
            if repr(mine) != repr(theirs):
                raise CheckpointError(
                    f"{what}: positions 0 and {holding.position} of the plan have {mine!r} and "
                    f"{theirs!r}. Give the same on every rank."
                )
    entries_of(holdings, 0)  # raises what every position would


def entries_of(holdings: Sequence[RankContents], writer: int) -> list[Entry]:
    """All entries of model and optimizer, given the holdings of all ranks, by position.

    ``writer`` is the position that writes what is whole everywhere.  Raises
    ``CheckpointError`` for an optimizer whose state ranks disagree on.
    """
    entries: list[Entry] = []
    for i, part in enumerate(holdings[writer].parts):
        rows = [(h.position, h.parts[i].rows) for h in holdings]
        entries.append(_part_entry(part, rows, writer))
        if not part.is_buffer:
            entries += _state_entries(part, i, holdings, writer)
    for number, group in enumerate(holdings[writer].groups):
        for option, value in group.items():
            keys = ("optim", "param_groups", number, option)
            entries.append(whole_entry(f"{GROUPS}{number}.{option}", keys, writer, value=value))
    return entries


def whole_entry(
    name: str,
    keys: tuple[str | int, ...],
    writer: int,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
    value: Any = None,
) -> Entry:
    """An entry in one piece."""
    chunk = Chunk(writer, tuple(0 for _ in shape or ()), shape or ())
    return Entry(name, keys, (chunk,), shape, dtype, value=value)


def _part_entry(part: HeldPart, rows: Sequence[tuple[int, Span]], writer: int) -> Entry:
    if part.is_buffer:
        chunks = whole_entry("", (), writer, shape=part.global_shape).chunks
    else:
        chunks = _chunks(part.global_shape, rows)

    def named(fqn: str, *aliases: Entry) -> Entry:
        return Entry(
            MODEL + fqn, ("model", fqn), chunks, part.global_shape, part.dtype, aliases
        )

    first, *others = part.fqns
    return named(first, *(named(fqn) for fqn in others))


def _chunks(
    global_shape: tuple[int, ...], rows: Sequence[tuple[int, Span]]
) -> tuple[Chunk, ...]:
    """The rows of every rank that has some, one box each."""
    inner = global_shape[1:]
    return tuple(
        Chunk(position, (span.start, *(0 for _ in inner)), (span.numel, *inner))
        if global_shape
        else Chunk(position, (), ())
        for position, span in rows
        if span.numel
    )


def _state_entries(
    part: HeldPart, index: int, holdings: Sequence[RankContents], writer: int
) -> list[Entry]:
    """The states of one parameter.  Ranks without rows of it need not have any."""
    fqn = part.fqns[0]
    with_rows = [h for h in holdings if h.parts[index].rows.numel] or list(holdings)
    known = [h.states.get(fqn, {}) for h in with_rows]
    entries = []
    for name, state in known[0].items():
        keys = ("optim", "state", fqn, name)
        if state.has_rows:
            rows = [(h.position, h.parts[index].rows) for h in with_rows]
            chunks = _chunks(part.global_shape, rows)
            entry = Entry(f"{STATE}{fqn}.{name}", keys, chunks, part.global_shape, state.dtype)
        else:
            shape = state.shape or (None if state.dtype is None else ())
            has_it = writer if state.shape is None else with_rows[0].position
            entry = whole_entry(
                f"{STATE}{fqn}.{name}",
                keys,
                has_it,
                shape=shape,
                dtype=state.dtype,
                value=state.scalar,
            )
        entries.append(entry)
    for holding, states in zip(with_rows, known, strict=True):
        if repr(sorted(states.items())) != repr(sorted(known[0].items())):  # NaN equals NaN
            raise CheckpointError(
                f"optimizer state of {fqn}: position {holding.position} of the plan has "
                f"{_shown(states)} but position {with_rows[0].position} has "
                f"{_shown(known[0])}. Step the optimizer on every rank, or on none."
            )
    return entries


def _shown(states: Mapping[str, HeldState]) -> str:
    items = (
        f"{name} ({state.shape or 'rows' if state.scalar is None else state.scalar})"
        for name, state in sorted(states.items())
    )
    return ", ".join(items) or "none"
