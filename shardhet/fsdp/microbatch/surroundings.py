"""What surrounds the code of a model while it runs: seeds, dropout outside of units, no caches.

A *surrounding* is one concern of the runs of a visit: random numbers, the backward turn, a
report to observers.  Visits enter them in the order of a tuple.  A new concern is a class of
its own and a line in ``Visits.around`` (``fsdp.step.around``).

[Note: Random numbers]
They depend on what is computed, not on which rank computes it.  Before each microbatch of a
unit the generators are seeded from (seed, step, unit, number of the call, global index of the
microbatch's first sample); recomputation in backward gets the same seed.  One process that runs
the plan's microbatches with these seeds draws the same dropout masks.  A call without batched
inputs (dropout of a table of positions) runs once for all samples and is seeded as if for
sample 0.  ``torch.nn.functional.dropout`` outside of units and of ``nn.Dropout`` would draw
once for all samples of the rank: such calls are intercepted and run microbatch by microbatch.

No seed reaches the generators of Python and NumPy: every rank would draw for itself, and a
recomputation anew.  A model may draw from them only if nothing depends on it, as a layerdrop
of 0.0 draws.  So each forward of a probe begins with generators whose next numbers are all
near 0; if any were drawn, further forwards begin with numbers near a half and near 1, and have
to give the same.  Both generators are Mersenne twisters (Matsumoto and Nishimura, 1998): 624
words, each of which is tempered into 32 bits of output.  Words are chosen so that the tempered
ones are as wanted.

[Note: Caches]
Configurations of Hugging Face models enable ``use_cache`` by default, also in training.  Each
microbatch and each recomputation would append to the cache again, so it is off while a HetFSDP
model runs, as it is under their own gradient checkpointing.  A model that computes something
else with a cache than without (some tell packed sequences by their positions only without) is
refused.  Their checkpointing would call units once more in backward; the plan says what is
recomputed.
"""

import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from shardhet.comm import devices
from shardhet.fsdp.microbatch.modes import FunctionMode
from shardhet.fsdp.sharding.unit import UnitModule
from shardhet.records.schedule import Phase


def microbatch_seed(seed: int, step: int, unit_fqn: str, call: int, first_sample: int) -> int:
    """The seed of a microbatch, in [0, 2**63).

    ``step`` is the number of finished steps, ``call`` the number of earlier calls of the unit
    in this forward.
    """
    text = f"{seed}/{step}/{unit_fqn}/{call}/{first_sample}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def restored_random_state(device: torch.device) -> AbstractContextManager[None]:
    """A context that restores the generators of the host and of ``device`` at its end."""
    return _restored(_generators(device))


@contextmanager
def _restored(generators: Sequence[torch.Generator]) -> Iterator[None]:
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of the host and of ``device``."""
    for generator in _generators(device):
        generator.manual_seed(seed)


class RandomStates:
    """Seeds a model's computations in training mode, and restores the generators."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = _generators(device)

    def around(self, is_training: bool) -> AbstractContextManager[None]:
        """A context in which the generators may be seeded; it restores them at its end."""
        return _restored(self._generators) if is_training else nullcontext()

    def seed(
        self, unit_fqn: str, call: int, step: int, first_sample: int, is_training: bool
    ) -> None:
        """Seed the generators for a microbatch, if ``is_training``."""
        if is_training:
            seed = microbatch_seed(self._seed, step, unit_fqn, call, first_sample)
            for generator in self._generators:
                generator.manual_seed(seed)


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if not devices.is_on_host(device):
        module = devices.module_of(device)
        index = module.current_device() if device.index is None else device.index
        generators.append(module.default_generators[index])
    return generators


NUM_WORDS = 624
NUM_CHOSEN = 500  # 250 numbers; the words that follow are arbitrary, so that loops end
# Words that are tempered into 0, into 2**31 (numbers of 0.5), and into 2**32 - 1.
LOW, MIDDLE, HIGH = 0x0, 0x80102204, 0x12DD9BB3
NUMBERS = {LOW: 0.0, MIDDLE: 0.5, HIGH: 1 - 2.0**-24}
NAMES = ("Python's random", "NumPy's random")


