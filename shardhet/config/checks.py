"""Checks of single values; errors name the key, its value and the allowed values."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
Check = Callable[[str, Any], None]  # of a key and its value


class ConfigError(ValueError):
    """An invalid configuration value; the message names its key and how to fix it."""


@contextmanager
def config_errors(key: str = "") -> Iterator[None]:
    """Context in which a ValueError becomes a ConfigError that begins with ``key``."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{key}: {error}" if key else str(error)) from None


def check_takes_files(key: str, name: str, folder: Path) -> None:
    """Raise ConfigError if nothing can be made in ``folder``, where ``name`` would be."""
    try:
        # Tried: access(2) also allows what /proc, for one, refuses.
        with TemporaryDirectory(dir=folder, prefix=".shardhet"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}: {name!r}: {folder} may not be written to ({error.strerror}). Name another "
            "folder."
        ) from None


def check_can_be_folder(key: str, name: str) -> None:
    """Raise ConfigError if there is no folder ``name`` and none can be made."""
    path = Path(name).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(f"{key}: {name!r}: {there} is a file. Name another folder.")
    check_takes_files(key, name, there)


def at_least(least: float) -> Check:
    """That a value is ``>= least`` and not NaN, if it is given."""

    def check(key: str, value: float | None) -> None:
        if value is not None and not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{key}: {value} but it must be at least {least}.")

    return check


def above(bound: float) -> Check:
    """That a value is ``> bound`` and not NaN, if it is given."""

    def check(key: str, value: float | None) -> None:
        if value is not None and not (math.isfinite(value) and value > bound):
            raise ConfigError(f"{key}: {value} but it must be above {bound}.")

    return check


def is_fraction(key: str, value: float | None) -> None:
    """Check that ``0 <= value <= 1``, if it is given."""
    if value is not None and not 0 <= value <= 1:
        raise ConfigError(f"{key}: {value} but it must lie between 0 and 1.")


def is_below_one(key: str, value: float) -> None:
    """Check that ``0 <= value < 1``, so that something is left over."""
    if not 0 <= value < 1:
        raise ConfigError(f"{key}: {value} but it must be at least 0 and below 1.")


def one_of(choices: Sequence[str]) -> Check:
    """That a value is one of ``choices``."""

    def check(key: str, value: str) -> None:
        if value not in choices:
            raise ConfigError(f"{key}: {value!r} but it must be one of {', '.join(choices)}.")

    return check


def checked(default: T, *checks: Check) -> T:
    """A field of a dataclass, for ``check_fields``."""
    return field(default=default, metadata={"checks": checks})


def check_fields(conf: Any, prefix: str) -> None:
    """Check the values of fields that ``checked`` has made; keys begin with ``prefix``."""
    for each in fields(conf):
        for check in each.metadata.get("checks", ()):
            check(prefix + each.name, getattr(conf, each.name))


@dataclass
class Checked:
    """A part of the configuration, whose keys begin with ``prefix``; checked as it is made."""

    _prefix: ClassVar[str] = ""

    def __init_subclass__(cls, *, prefix: str | None = None) -> None:
        super().__init_subclass__()
        if prefix is not None:
            cls._prefix = prefix

    def __post_init__(self) -> None:
        check_fields(self, self._prefix)


def number_of(key: str, text: str) -> float:
    """``10M`` or ``2.5e9`` as a number."""
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}.get(text[-1:], 1.0)
    try:
        number = factor * float(text if factor == 1 else text[:-1])
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise ConfigError(f"{key}: {text!r} is no number. Write 10M, 2.5B or 300000.")
    return number
