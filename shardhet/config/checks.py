"""Checks of single values that name the key, what it is, and what it may be."""

import math
from collections.abc import Sequence


class ConfigError(ValueError):
    """A value that no run can have; the message names its key and the mend."""


def check_at_least(key: str, value: float, least: float) -> None:
    """``value >= least``, and a number at all."""
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}: {value} but it must be at least {least}.")


def check_above(key: str, value: float, bound: float) -> None:
    """``value > bound``, and a number at all."""
    if not (math.isfinite(value) and value > bound):
        raise ConfigError(f"{key}: {value} but it must be above {bound}.")


def check_fraction(key: str, value: float) -> None:
    """``0 <= value <= 1``."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{key}: {value} but it must lie between 0 and 1.")


def check_below_one(key: str, value: float) -> None:
    """``0 <= value < 1``: what is left over must be something."""
    if not 0 <= value < 1:
        raise ConfigError(f"{key}: {value} but it must be at least 0 and below 1.")


def check_is_one_of(key: str, value: str, choices: Sequence[str]) -> None:
    """``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{key}: {value!r} but it must be one of {', '.join(choices)}.")
