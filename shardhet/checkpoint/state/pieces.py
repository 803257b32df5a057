"""States of other shapes than their parameter's, which one rank has whole, as tensors by name.

The factors of Adafactor are tensors, the sides of Shampoo and SOAP lists of them.  A list,
tuple, dict or text is a text (its JSON) and its tensors, named ``<state>/<i>``.
"""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardhet.checkpoint.format.values import decode, encode


def flattened(states: Mapping[Any, Any], what: str) -> dict[str, Any]:
    """``states`` with texts for lists, tuples and dicts, and their tensors.

    Raises ``CheckpointError`` for what is in them beside plain values and tensors.
    """
    flat: dict[str, Any] = {}
    for name, value in states.items():
        if type(value) not in (list, tuple, dict, str):
            flat[str(name)] = value
            continue
        number = len(flat)

        def keep(tensor: Tensor, name: str = str(name), number: int = number) -> str:
            key = f"{name}/{len(flat) - number}"
            flat[key] = tensor
            return key

        document = encode(value, f"{what}: state {name!r}", keep)
        flat[str(name)] = json.dumps(document)
    return flat


def is_inner(name: str, states: Mapping[str, Any]) -> bool:
    """Whether it is a tensor of a list, tuple or dict among these states."""
    return name.rpartition("/")[0] in states


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``flattened``."""
    return {
        name: decode(json.loads(value), flat.__getitem__) if isinstance(value, str) else value
        for name, value in flat.items()
        if not isinstance(flat.get(name.rpartition("/")[0]), str)
    }
