"""Records as versioned documents: one reader and one writer, driven by the records' types.

A field is read as its annotation says: ``int``, ``float``, ``str``, ``bool``, an ``Enum`` (by
value), another record, ``X | None``, ``tuple[X, ...]``, and ``Annotated`` with the bounds
below.  Every error names the file and the field.  A field must be given unless its type
admits ``None`` or it is marked ``OMITTABLE``; a field that is ``None`` is not written.
"""

import json
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from math import inf, isfinite
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_UNIONS = (Union, UnionType)  # typing makes the first where an alias is part of it


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number in a document must satisfy; checked when it is read."""

    minimum: float = -inf
    maximum: float = inf

    def admit(self, value: float) -> bool:
        """Whether the value is finite and within the bounds."""
        return isfinite(value) and self.minimum <= value <= self.maximum

    def __str__(self) -> str:
        claims = [f"at least {self.minimum:g}"] if self.minimum > -inf else []
        claims += [f"at most {self.maximum:g}"] if self.maximum < inf else []
        return " and ".join(["finite", *claims])


class _Mark(Enum):
    OMITTABLE = "a document may leave the field out, which gives it its default"
    OBJECT = "pairs of a name and a value that a document spells as one object"


OMITTABLE, OBJECT = _Mark.OMITTABLE, _Mark.OBJECT
Count = Annotated[int, Bounds(minimum=0)]
PositiveInt = Annotated[int, Bounds(minimum=1)]
NonNegative = Annotated[float, Bounds(minimum=0.0)]
Seconds = Annotated[float, Bounds(minimum=0.0, maximum=1e6)]  # of one computation: 11 days
Fraction = Annotated[float, Bounds(minimum=0.0, maximum=1.0)]


class Document:
    """A record that is kept in a file of its own, with a version."""

    __slots__ = ()
    document_name: ClassVar[str]
    document_version: ClassVar[int]
    oldest_version: ClassVar[int | None] = None  # that is read, too; None: only the present one

    def to_json(self) -> str:
        """The record as versioned JSON text; equal records give equal text."""
        document = {"version": self.document_version, **to_document(self)}
        return _text(document, "\n", {}) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "") -> Self:
        """The inverse of ``to_json``; error messages name ``source`` as the file."""
        source = source or cls.document_name
        return cls.from_document(parse_json(text, source=source), source=source)

    @classmethod
    def from_document(cls, document: Any, *, source: str) -> Self:
        """Build a record from a parsed file; raises ``ValueError`` with file and field."""
        oldest = cls.oldest_version or cls.document_version
        versions = range(oldest, cls.document_version + 1)
        return from_document(cls, document, source=source, versions=versions)

    def save(self, path: str | Path) -> None:
        """Write the record as JSON."""
        Path(path).write_text(self.to_json(), encoding="ascii")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote, or a YAML file with the same content."""
        return cls.from_document(read_document(path), source=str(path))


def read_document(path: str | Path) -> Any:
    """The unchecked content of a ``.json``, ``.yaml`` or ``.yml`` file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file. Give a file that exists.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text ({error}). Give a JSON or YAML file.") from None
    parse = parse_yaml if Path(path).suffix in (".yaml", ".yml") else parse_json
    return parse(text, source=str(path))


def parse_yaml(text: str, *, source: str) -> Any:
    """The document in ``text``; error messages name ``source`` as the file."""
    import yaml  # imported here: most files are JSON, which needs no extra package

    if yaml.__with_libyaml__:
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            # ten times as fast
            return yaml.load(text, Loader=_with_names_once(yaml.CSafeLoader))
    try:
        return yaml.load(text, Loader=_with_names_once(yaml.SafeLoader))  # for its message
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{source}: not YAML ({reason}). Fix the line it names.") from None


def parse_json(text: str, *, source: str) -> Any:
    """The document in ``text``; error messages name ``source`` as the file."""
    try:
        return json.loads(text, object_pairs_hook=_names_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: not JSON ({error}). Write it with save().") from None


def _names_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; of a name that stands twice, json would drop the first."""
    _check_names_once(name for name, _ in pairs)
    return dict(pairs)


