"""Units: modules that become one, and the parameters that are gathered and reduced together.

Modules are chosen by the model's structure, or as given by the user.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.flat import FlatTensor, ParamSlot
from shardhet.fsdp.sharding.flat_grad import forget_autograds

# A module below this fraction of the largest unit (such as a final norm) is not worth its own
# gathers; it stays with the root, which is unsharded for the whole step.
SMALLEST_PART_OF_LARGEST_UNIT = 0.02


@dataclass(frozen=True, slots=True)
class UnitModules:
    """The modules of one future unit; several if they share a parameter."""

    fqns: tuple[str, ...]
    modules: tuple[nn.Module, ...]


def find_units(
    root: nn.Module,
    wanted: Sequence[type[nn.Module] | str] | None,
    *,
    keeps_last: bool = False,
    merges_tied: bool = True,
) -> list[UnitModules]:
    """The units of ``root`` in module order; all other parameters belong to the root.

    If ``wanted`` is None, units are the repeated blocks, and every other callable module with
    parameters that contains no block (embeddings, the head), unless it is tiny; ``keeps_last``
    makes the last of them a unit even then.  Without ``merges_tied``, modules that share a
    parameter are units of their own, and the parameter is the root's.  Raises ``ValueError``
    naming candidates if a wanted module does not exist.
    """
    fqn_by_module = {module: fqn for fqn, module in root.named_modules()}  # shared ones once
    found = _automatic(root, keeps_last) if wanted is None else _by_name(root, wanted)
    chosen = [module for module in fqn_by_module if module in found]
    for module in chosen:
        inner = [m for m in module.modules() if m is not module and m in chosen]
        if inner:
            raise ValueError(
                f"units: {fqn_by_module[module]!r} contains {fqn_by_module[inner[0]]!r}, "
                "which is a unit too. Name one of them, not both."
            )
    groups = _merge_tied(root, chosen) if merges_tied else [[module] for module in chosen]
    return [UnitModules(tuple(fqn_by_module[m] for m in g), tuple(g)) for g in groups]


def _automatic(root: nn.Module, keeps_last: bool) -> set[nn.Module]:
    blocks = set(_outermost_blocks(root))
    units = blocks | set(_largest_without(_without_wrappers(root), blocks))
    largest = max((_numel(unit) for unit in units), default=0)
    floor = SMALLEST_PART_OF_LARGEST_UNIT * largest
    last = [module for module in root.modules() if module in units][-1:] if keeps_last else []
    return {unit for unit in units if _numel(unit) >= floor or unit in last}


def _without_wrappers(root: nn.Module) -> nn.Module:
    """The first module with several parts: around it are those that have one, as PEFT's."""
    inner, parts = root, [root]
    while len(parts) == 1:
        inner, parts = parts[0], [child for child in parts[0].children() if _numel(child)]
    return inner if parts else root


def _outermost_blocks(module: nn.Module) -> Iterable[nn.Module]:
    """Children of the outermost containers that hold at least two of one class."""
    children = [child for child in module.children() if _numel(child)]
    is_container = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    kinds = [type(child) for child in children]
    if is_container and any(kinds.count(kind) > 1 for kind in kinds):
        for child in children:
            yield from _callable_parts(child)
        return
    for child in children:
        yield from _outermost_blocks(child)


def _largest_without(module: nn.Module, blocks: set[nn.Module]) -> Iterable[nn.Module]:
    """The outermost modules below ``module`` that have parameters and contain no block."""
    for child in module.children():
        if child in blocks or not _numel(child):
            continue
        if any(inner in blocks for inner in child.modules()):
            yield from _largest_without(child, blocks)
        else:
            yield from _callable_parts(child)


