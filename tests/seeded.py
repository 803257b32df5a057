"""Plain PyTorch that draws as HetFSDP does: a seed for each call of a unit and microbatch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from shardhet.fsdp.microbatch.modes import FunctionMode
from shardhet.fsdp.microbatch.surroundings import DROPOUT_CALLS, microbatch_seed
from shardhet.fsdp.sharding.unit import UnitModules

RANDOM = ("Dropout", "DropPath", "StochasticDepth")  # in the names of what draws


class SeededCalls:
    """Seeds of the microbatch that the reference is at, by unit and by dropout of the root."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = 0
        self._first_sample = 0
        self._calls_by_fqn: dict[str, int] = {}
        self._states: list[Tensor] = []  # of the generator, outside of what is being called

    def start(self, *, step: int, first_sample: int) -> None:
        """A microbatch begins, with root code."""
        self._step, self._first_sample, self._calls_by_fqn = step, first_sample, {}
        self._seed_call("")

    def enter(self, fqn: str) -> None:
        """Draw as this call does from now on."""
        self._states.append(torch.get_rng_state())
        self._seed_call(fqn)

    def leave(self) -> None:
        """Draw on as before it."""
        torch.set_rng_state(self._states.pop())

    @property
    def is_outside(self) -> bool:
        """Whether root code is running."""
        return not self._states

    def _seed_call(self, fqn: str) -> None:
        call = self._calls_by_fqn.get(fqn, 0)
        self._calls_by_fqn[fqn] = call + 1
        seed = microbatch_seed(self._seed, self._step, fqn, call, self._first_sample)
        # torch.manual_seed would format the stack for each kind of accelerator that is absent.
        torch.default_generator.manual_seed(seed)


class SeededFunctions(FunctionMode):
    """Dropout that root code calls as a function draws as a call of its own."""

    def __init__(self, seeds: SeededCalls) -> None:
        super().__init__()
        self._seeds = seeds

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is not dropout or not self._seeds.is_outside:
            return func(*args, **kwargs)
        self._seeds.enter(DROPOUT_CALLS)
        try:
            return func(*args, **kwargs)
        finally:
            self._seeds.leave()


@contextmanager
def seeded(model: nn.Module, units: Sequence[UnitModules], seed: int) -> Iterator[SeededCalls]:
    """Units, and what draws numbers outside of them, seed as HetFSDP's do."""
    seeds = SeededCalls(seed)
    modules = [(unit.fqns[0], module) for unit in units for module in unit.modules]
    inside = {inner for _, module in modules for inner in module.modules()}
    modules += [
        (fqn, module)
        for fqn, module in model.named_modules()
        if module not in inside and any(word in type(module).__name__ for word in RANDOM)
    ]
    with ExitStack() as after, SeededFunctions(seeds):
        after.callback(torch.set_rng_state, torch.get_rng_state())
        for fqn, module in modules:
            enter = module.register_forward_pre_hook(lambda *_, fqn=fqn: seeds.enter(fqn))
            leave = module.register_forward_hook(lambda *_: seeds.leave())
            after.callback(enter.remove)
            after.callback(leave.remove)
        yield seeds


def unit_by_param(
    model: nn.Module, units: Sequence[UnitModules], root: str = ""
) -> dict[str, str]:
    """The unit (its first module's fqn) of every parameter; ``root`` where it is none's own."""
    places: dict[int, set[str]] = {}
    for unit in units:
        for module in unit.modules:
            for param in module.parameters():
                places.setdefault(id(param), set()).add(unit.fqns[0])
    found = {fqn: places.get(id(param), set()) for fqn, param in model.named_parameters()}
    return {fqn: next(iter(each)) if len(each) == 1 else root for fqn, each in found.items()}