def _check_names_once(names: Iterable[str], where: str = "") -> None:
    twice = [name for name, number in Counter(names).items() if number > 1]
    if twice:
        raise ValueError(f"{where}{twice[0]!r} stands twice in one object")


def _with_names_once(loader: type) -> type:
    """The loader of YAML, made to refuse what ``_names_once`` refuses."""

    def construct_mapping(self: Any, node: Any, deep: bool = False) -> Any:
        names = [name.value for name, _ in node.value if isinstance(name.value, str)]
        where = f"line {node.start_mark.line + 1}: "
        _check_names_once((name for name in names if name != "<<"), where)  # << merges
        return loader.construct_mapping(self, node, deep)  # type: ignore[attr-defined]

    return type("NamesOnce", (loader,), {"construct_mapping": construct_mapping})


def to_document(record: Any) -> dict[str, Any]:
    """The fields of a record as JSON can hold them, in the order of their declaration."""
    return {
        name: dict(value) if is_object else _plain(value)
        for name, is_object in _written(cast("Hashable", type(record)))
        if (value := getattr(record, name)) is not None
    }


def from_document(
    kind: type[T], document: Any, *, source: str, versions: range | None = None
) -> T:
    """The record in a document; with ``versions``, documents of other ones are refused."""
    if versions is not None:
        given = _object(document, source)
        if "version" not in given:
            raise ValueError(f"{source}: field 'version' is missing. Add it.")
        if type(given["version"]) is not int or given["version"] not in versions:
            raise ValueError(
                f"{source}: version {given['version']!r} but this program reads version "
                f"{versions[-1]}. Make the file again with this version of shardhet."
            )
        document = {key: value for key, value in given.items() if key != "version"}
    try:
        return _record(kind, document, source)
    except ValueError as error:  # of a record's own checks, which do not know the file
        message = str(error)
        raise ValueError(
            message if message.startswith(source) else f"{source}: {message}"
        ) from None


def _record(kind: type[T], document: Any, where: str) -> T:
    given = _object(document, where)
    types = _types(cast("Hashable", kind))
    for key in given:
        if not isinstance(key, str):
            raise ValueError(f"{where}: field {key!r} is not text. Put it in quotes.")
    unknown = sorted(set(given) - set(types))
    if unknown:
        raise ValueError(
            f"{where}: unknown fields {unknown}{meant(unknown[0], types)}. Known fields: "
            f"{', '.join(types)}."
        )
    values = {}
    for key, annotation in types.items():
        if given.get(key) is not None:
            values[key] = _value(annotation, given[key], f"{where}: {key}")
        elif key not in given and not _may_be_missing(annotation):
            raise ValueError(f"{where}: field {key!r} is missing. Add it.")
        elif key in given and not _may_be_missing(annotation):
            raise ValueError(f"{where}: {key} is None. Give it a value.")
    return kind(**values)


def _value(annotation: Any, value: Any, where: str) -> Any:
    """``value`` as an instance of its annotation; errors say ``where``."""
    kind, marks = _parts(annotation)
    if get_origin(kind) is tuple:
        if OBJECT in marks:
            of_value = get_args(get_args(kind)[0])[1]
            named = _object(value, where).items()
            return tuple(
                (name, _value(of_value, each, f"{where}: {name}")) for name, each in named
            )
        _check_type(value, list, where)
        of_entry = get_args(kind)[0]
        return tuple(_value(of_entry, each, f"{where}[{i}]") for i, each in enumerate(value))
    if is_dataclass(kind):
        return _record(cast("type[Any]", kind), value, where)
    if issubclass(kind, Enum):
        choices = [member.value for member in kind]
        if value not in choices:
            raise ValueError(
                f"{where} is {value!r} but must be one of {', '.join(choices)}"
                f"{meant(str(value), choices)}."
            )
        return kind(value)
    if kind is float and type(value) is int and abs(value) <= sys.maxsize:
        value = float(value)
    _check_type(value, kind, where)
    if kind in (int, float):
        _check_number(
            value, next((mark for mark in marks if isinstance(mark, Bounds)), None), where
        )
    return value


