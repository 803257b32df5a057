"""Finds and undoes what a forward writes to its model: buffers, attributes, containers."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import setitem
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.comm.channel import Channel
from shardhet.fsdp.microbatch.signature import CHOOSING, choice_of
from shardhet.fsdp.microbatch.surroundings import VisitContext
from shardhet.fsdp.params.state import persistent_buffers
from shardhet.fsdp.probing.comparing import Law, are_close
from shardhet.fsdp.sharding.unit import FSDPUnit


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


MAX_KEPT_NUMEL = 10_000  # of a tensor that a forward may keep for the next one
CHOICES = (*CHOOSING, int, float)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULES = vars(nn.Module()).keys() - {"training"}  # parameters, buffers, hooks


Number = tuple[str, str]  # fqn of a module, name of an attribute


def attributes_of(module: nn.Module) -> Iterator[tuple[Number, dict[str, Any], Any]]:
    """Those that a module, or one inside it, has been given, where they are held: no parameter,
    buffer or hook.
    """
    for fqn, each in module.named_modules():
        held = vars(each)
        for name in [name for name in held if name not in _OF_MODULES]:
            yield (fqn, name), held, held[name]


class Attributes:
    """Those of modules, and what containers among them hold, as they are when it is made."""

    def __init__(self, modules: Sequence[nn.Module], *, but: Set[str] = frozenset()) -> None:
        """Without those of the names in ``but``."""
        self._but = but
        self._saved = [
            (held, {n: (v, _content_of(v)) for n, v in held.items() if n not in but})
            for held in map(vars, modules)
        ]

    def put_back(self) -> None:
        """Let the modules have them again."""
        for held, saved in self._saved:
            for name in held.keys() - saved.keys() - self._but:
                del held[name]
            for name, (value, content) in saved.items():
                held[name] = value
                _put_back(value, content)


@contextmanager
def restored_modules(module: nn.Module) -> Iterator[None]:
    """A context that restores attributes and buffers of all modules at its end.

    The content of containers and tensors among the attributes is restored too, and what hooks
    keep.  The context holds a copy of all buffers, and of these tensors.
    """
    modules = list(module.modules())
    before = Attributes(modules)
    # Hooks too, which some models add when first called
    hooks = [h for each in modules for kind in HOOKS for h in vars(each)[kind].values()]
    held = [value for *_, value in attributes_of(module) if isinstance(value, Tensor)]
    with restored_names(hooks, [*module.buffers(), *held]):
        try:
            yield
        finally:
            before.put_back()


@contextmanager
def restored_names(functions: Sequence[Any], more: Sequence[Any] = ()) -> Iterator[None]:
    """A context that restores what ``functions`` name, and containers and tensors in ``more``.

    It holds a copy of the tensors.
    """
    named = named_by(functions)
    values = [value for _, value in named]
    for value in values.copy():  # lists by name, perhaps
        values += value.values() if isinstance(value, dict) else ()
    values += more
    contents = [(each, _content_of(each)) for each in values]
    tensors = [each for each in values if type(each) is Tensor and not each.is_meta]
    copies = [(each, each.detach().clone()) for each in tensors]
    try:
        yield
    finally:
        for put, value in named:
            put(value)
        for container, content in contents:
            _put_back(container, content)
        with torch.no_grad():
            for tensor, before in copies:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _content_of(value: Any) -> list[Any] | dict[Any, Any] | None:
    """What a container holds; None of anything else.  No copy: its class may refuse one."""
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list | set | deque) else None


def _items_of(container: Any) -> list[int]:
    """Which objects a container holds, by id: they may have no equality, as tensors."""
    if not isinstance(container, dict | list | set | deque):
        return []
    values = container.values() if isinstance(container, dict) else ()
    return list(map(id, (*container, *values)))


def _put_back(container: Any, content: list[Any] | dict[Any, Any] | None) -> None:
    """Let a container hold ``content`` again.  One that nobody has changed is not written, as
    the frozen configuration of a model.
    """
    if content is None or not (content or container):  # most are empty
        return
    if _items_of(container) == _items_of(content):
        return
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)


class Writes:
    """Finds what of a model is written after this object is made: buffers, and the numbers that
    its modules have as attributes by then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._numbers = [
            (".".join(filter(None, key)), held, key[1])
            for key, held, value in attributes_of(module)
            if isinstance(value, int | float)
        ]
        self._before = self._look()

    def _look(self) -> dict[str, tuple[Any, int]]:
        """Values and versions of tensors, by fqn."""
        buffers = {fqn: (each, each._version) for fqn, each in self._module.named_buffers()}
        return buffers | {fqn: (held.get(name), 0) for fqn, held, name in self._numbers}

    def written(self) -> dict[str, Tensor]:
        """Buffers by fqn that were written in place or replaced since."""
        found = {}
        for fqn, buffer in self._module.named_buffers():
            known, version = self._before.get(fqn, (None, 0))
            if buffer is not known or buffer._version != version:
                found[fqn] = buffer
        return found

    def take(self) -> frozenset[str]:
        """Fqns of what was written since the last call of this, apart from new buffers, tables
        that have become longer, and numbers that are their lengths.
        """
        before, self._before = self._before, self._look()
        return frozenset(
            fqn
            for fqn, (each, version) in self._before.items()
            for old, old_version in [before.get(fqn, (each, version))]
            if (version != old_version if each is old else not self._goes_on(fqn, each, old))
        )

    def _goes_on(self, fqn: str, value: Any, before: Any) -> bool:
        if isinstance(value, Tensor):
            return isinstance(before, Tensor) and _is_longer(value, before)
        module = self._module.get_submodule(fqn.rpartition(".")[0])
        lengths = [n for each in module.buffers(recurse=False) for n in each.shape]
        return isinstance(value, int | float) and (value == before or value in lengths)

    def check(self) -> None:
        """Raise ``Refusal`` if ranks would come to differ in one, because the model trains."""
        if not self._module.training:
            return
        persistent = dict(persistent_buffers(self._module))
        for fqn, buffer in self.written().items():
            if fqn in persistent or buffer._version:
                raise Law.REPEATS.refusal(
                    f"buffer {fqn!r} is written in forward, and only running statistics of "
                    "batch norm are kept equal on all ranks"
                )


