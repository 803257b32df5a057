"""What the code of a user's functions names, and so may change when it runs."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor


def named_by(functions: Sequence[Any]) -> list[tuple[Callable[[Any], None], Any]]:
    """Values that ``functions`` and what they call name, each with what sets it: in closures,
    globals, and attributes of objects that are neither torch's nor HetFSDP's.
    """
    found: list[tuple[Callable[[Any], None], Any]] = []
    todo: list[tuple[Any, Sequence[str]]] = [(each, ("__call__",)) for each in functions]
    seen = set()
    while todo:
        value, names = todo.pop()
        if isinstance(value, MethodType):
            todo += [(value.__func__, ()), (value.__self__, _names_of(value.__func__))]
        elif isinstance(value, partial):
            todo += [(each, names) for each in (value.func, *value.args)]
        elif (id(value), names) not in seen and not _is_foreign(value):
            seen.add((id(value), names))
            held, cells = getattr(value, "__dict__", {}), list[CellType]()
            if isinstance(value, FunctionType):
                names, held = _names_of(value), value.__globals__
                cells = [each for each in value.__closure__ or () if each != CellType()]
            methods = [getattr(type(value), name, None) for name in names]
            todo += [(MethodType(f, value), ()) for f in methods if isinstance(f, FunctionType)]
            of_value = [(partial(setitem, held, k), held[k]) for k in names if k in held]
            of_value += [(partial(setattr, c, "cell_contents"), c.cell_contents) for c in cells]
            todo += [(each, names) for _, each in of_value]
            found += of_value
    return found


def _names_of(function: Any) -> tuple[str, ...]:
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def _is_foreign(value: Any) -> bool:
    of = value if isinstance(value, FunctionType) else type(value)
    is_theirs = str(of.__module__).split(".")[0] in ("torch", "shardhet")
    return is_theirs or isinstance(value, Tensor | type | ModuleType)