class HostGenerators:
    """The global generators of Python and NumPy, whose states it can set and look at."""

    def __init__(self) -> None:
        self._begun_with: list[Any] = []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context at whose end they are as before."""
        before = _states()
        try:
            yield
        finally:
            _set_states(before)

    def begin(self, word: int) -> None:
        """Let the next numbers of both be near that of the word."""
        filler = range(1, 1 + NUM_WORDS - NUM_CHOSEN)
        words = [word] * NUM_CHOSEN + [(i * 0x9E3779B9) % 2**32 for i in filler]
        python = random.getstate()
        states: list[Any] = [(python[0], (*words, 0), None)]
        if len(_states()) > 1:
            states.append(("MT19937", words, 0, 0, 0.0))
        _set_states(states)
        self._begun_with = _states()

    def drawn(self) -> list[str]:
        """The names of those that have been drawn from since the last ``begin``."""
        pairs = zip(NAMES, _states(), self._begun_with, strict=False)
        return [name for name, now, before in pairs if now != before]


def _states() -> list[Any]:
    """The state of Python's generator, and of NumPy's if it is imported and a twister."""
    states: list[Any] = [random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, *rest = numpy.random.get_state()
        if name == "MT19937":
            states.append((name, words.tolist(), *rest))
    return states


def _set_states(states: list[Any]) -> None:
    random.setstate(states[0])
    if len(states) > 1:
        sys.modules["numpy"].random.set_state(states[1])


Context = AbstractContextManager[Any]


class VisitContext:
    """One concern around one visit.  A method is called when its place begins, and may return
    a context that ends with it; those of this base class do nothing.
    """

    def in_phase(self, phase: Phase) -> Context | None:
        """Around all runs of the visit in forward, or in backward."""
        return None

    def in_function(self, start: int, is_repeated: bool) -> Context | None:
        """Around the unit's own forward, also when backward repeats it.  ``start`` is the
        first sample of the microbatch within the rank's batch.
        """
        return None


def entered(around: Sequence[VisitContext], place: str, *given: Any) -> Context:
    """One context of all that ``place``, a method of theirs, returns, entered in order."""
    needed: list[Context] = []
    nothing = getattr(VisitContext, place)
    for one in around:  # a loop that calls nothing in vain: it runs several times a visit
        if getattr(type(one), place) is not nothing:
            context = getattr(one, place)(*given)
            if context is not None:
                needed.append(context)
    if not needed:
        return nullcontext()
    if len(needed) == 1:
        return needed[0]
    stack = ExitStack()
    with stack:
        for each in needed:
            stack.enter_context(each)
        return stack.pop_all()


@dataclass(frozen=True, slots=True)
class Seeded(VisitContext):
    """Seeds by unit, call, step and sample, whichever rank computes it and how often."""

    random: RandomStates
    fqn: str
    call: int
    step: int
    first_sample: int  # global index of the first sample of the rank's batch
    recomputes: bool = False

    def in_phase(self, phase: Phase) -> Context | None:
        """Restore the random state around it afterwards, where the phase seeds any."""
        seeds = phase is Phase.FORWARD or self.recomputes
        return self.random.around(is_training=True) if seeds else None

    def in_function(self, start: int, is_repeated: bool) -> Context | None:
        """Seed."""
        sample = self.first_sample + start
        self.random.seed(self.fqn, self.call, self.step, sample, is_training=True)
        return None


DROPOUT_CALLS = "torch.nn.functional.dropout"  # the fqn of all such calls; no module has it

_FUNCTIONS = frozenset(
    (
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
    )
)


class CheckpointedError(RuntimeError):
    """Raised for a unit that is called under torch's gradient checkpointing."""


Visit = Callable[[UnitModule, tuple[Any, ...], dict[str, Any]], Any]


