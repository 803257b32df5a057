"""What the runtime does around a visit: seed, note batch norms, observe, take the turn."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.batching import VisitRules
from shardhet.fsdp.microbatch.layered import Surroundings, Visit
from shardhet.fsdp.sharding.seeds import RandomStates
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitModule
from shardhet.fsdp.step.observer import Activity, Observers
from shardhet.fsdp.step.rank_batch import RankBatch
from shardhet.records.plan import RankPlan


@dataclass(frozen=True, slots=True)
class BackwardTurn:
    """The backward turn of a visit of a unit."""

    enter: Callable[[int, int], None]  # called with segment and step
    leave: Callable[[], None]
    segment: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AroundVisit(Surroundings):
    """The surroundings of one visit of a unit, or of a module of the root."""

    fqn: str
    call: int  # number of earlier visits in this forward
    step: int
    first_sample: int  # global index of the first sample of the rank's batch
    first_drawn: int  # the same index as used to seed random numbers
    is_training: bool
    random: RandomStates
    norms: BatchNorms
    observers: Observers
    backward: BackwardTurn | None  # None for a module of the root, which stays unsharded

    def random_state(self) -> AbstractContextManager[Any]:
        """Restore the program's random state afterwards."""
        return self.random.around(self.is_training)

    def seed_microbatch(self, start: int) -> None:
        """Seed by unit, call, step and sample, whichever rank computes it and how often."""
        sample = self.first_drawn + start
        self.random.seed(self.fqn, self.call, self.step, sample, self.is_training)

    def in_forward(self, microbatch: int) -> AbstractContextManager[Any]:
        """Report to observers."""
        return self.observers.watch(self.fqn, Activity.FORWARD, microbatch)

    def in_backward(self, microbatch: int) -> AbstractContextManager[Any]:
        """Report to observers."""
        return self.observers.watch(self.fqn, Activity.BACKWARD, microbatch)

    def in_function(self, start: int, is_repeated: bool) -> AbstractContextManager[Any]:
        """Let batch norms note their statistics, unless it is a recomputation."""
        return self.norms.noting(self.first_sample + start, is_repeated=is_repeated)

    def enter_backward(self) -> None:
        """Begin the unit's turn."""
        if self.backward is not None:
            self.backward.enter(self.backward.segment, self.backward.step)

    def leave_backward(self) -> None:
        """End the unit's turn."""
        if self.backward is not None:
            self.backward.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Makes the visits of a rank: what a call computes and the hooks around it."""

    root: FSDPUnit
    rank_plan: RankPlan
    random: RandomStates
    norms: BatchNorms
    observers: Observers
    device_type: str

    def of(
        self,
        module: UnitModule,
        rules: VisitRules,
        batch: RankBatch,
        *,
        call: int,
        unit: FSDPUnit | None = None,  # None: the module belongs to the root
        backward: BackwardTurn | None = None,
    ) -> Visit:
        """The visit for the ``call``-th call of the unit, or of a module of the root."""
        # Includes the root's: it owns the parameters that a unit shares with it.
        flats = (*self.root.flats, *(() if unit is None else unit.flats))
        fqn = module.fqn if unit is None else unit.fqn
        return Visit(
            unit_fqn=fqn,
            function=module.forward,
            rules=rules,
            microbatch_sizes=batch.microbatch_sizes,
            recomputes=unit is not None and self.rank_plan.recomputes(module.fqn),
            param_addresses=frozenset(flat.unsharded_address for flat in flats),
            device_type=self.device_type,
            around=AroundVisit(
                fqn=fqn,
                call=call,
                step=batch.step,
                first_sample=batch.first_sample,
                # A call that runs once for all samples draws the same numbers on every rank.
                first_drawn=batch.first_sample if rules.is_batched else 0,
                is_training=module.module.training,
                random=self.random,
                norms=self.norms,
                observers=self.observers,
                backward=backward,
            ),
        )
