"""Plain values and tensors as JSON: what a checkpoint holds besides model and optimizer.

None, booleans, numbers, texts, lists and dicts with texts for keys are JSON's own.  The rest
is written as a dict with one key: ``{"$tensor": name}``, ``{"$tuple": [...]}``, and
``{"$dict": [[key, value], ...]}`` for dicts with other keys (``{"$counter": ...}`` for a
``collections.Counter``).  Nothing else is taken, so that reading runs no foreign code.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardhet.checkpoint.format.errors import CheckpointError

_PLAIN = (bool, int, float, str, type(None))


def encode(value: Any, where: str, keep: Callable[[Tensor], str]) -> Any:
    """``value`` as JSON; ``keep`` stores a tensor and returns its name.

    Raises ``CheckpointError`` naming the place, which begins with ``where``, of what cannot
    be written.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return {"$tensor": keep(value.detach())}
    if type(value) in (list, tuple):
        items = [encode(each, f"{where}[{i}]", keep) for i, each in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, Counter):
        return _encode_dict(value, where, keep)
    raise CheckpointError(
        f"{where} is of type {type(value).__name__}, which a checkpoint does not hold. Give "
        "numbers, texts, tensors, and lists, tuples and dicts of them."
    )


def _encode_dict(value: dict[Any, Any], where: str, keep: Callable[[Tensor], str]) -> Any:
    items = [
        (encode(key, f"a key of {where}", keep), encode(each, f"{where}[{key!r}]", keep))
        for key, each in value.items()
    ]
    is_counter = type(value) is Counter
    has_plain_keys = all(type(key) is str and not key.startswith("$") for key in value)
    if has_plain_keys and not is_counter:
        return dict(items)
    return {"$counter" if is_counter else "$dict": [list(pair) for pair in items]}


def decode(document: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """The inverse of ``encode``; ``tensor_of`` returns the tensor of a name."""
    if isinstance(document, list):
        return [decode(each, tensor_of) for each in document]
    if not isinstance(document, dict):
        return document
    if len(document) == 1:
        [(key, inner)] = document.items()
        if key == "$tensor":
            return tensor_of(inner)
        if key == "$tuple":
            return tuple(decode(each, tensor_of) for each in inner)
        if key in ("$dict", "$counter"):
            pairs = [(decode(k, tensor_of), decode(v, tensor_of)) for k, v in inner]
            return dict(pairs) if key == "$dict" else Counter(dict(pairs))
    return {key: decode(each, tensor_of) for key, each in document.items()}


def tensor_names(document: Any) -> list[str]:
    """The names of the tensors in what ``encode`` returned.

    Raises ``ValueError`` or ``TypeError`` for what it never returns.
    """
    names: list[str] = []

    def note(name: str) -> Any:
        if not isinstance(name, str):
            raise TypeError(f"a tensor named {name!r}")
        names.append(name)

    decode(document, note)
    return names