def _callable_parts(module: nn.Module) -> Iterable[nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield module
        return
    for child in module.children():
        if _numel(child):
            yield from _callable_parts(child)


def _by_name(root: nn.Module, wanted: Sequence[type[nn.Module] | str]) -> set[nn.Module]:
    if isinstance(wanted, str | type):
        name = repr(wanted) if isinstance(wanted, str) else wanted.__name__
        raise ValueError(f"units: {name} is no list. Write units=[{name}].")
    module_by_fqn = dict(root.named_modules())
    chosen: set[nn.Module] = set()
    for each in wanted:
        if not isinstance(each, str | type):
            raise ValueError(
                f"units: {each!r} is neither the name of a module nor a class of modules."
            )
        if isinstance(each, str):
            found = _matched(each, module_by_fqn)
            known = [fqn for fqn in module_by_fqn if fqn]
        else:
            found = [module for module in module_by_fqn.values() if isinstance(module, each)]
            known = sorted({type(module).__name__ for module in module_by_fqn.values()})
        if not found:
            name = each if isinstance(each, str) else each.__name__
            close = get_close_matches(name, known, n=8, cutoff=0.3) or known[:8]
            raise ValueError(
                f"units: {name!r} is not a module of {type(root).__name__}. "
                f"Choose among {', '.join(close)}, or leave units out to find them."
            )
        chosen.update(module for module in found if module is not root)
    return chosen


def _matched(pattern: str, module_by_fqn: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The module of this name, or else the outermost that the pattern is of."""
    if pattern in module_by_fqn:
        return [module_by_fqn[pattern]] if pattern else []
    found = [module for fqn, module in module_by_fqn.items() if fnmatchcase(fqn, pattern)]
    inner = {each for module in found for each in module.modules() if each is not module}
    outermost = [module for module in found if module not in inner]
    return [part for each in outermost for part in _callable_parts(each) if _numel(part)]


def _merge_tied(root: nn.Module, chosen: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Merge units that share a parameter, unless the root has that parameter too."""
    inside = {
        id(p) for module in chosen for m in module.modules() for p in m._parameters.values()
    }
    members = {inner for module in chosen for inner in module.modules()}
    of_root = {
        id(p) for m in root.modules() if m not in members for p in m._parameters.values()
    }
    groups: list[list[nn.Module]] = []
    shared = inside - of_root
    for module in chosen:
        mine = {id(p) for p in module.parameters()} & shared
        touching = [
            group for group in groups if mine & {id(p) for m in group for p in m.parameters()}
        ]
        merged = [*(m for group in touching for m in group), module]
        groups = [group for group in groups if group not in touching]
        groups.append(merged)
    order = {module: i for i, module in enumerate(chosen)}
    return sorted(groups, key=lambda group: order[group[0]])


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


class UnitState(Enum):
    """The state of a unit's parameters."""

    SHARDED = auto()  # at the start, and after reshard()
    GATHERING = auto()  # after unshard(): the collective is in flight
    UNSHARDED = auto()  # after wait_for_unshard(): modules hold whole parameters


class Casts:
    """Whether units cast their inputs to the dtype of gathered parameters. Off while a unit is
    tried with parameters in float32 or wider (tokens/law.py).
    """

    are_off = False

    @classmethod
    @contextmanager
    def off(cls) -> Iterator[None]:
        """A context without."""
        cls.are_off = True
        try:
            yield
        finally:
            cls.are_off = False


@dataclass(frozen=True, slots=True)
class UnitModule:
    """A module whose calls are visits of a unit."""

    fqn: str
    module: nn.Module
    forward: Callable[..., Any]  # the module's own, before it was intercepted
    is_trainable: bool  # whether any of its parameters is, including those the root owns


class FSDPUnit:
    """A unit in a step: unshard, wait_for_unshard, compute, reshard in forward; the same in
    backward, with begin_backward before the compute and reduce, finish_reduce after it.
    """

    def __init__(
        self,
        fqn: str,
        modules: Sequence[UnitModule],
        flats: Sequence[FlatTensor],
        *,
        comm: CommContext,
    ) -> None:
        self.fqn = fqn
        self.modules = tuple(modules)  # several if they share a parameter
        self.flats = tuple(flats)  # one per dtype and trainability
        self._trainable_flats = tuple(flat for flat in flats if flat.is_trainable)
        self.is_trainable = len(self._trainable_flats) > 0
        self.state = UnitState.SHARDED
        self._comm = comm

    def gather_over(self, comm: CommContext) -> None:
        """Communicate over ``comm`` from now on, as the flat tensors do."""
        self._comm = comm

    @property
    def slots(self) -> list[ParamSlot]:
        """The parameters of the unit."""
        return [slot for flat in self.flats for slot in flat.slots]

    @property
    def numel(self) -> int:
        """The number of elements of all parameters of the unit."""
        return sum(slot.shape.numel() for slot in self.slots)

    def copy_to_device(self) -> None:
        """Launch the copies of rows on the host that ``unshard`` launches otherwise."""
        for flat in self.flats:
            is_wanted = flat.persistence is None or flat.persistence.to_reach() is not None
            if flat.on_host is not None and is_wanted:
                flat.on_host.copy_to_device()

    def unshard(self) -> None:
        """SHARDED -> GATHERING; does nothing in any other state."""
        if self.state is not UnitState.SHARDED:
            return
        for flat in self.flats:
            flat.unshard()
        self.state = UnitState.GATHERING

    def wait_for_unshard(self) -> None:
        """GATHERING -> UNSHARDED; does nothing if already UNSHARDED."""
        if self.state is UnitState.SHARDED:
            raise RuntimeError(
                f"unit {self.fqn!r}: waited for a gather that was never launched."
            )
        if self.state is UnitState.UNSHARDED:
            return
        for flat in self.flats:
            flat.wait_for_unshard()
        self.state = UnitState.UNSHARDED

    def reshard(self) -> None:
        """Any state -> SHARDED; waits for a gather that is in flight.

        Later gathers wait for the kernels queued so far (``CommContext.mark_compute``).
        """
        if self.state is UnitState.SHARDED:
            return
        self.wait_for_unshard()
        for flat in self.flats:
            flat.reshard()
        self._comm.mark_compute()
        self.state = UnitState.SHARDED

    def begin_backward(self) -> None:
        """Prepare to accumulate gradients; does nothing on a rank that is no receiver."""
        if self._comm.is_receiver:
            for flat in self.flats:
                if flat.persistence is None:
                    flat.grad.begin()
                else:
                    flat.persistence.check_unwritten()

    def reduce(self) -> None:
        """Start the reduce-scatter of the computing ranks' gradients to the owners."""
        for flat in self._trainable_flats:
            forget_autograds(flat.unsharded_params)
            flat.grad.reduce()

    def finish_reduce(self) -> None:
        """Wait until this rank has its part of the sums, and nobody reads its gradients."""
        for flat in self._trainable_flats:
            flat.grad.finish()

    def drop_grads(self) -> None:
        """Drop the gradients of an unfinished or invalid step."""
        for flat in self._trainable_flats:
            forget_autograds(flat.unsharded_params)
            flat.grad.drop()
