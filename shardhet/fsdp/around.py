"""What the runtime does around a visit: random numbers, batch norms, observers, the turn."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from shardhet.fsdp.batch_norm import BatchNorms
from shardhet.fsdp.layered import Surroundings
from shardhet.fsdp.observer import Activity, Observers
from shardhet.fsdp.seeds import RandomStates


@dataclass(frozen=True, slots=True)
class BackwardTurn:
    """The turn that a visit of a unit is in backward."""

    enter: Callable[[int, int], None]  # with segment and step
    leave: Callable[[], None]
    segment: int
    step: int


class AroundVisit(Surroundings):
    """The surroundings of one visit of a unit, or of a module of the root's."""

    def __init__(
        self,
        fqn: str,
        *,
        call: int,
        step: int,
        first_sample: int,
        first_drawn: int,
        is_training: bool,
        random: RandomStates,
        norms: BatchNorms,
        observers: Observers,
        backward: BackwardTurn | None,
    ) -> None:
        """Args:

        call: how many visits of the unit there were before in this forward.
        first_sample: of the rank's batch, in the global batch.
        first_drawn: the same as random numbers count it.
        backward: None for what belongs to the root, which is always unsharded.
        """
        self._fqn = fqn
        self._call = call
        self._step = step
        self._first_sample = first_sample
        self._first_drawn = first_drawn
        self._is_training = is_training
        self._random = random
        self._norms = norms
        self._observers = observers
        self._backward = backward

    def random_state(self) -> AbstractContextManager[Any]:
        """The program's own random numbers go on afterwards as if nothing had drawn."""
        return self._random.around(self._is_training)

    def seed_microbatch(self, start: int) -> None:
        """By unit, call, step and sample, whoever computes it and how often."""
        sample = self._first_drawn + start
        self._random.seed(self._fqn, self._call, self._step, sample, self._is_training)

    def in_forward(self, microbatch: int) -> AbstractContextManager[Any]:
        """Observers are told."""
        return self._observers.watch(self._fqn, Activity.FORWARD, microbatch)

    def in_backward(self, microbatch: int) -> AbstractContextManager[Any]:
        """Observers are told."""
        return self._observers.watch(self._fqn, Activity.BACKWARD, microbatch)

    def in_function(self, start: int, is_repeated: bool) -> AbstractContextManager[Any]:
        """Batch norms note what they see, once."""
        return self._norms.noting(self._first_sample + start, is_repeated=is_repeated)

    def enter_backward(self) -> None:
        """The unit's turn begins."""
        if self._backward is not None:
            self._backward.enter(self._backward.segment, self._backward.step)

    def leave_backward(self) -> None:
        """The unit's turn ends."""
        if self._backward is not None:
            self._backward.leave()