def _is_longer(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor begins with all of another."""
    if tensor.dim() != before.dim() or not before.numel():
        return False
    return torch.equal(tensor[tuple(map(slice, before.shape))], before)


def marks_of(module: nn.Module) -> list[Any]:
    """What is another list once an attribute of a module, or of one inside it, is another."""
    return [
        (key, value if isinstance(value, CHOICES) else (id(value), _items_of(value)))
        for key, _, value in attributes_of(module)
    ]


def choosing_attributes(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where modules, and dicts and plain objects that they hold (configurations), keep what may
    choose what they do: flags, names, absent parts, functions, and numbers, of which some
    switch a part off while they are 0.
    """
    own = list(attributes_of(module))
    inner = {id(each): each for _, _, value in own if (each := _names_in(value)) is not None}
    pairs = [(held, name) for (_, name), held, _ in own]
    pairs += [(each, name) for each in inner.values() for name in each]
    return [(held, name) for held, name in pairs if isinstance(held[name], CHOICES)]


def choices_of(function: Any) -> tuple[Hashable, ...]:
    """The same of a function that is an object, or a method of one; of None, nothing."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        return tuple(choice_of(held[name]) for held, name in choosing_attributes(owner))
    found = _names_in(owner) or {}
    return tuple(choice_of(each) for each in found.values() if isinstance(each, CHOICES))


def _names_in(value: Any) -> dict[str, Any] | None:
    """What a dict, or an object that is no module, tensor, class or function, holds by name."""
    if isinstance(value, nn.Module | Tensor | type | FunctionType):
        return None
    found = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None


class Edits:
    """Whether the program has changed a model between its forwards: its modules, hooks on
    them, and which parameters and attributes they have.  What a forward itself changes is no
    edit.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: list[tuple[Any, ...]] = []
        self.take()

    def take(self) -> bool:
        """Whether anything was changed since the last call of this."""
        if self._seen and self._look() == self._seen:
            return False
        self._held = [vars(each) for each in self._module.modules()]
        self._seen = self._look()
        return True

    def _look(self) -> list[tuple[Any, ...]]:
        return [
            (
                len(each),
                each.get("forward"),
                *each["_modules"].values(),
                *each["_parameters"],
                *chain.from_iterable(map(each.__getitem__, HOOKS)),
            )
            for each in self._held
        ]


class Filled:
    """Trainable parameters that are zero have other values while a model is probed: they may
    be gates that hide what they are multiplied with.
    """

    def __init__(self) -> None:
        self._by_unit: dict[int, list[Tensor]] = {}

    def fill(self, index: int, unit: FSDPUnit) -> None:
        """Fill those of a unit, which is unsharded."""
        for flat in unit.flats:
            whole = [each.data for each in flat.unsharded_params if flat.is_trainable]
            zero = [each for each in whole if each.is_floating_point() and not each.any()]
            if any(each.numel() for each in zero):
                flat.comm.wait_all_sent()  # other ranks may read them, if they are the rows
            for each in zero:
                values = torch.arange(each.numel(), device=each.device) % 7 + 1
                each.copy_(values.view(each.shape) / 16)
            self._by_unit.setdefault(index, []).extend(zero)

    def undo(self, index: int) -> None:
        """Let those of a unit be zero again."""
        for each in self._by_unit.pop(index, ()):
            each.zero_()


def counters(module: nn.Module) -> dict[Number, Any]:
    """The same, and versions of tensors with one element."""
    return numbers(module) | {
        key: value._version
        for key, _, value in attributes_of(module)
        if isinstance(value, Tensor) and value.numel() == 1
    }


def set_numbers(module: nn.Module, values: Mapping[Number, Any]) -> None:
    """Give attributes of a module and its submodules the values that ``numbers`` found."""
    for (fqn, name), value in values.items():
        vars(module.get_submodule(fqn))[name] = value


class AsItWas(VisitContext):
    """A recomputation finds the attributes of a module as its forward did: flags and functions
    that the model sets before a call, and sets back before backward.

    If the module ``counts`` its calls, every microbatch finds them so, and the first one's
    count remains.
    """

    def __init__(self, module: nn.Module, *, counts: bool = False) -> None:
        self._modules, self._counts = list(module.modules()), counts
        self._has_run = False
        self._before = self._now()

    @contextmanager
    def in_function(self, start: int, is_repeated: bool) -> Iterator[None]:
        """What a recomputation sets is dropped, and what a later microbatch counts."""
        if not is_repeated and not (self._counts and self._has_run):
            self._has_run = True
            yield
            return
        now = self._now()
        self._before.put_back()
        try:
            yield
        finally:
            now.put_back()

    def _now(self) -> Attributes:
        return Attributes(self._modules, but=_OF_MODULES)


def numbers(module: nn.Module) -> dict[Number, Any]:
    """The plain numbers among the attributes of a module and its submodules."""
    return {
        key: value for key, _, value in attributes_of(module) if isinstance(value, int | float)
    }


def values_of(module: nn.Module) -> dict[Number, Any]:
    """The numbers and small tensors among the attributes of all modules; tensors as copies."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, _, value in attributes_of(module)
        if (isinstance(value, int | float) and not isinstance(value, bool))
        or (isinstance(value, Tensor) and value.numel() <= MAX_KEPT_NUMEL)
    }


def kept_of_samples(
    small: Mapping[Number, Any], large: Mapping[Number, Any], eps: float
) -> dict[Number, Any]:
    """Values that differ between two forwards on different samples although they have no row
    per sample, such as a running mean; as they are after the second forward.
    """

    def is_other(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.shape == other.shape and not are_close(one, other, eps)
        return type(one) is type(other) and not isinstance(one, Tensor) and one != other

    return {
        key: value
        for key, value in large.items()
        if key in small and is_other(small[key], value)
    }


def take_over(
    module: nn.Module, which: Sequence[Number], control: Channel, *, source: int, is_here: bool
) -> None:
    """Copy numbers that code outside of units changes in forward, such as a count of forwards,
    from position ``source``, which has samples, to ranks without, which do not run that code.

    ``is_here`` says whether this rank has samples.  Collective.
    """
    places = [(module.get_submodule(fqn), name) for fqn, name in which]
    found = [getattr(held, name, None) for held, name in places]
    mine = [each if is_here and isinstance(each, int | float) else None for each in found]
    theirs = control.exchange_objects(mine)[source]
    for (held, name), value in zip(places, theirs, strict=True):
        if not is_here and value is not None:  # None: no longer a number
            setattr(held, name, value)
