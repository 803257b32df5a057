"""Checks of single values and of files to write; errors name the key and allowed values."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from inspect import signature
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
    """Context in which a wrong value or package is a ConfigError that begins with ``key``."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, ImportError) as error:
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


def _must(be: str, holds: Callable[[Any], bool]) -> Check:
    """That ``holds`` of a value, if it is given; the error says what it must ``be``."""

    def check(key: str, value: Any) -> None:
        if value is not None and not holds(value):
            raise ConfigError(f"{key}: {value!r} but it must {be}.")

    return check


def at_least(least: float) -> Check:
    """That a value is ``>= least`` and finite, if it is given."""
    return _must(f"be at least {least}", lambda value: least <= value < inf)


def above(bound: float) -> Check:
    """That a value is ``> bound`` and finite, if it is given."""
    return _must(f"be above {bound}", lambda value: bound < value < inf)


def one_of(choices: Sequence[str]) -> Check:
    """That a value is one of ``choices``."""
    return _must(f"be one of {', '.join(choices)}", choices.__contains__)


is_fraction = _must("lie between 0 and 1", lambda value: 0 <= value <= 1)
# So that something is left over.
is_below_one = _must("be at least 0 and below 1", lambda value: 0 <= value < 1)


def checked(default: T, *checks: Check) -> T:
    """A field of a dataclass, for ``check_fields``."""
    return field(default=default, metadata={"checks": checks})


def check_fields(conf: Any, prefix: str) -> None:
    """Check the values of fields that ``checked`` has made; keys begin with ``prefix``."""
    for each in fields(conf):
        for check in each.metadata.get("checks", ()):
            check(prefix + each.name, getattr(conf, each.name))


def fields_of(conf: Any, made: Callable[..., Any]) -> dict[str, Any]:
    """The values of fields that ``made``, a class or a function, takes under the same names."""
    taken = signature(made).parameters
    return {each.name: getattr(conf, each.name) for each in fields(conf) if each.name in taken}


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


def check_outputs(**path_by_key: str | None) -> None:
    """Raise ConfigError if a file could not be written; ``picture`` is the key of a drawing."""
    for key, path in path_by_key.items():
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ConfigError(
                f"{key}: the folder of {path!r} does not exist. Create it, or pass another."
            )
        if path is not None and (not path or Path(path).is_dir()):
            raise ConfigError(f"{key}: {path!r} is not a file name. Give one: {key}=plan.json.")
        if path is not None and not Path(path).exists():
            check_takes_files(key, path, Path(path).resolve().parent)
    picture = path_by_key.get("picture")
    if picture is not None:
        _check_picture(picture)


def check_folder_output(key: str, path: str | None) -> None:
    """Raise ConfigError if ``path`` cannot become a folder."""
    if path == "":
        raise ConfigError(f"{key}: '' is not a folder. Pass the path of a folder.")
    if path is not None:
        check_can_be_folder(key, path)


def _check_picture(path: str) -> None:
    try:
        import matplotlib  # noqa: F401 -- only to see whether it is here
    except ImportError:
        raise ConfigError(
            "picture: matplotlib is not installed. Run pip install 'shardhet[plots]'."
        ) from None
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"picture: {path!r} must end in .png, .svg or .pdf.")


def check_measured(key: str, folder: Path) -> None:
    """Raise ConfigError if ``folder`` lacks a file that ``shardhet measure`` writes."""
    for name in ("cluster.json", "workload.json", "profile.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{key}: {str(folder)!r} has no {name}. Give the folder that "
                "`shardhet measure out=...` has written."
            )


def check_fp16_accumulation(is_set: bool, precision: Enum) -> None:
    """Raise if products are to be summed in float16 that are not computed in it."""
    if is_set and precision.value != "float16":
        raise ConfigError(
            f"fp16_accumulation: true but precision is {precision.name}, in which it has no "
            "effect. Set precision=FP16, or leave it out."
        )
