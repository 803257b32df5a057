"""Checks of single values; errors name the key, its value and the allowed values."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


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


def check_at_least(key: str, value: float | None, least: float) -> None:
    """Check that ``value >= least`` and that it is not NaN, if it is given."""
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}: {value} but it must be at least {least}.")


def check_above(key: str, value: float | None, bound: float) -> None:
    """Check that ``value > bound`` and that it is not NaN, if it is given."""
    if value is not None and not (math.isfinite(value) and value > bound):
        raise ConfigError(f"{key}: {value} but it must be above {bound}.")


def check_fraction(key: str, value: float | None) -> None:
    """Check that ``0 <= value <= 1``, if it is given."""
    if value is not None and not 0 <= value <= 1:
        raise ConfigError(f"{key}: {value} but it must lie between 0 and 1.")


def check_below_one(key: str, value: float) -> None:
    """Check that ``0 <= value < 1``, so that something is left over."""
    if not 0 <= value < 1:
        raise ConfigError(f"{key}: {value} but it must be at least 0 and below 1.")


def check_is_one_of(key: str, value: str, choices: Sequence[str]) -> None:
    """Check that ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{key}: {value!r} but it must be one of {', '.join(choices)}.")