class RootDropout(FunctionMode):
    """Passes such calls to ``visit`` while it is switched on."""

    def __init__(self, root: nn.Module, visit: Visit) -> None:
        super().__init__()
        self._root, self._visit = root, visit
        self._is_taken_over = False  # in this forward
        self._num_left_alone = 0

    def taken_over(self, *, is_needed: bool) -> AbstractContextManager[Any]:
        """A context for code outside of units; free for a model without such calls."""
        self._is_taken_over = is_needed
        return self if is_needed else nullcontext()

    def left_alone(self) -> AbstractContextManager[None]:
        """A context for a unit or an ``nn.Dropout``, which runs by microbatch already."""
        return self._left_alone() if self._is_taken_over else nullcontext()

    @contextmanager
    def _left_alone(self) -> Iterator[None]:
        self._num_left_alone += 1
        try:
            # With another mode on top it cannot be popped, and only the counter disables it.
            is_on_top = _get_current_function_mode() is self
            with _pop_mode_temporarily() if is_on_top else nullcontext():
                yield
        finally:
            self._num_left_alone -= 1

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # For all values of p and training, since they may differ at the next step.
        if func in _FUNCTIONS and not self._num_left_alone:
            return self._visit(UnitModule(DROPOUT_CALLS, self._root, func, False), args, kwargs)
        return func(*args, **kwargs)


def is_checkpointed(*, grad_enabled: bool) -> bool:
    """Whether the current code will run again in backward, by gradient checkpointing.

    ``grad_enabled`` is whether gradients were enabled when the call of the model began.
    Reentrant checkpointing disables them; the other kind sets hooks on saved tensors.
    """
    if grad_enabled and not torch.is_grad_enabled():
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


logger = logging.getLogger(__name__)


class CacheSwitch:
    """Switches off ``use_cache`` in all configurations of a model."""

    def __init__(self, module: nn.Module) -> None:
        found = {
            id(config): config
            for each in module.modules()
            for config in _configs(getattr(each, "config", None))
        }
        self._configs = tuple(found.values())
        self._checkpointing: list[Any] = [
            each for each in module.modules() if getattr(each, "gradient_checkpointing", False)
        ]
        if self._checkpointing:
            warnings.warn(
                "gradient_checkpointing of the model has no effect, because the plan says what "
                "each rank recomputes: Plan.by_hand(..., recompute=True).",
                stacklevel=3,
            )
        for config in (each for each in self._configs if each.use_cache):
            try:
                config.use_cache = True
            except Exception as error:  # a frozen class raises anything
                raise ValueError(_FROZEN.format(type(config).__name__)) from error
        self._stays_on = False

    @property
    def is_asked_for(self) -> bool:
        """Whether any configuration asks for a cache."""
        return any(config.use_cache for config in self._configs)

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context in which ``off`` leaves the caches on."""
        self._stays_on = True
        try:
            yield
        finally:
            self._stays_on = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which no configuration asks for a cache."""
        asking = [each for each in self._configs if each.use_cache and not self._stays_on]
        for config in asking:
            config.use_cache = False
        for each in self._checkpointing:
            each.gradient_checkpointing = False
        try:
            yield
        finally:
            for config in asking:
                config.use_cache = True
            for each in self._checkpointing:
                each.gradient_checkpointing = True


@cache
def tell_of_caches() -> None:
    """Say once that they are off."""
    logger.warning(
        "model(...): config.use_cache is True, but HetFSDP trains without KV caches, as "
        "transformers' Trainer does. This model computes the same without one."
    )


_FROZEN = (
    "{}.use_cache is True and cannot be set, but HetFSDP trains without KV caches. Make the "
    "configuration with use_cache=False."
)


def _configs(config: Any) -> list[Any]:
    """Those of ``config`` and its parts (text, vision) that have ``use_cache``."""
    parts = [config, *vars(config).values()] if hasattr(config, "__dict__") else []
    return [part for part in parts if isinstance(getattr(part, "use_cache", None), bool)]