def _check_type(value: Any, kind: type, where: str) -> None:
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return
    fix = ""
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads a number with an exponent as text unless it has a point and a sign.
        try:
            fix = f" Write {float(value)!r}." if isfinite(float(value)) else ""
        except ValueError:
            fix = ""
    raise ValueError(f"{where} is {value!r} but must be of type {kind.__name__}.{fix}")


def _check_number(value: float, bounds: Bounds | None, where: str) -> None:
    if isinstance(value, int) and abs(value) > sys.maxsize:
        raise ValueError(f"{where} is {value} but must be at most {sys.maxsize}.")
    if not (bounds or Bounds()).admit(value):
        raise ValueError(f"{where} is {value!r} but must be {bounds or Bounds()}.")


def _object(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r} but must be an object with named fields.")
    return value


def _text(value: Any, line: str, known: dict[tuple[int, str], str]) -> str:
    """``json.dumps(value, indent=1)`` in a ``line``; what is one object is spelled once."""
    if not value or not isinstance(value, dict | list):
        return json.dumps(value)
    key, deeper = (id(value), line), line + " "
    if key not in known:
        if isinstance(value, dict):
            items = value.items()
            parts = [
                f"{json.dumps(name)}: {_text(each, deeper, known)}" for name, each in items
            ]
        else:
            parts = [_text(each, deeper, known) for each in value]
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        known[key] = f"{opening}{deeper}{f',{deeper}'.join(parts)}{line}{closing}"
    return known[key]


def _plain(value: Any) -> Any:
    if isinstance(value, int | float | str) and not isinstance(value, Enum):
        return value
    if is_dataclass(value):
        return to_document(value)
    if isinstance(value, tuple):  # what is one object is so in the document
        distinct = {id(each): each for each in value}
        plain = {key: _plain(each) for key, each in distinct.items()}
        return [plain[id(each)] for each in value]
    return value.value if isinstance(value, Enum) else value


def first_places(keys: Sequence[K]) -> dict[K, int]:
    """Where each key comes first, in the order of keys."""
    found = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    return dict(sorted(found.items(), key=lambda each: each[1]))


def repeated(values: Iterable[Any]) -> list[Any]:
    """The values that are there more than once, in order."""
    return sorted(value for value, number in Counter(values).items() if number > 1)


def meant(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest, as a question in brackets; empty if none is near."""
    near = get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@cache
def _types(kind: Hashable) -> dict[str, Any]:
    record_type = cast("type[Any]", kind)  # Hashable: for mypy, which does not see that it is
    hints = get_type_hints(record_type, include_extras=True)
    return {field.name: hints[field.name] for field in fields(record_type)}


@cache
def _written(kind: Hashable) -> list[tuple[str, bool]]:
    """The fields of a record, and whether a document spells them as one object."""
    return [(name, OBJECT in _parts(each)[1]) for name, each in _types(kind).items()]


def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The annotation without marks and without ``None``, and its marks."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        base, inner_marks = _parts(inner)
        return base, (*inner_marks, *marks)
    if get_origin(annotation) in _UNIONS:
        return _parts(next(each for each in get_args(annotation) if each is not type(None)))
    return annotation, ()


def _may_be_missing(annotation: Any) -> bool:
    is_optional = get_origin(annotation) in _UNIONS and type(None) in get_args(annotation)
    return is_optional or OMITTABLE in _parts(annotation)[1]
