"""Read a document from a file; fields are taken by name, and errors name the field."""

import json
import sys
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any


def read_document(path: str | Path) -> Any:
    """The unchecked content of a ``.json``, ``.yaml`` or ``.yml`` file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text ({error}). Give a JSON or YAML file.") from None
    if Path(path).suffix not in (".yaml", ".yml"):
        return parse_json(text, source=str(path))
    import yaml  # imported here: most files are JSON, which needs no extra package

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not YAML ({reason}). Fix the line it names.") from None


def parse_json(text: str, *, source: str) -> Any:
    """The document in ``text``; error messages name ``source`` as the file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: not JSON ({error}). Write it with save().") from None


def named(error: ValueError, source: str) -> ValueError:
    """The same error with the file name as a prefix."""
    message = str(error)
    return ValueError(message if message.startswith(source) else f"{source}: {message}")


class Fields:
    """An object whose fields are taken one by one and checked; errors name the field."""

    def __init__(self, entry: Any, where: str) -> None:
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: {entry!r} but must be an object with named fields.")
        self.where = where
        self._entry = entry
        self._taken: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the given fields; raises ``ValueError`` if one is not a string."""
        for key in self._entry:
            if not isinstance(key, str):
                raise ValueError(f"{self.where}: field {key!r} is no text. Put it in quotes.")
        return tuple(self._entry)

    def has(self, key: str) -> bool:
        """Whether an optional field is given."""
        self._taken.append(key)
        return key in self._entry and self._entry[key] is not None

    def take(self, key: str, kind: type) -> Any:
        """The field's value; an integer is accepted where a float is expected."""
        self._taken.append(key)
        if key not in self._entry:
            raise ValueError(f"{self.where}: field {key!r} is missing. Add it.")
        value = self._entry[key]
        if kind is float and type(value) is int and abs(value) <= sys.maxsize:
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(
                f"{self.where}: {key} is {value!r} but must be of type {kind.__name__}."
            )
        return value

    def take_number(
        self, key: str, *, minimum: float = 0.0, maximum: float = inf, above: float = -inf
    ) -> float:
        """A finite number within ``[minimum, maximum]`` and larger than ``above``."""
        value = float(self.take(key, float))
        self._check_range(key, value, minimum, maximum, above)
        return value

    def take_int(self, key: str, *, minimum: int = 0, maximum: int = sys.maxsize) -> int:
        """A whole number within ``[minimum, maximum]``."""
        value = int(self.take(key, int))
        if not minimum <= value <= maximum:
            raise ValueError(
                f"{self.where}: {key} is {value} but must be a whole number from {minimum} to "
                f"{maximum}."
            )
        return value

    def take_choice(self, key: str, choices: Sequence[str]) -> str:
        """One of ``choices``."""
        value = str(self.take(key, str))
        if value not in choices:
            raise ValueError(
                f"{self.where}: {key} is {value!r} but must be one of {', '.join(choices)}."
            )
        return value

    def take_tuple(self, key: str, kind: type) -> tuple[Any, ...]:
        """A list whose entries are all of one type."""
        values = self.take(key, list)
        for value in values:
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(
                    f"{self.where}: {key} holds {value!r} but its entries must be of type "
                    f"{kind.__name__}."
                )
        return tuple(values)

    def take_objects(self, key: str) -> tuple["Fields", ...]:
        """A list of objects, each as ``Fields``."""
        entries = self.take(key, list)
        return tuple(
            Fields(each, f"{self.where}: {key}[{i}]") for i, each in enumerate(entries)
        )

    def take_object(self, key: str) -> "Fields":
        """An object, as ``Fields``."""
        return Fields(self.take(key, dict), f"{self.where}: {key}")

    def take_version(self, version: int) -> None:
        """Refuse a document of another version."""
        found = self.take("version", int)
        if found != version:
            raise ValueError(
                f"{self.where}: version {found} but this program reads version {version}. "
                "Make the file again with this version of shardhet."
            )

    def refuse_unknown(self) -> None:
        """Refuse fields that were never taken, so that a misspelt name is not ignored."""
        unknown = sorted(str(key) for key in set(self._entry) - set(self._taken))
        if unknown:
            raise ValueError(
                f"{self.where}: unknown fields {unknown}. Known fields: {self._taken}."
            )

    def _check_range(
        self, key: str, value: float, minimum: float, maximum: float, above: float
    ) -> None:
        if isfinite(value) and minimum <= value <= maximum and value > above:
            return
        bounds = [f"above {above:g}"] if above > -inf else [f"at least {minimum:g}"]
        bounds += [f"at most {maximum:g}"] if maximum < inf else []
        raise ValueError(
            f"{self.where}: {key} is {value!r} but must be finite and {' and '.join(bounds)}."
        )
