"""What is wrong with a command line, in the words of Hydra and OmegaConf that say it."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from shardhet.config.compose import no_such_key

CHOICES = "Available options"  # of a group of which an unknown one was named
# What helps only who has written the schema, or does not help here.
LEFT_OUT = ("full_key:", "object_type=", "reference_type=", "To append", "1. ", "2. ", "3. ")
SEARCH_PATH = "Config search path"  # the folders that Hydra has looked into come below


def reasons_of(error: Exception) -> list[str]:
    """What Hydra or OmegaConf says is wrong, and what may be written in its place."""
    reasons, cause = list(_lines(str(error))), error.__cause__
    if cause is not None:
        lines = list(_lines(str(cause)))
        key = getattr(cause, "full_key", None)
        reasons += [f"{key}: {lines[0]}" if key else lines[0], *lines[1:]]
        is_key = isinstance(cause, ConfigAttributeError | ConfigKeyError)
        if is_key and isinstance(there := getattr(cause, "parent_node", None), DictConfig):
            reasons.append(no_such_key(there, str(key)))
    return reasons + _value_hints(" ".join(reasons))


def _lines(text: str) -> Iterator[str]:
    """Its lines that help who has typed; a list of choices is one."""
    lines = text.partition(SEARCH_PATH)[0].splitlines()
    found = [each.strip() for each in lines if each.strip()]
    for i, line in enumerate(found):
        if line.startswith(CHOICES):
            yield f"{line} {', '.join(found[i + 1 :])}"
            return
        if not line.startswith(LEFT_OUT):
            yield line


def _value_hints(reason: str) -> list[str]:
    """What may be written where a value of the wrong kind was, if the reason shows it."""
    allowed = {
        "converted to Integer": "Write a whole number: 64, not 64.0, 1e3 or 64k.",
        "converted to Float": "Write a plain number, without a unit: 0.5, not 50%.",
        "not a valid bool": "Write true or false.",
        "is not a ListConfig": "Write a list, in brackets and quotes: 'hosts=[west-*]', "
        "'equal=[[0,1],[2,3]]'.",
        "Ambiguous value": "Write a list in brackets and quotes: 'equal=[[0,1],[2,3]]'.",
        "to string": "Write one word, without brackets.",
    }
    found = [hint for sign, hint in allowed.items() if sign in reason]
    value, choices = re.search(r"value '(.*?)'", reason), re.search(r"one of \[(.*)\]", reason)
    if value and choices:
        near = get_close_matches(value[1].upper(), choices[1].split(", "), n=1)
        found += [f"Did you mean {each}?" for each in near]
    return found
