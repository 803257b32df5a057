"""Reading a document from a file: every field is taken by name, and an error names it."""

import json
import sys
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any


def read_document(path: str | Path) -> Any:
    """What a ``.json``, ``.yaml`` or ``.yml`` file holds, not yet checked."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text ({error}). Give a JSON or YAML file.") from None
    if Path(path).suffix not in (".yaml", ".yml"):
        return parse_json(text, source=str(path))
    import yaml  # here: most files are JSON, and JSON needs nothing installed

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not YAML ({reason}). Mend the line it names.") from None


def parse_json(text: str, *, source: str) -> Any:
    """The document in ``text``; ``source`` is the file that errors name."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: not JSON ({error}). Write it with save().") from None


def named(error: ValueError, source: str) -> ValueError:
    """The error, beginning with the file that it is about."""
    message = str(error)
    return ValueError(message if message.startswith(source) else f"{source}: {message}")


class Fields:
    """An object whose fields are taken one by one, each with a check that names it."""

    def __init__(self, entry: Any, where: str) -> None:
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: {entry!r} but must be an object with named fields.")
        self.where = where
        self._entry = entry
        self._taken: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are given; raises ``ValueError`` for one that is no text."""
        for key in self._entry:
            if not isinstance(key, str):
                raise ValueError(f"{self.where}: field {key!r} is no text. Put it in quotes.")
        return tuple(self._entry)

    def has(self, key: str) -> bool:
        """Whether a field is given that may be left out."""
        self._taken.append(key)
        return key in self._entry and self._entry[key] is not None

    def take(self, key: str, kind: type) -> Any:
        """The field's value; an integer serves where a float is wanted."""
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
        """A list of objects, each ready to be taken apart."""
        entries = self.take(key, list)
        return tuple(
            Fields(each, f"{self.where}: {key}[{i}]") for i, each in enumerate(entries)
        )

    def take_object(self, key: str) -> "Fields":
        """An object, ready to be taken apart."""
        return Fields(self.take(key, dict), f"{self.where}: {key}")

    def take_version(self, version: int) -> None:
        """Refuse a document written in another form."""
        found = self.take("version", int)
        if found != version:
            raise ValueError(
                f"{self.where}: version {found} but this program reads version {version}. "
                "Make the file again with this version of shardhet."
            )

    def refuse_unknown(self) -> None:
        """Refuse fields that nobody took: a misspelt one must not be ignored."""
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
