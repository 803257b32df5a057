"""What surrounds the forward or backward of a unit: turn, seeds, batch norm, observers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.batching import VisitRules
from shardhet.fsdp.microbatch.host_inputs import InputsOnHost
from shardhet.fsdp.microbatch.joining import spans_of
from shardhet.fsdp.microbatch.layered import Visit
from shardhet.fsdp.microbatch.surroundings import Context, Seeded, Surrounding
from shardhet.fsdp.probing.module_state import AsItWas
from shardhet.fsdp.sharding.seeds import RandomStates
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitModule
from shardhet.fsdp.step.observer import Activity, Observers
from shardhet.fsdp.step.rounds import Moment, Round
from shardhet.fsdp.tokens.attention import ContextGroup
from shardhet.fsdp.tokens.tiles import Tiles
from shardhet.records.layout import Span
from shardhet.records.plan import RankPlan
from shardhet.records.schedule import Phase


@dataclass(frozen=True, slots=True)
class BackwardTurn(Surrounding):
    """The backward turn of a visit of a unit."""

    enter: Callable[[int, Moment], None]  # called with segment and moment
    leave: Callable[[], None]  # not called after an error
    segment: int
    moment: Moment

    def in_phase(self, phase: Phase) -> Context | None:
        """Begin the unit's turn when autograd reaches the visit, and end it."""
        return self._taken() if phase is Phase.BACKWARD else None

    @contextmanager
    def _taken(self) -> Iterator[None]:
        self.enter(self.segment, self.moment)
        yield
        self.leave()


@dataclass(frozen=True, slots=True)
class TurnOfInputs(Surrounding):
    """Inputs on the host leave the device a turn later, and come back a turn ahead."""

    inputs: InputsOnHost
    number: int  # of those that earlier visits keep there

    def in_phase(self, phase: Phase) -> Context | None:
        """Begin a turn."""
        if phase is Phase.FORWARD:
            self.inputs.begin_turn()
        else:
            self.inputs.reach(self.number)
        return None


@dataclass(frozen=True, slots=True)
class NotedNorms(Surrounding):
    """Batch norms note their statistics, unless it is a recomputation."""

    norms: BatchNorms
    first_sample: int  # global index of the first sample of the rank's batch

    def in_function(self, start: int, is_repeated: bool) -> Context | None:
        """Note them for this microbatch."""
        return self.norms.noting(self.first_sample + start, is_repeated=is_repeated)


@dataclass(frozen=True, slots=True)
class Reported(Surrounding):
    """Each microbatch is reported to the observers."""

    observers: Observers
    fqn: str

    def in_microbatch(self, phase: Phase, microbatch: int) -> Context | None:
        """Report it."""
        return self.observers.watch(self.fqn, _ACTIVITIES[phase], microbatch)


_ACTIVITIES = {Phase.FORWARD: Activity.FORWARD, Phase.BACKWARD: Activity.BACKWARD}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneVisit:
    """What surroundings know of a visit."""

    fqn: str  # of the unit, or of the module of the root
    module: UnitModule
    unit: FSDPUnit | None  # None: the module belongs to the root, which stays unsharded
    rules: VisitRules
    round: Round
    call: int  # number of earlier visits in this forward
    backward: BackwardTurn | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Makes the visits of a rank: what a call computes and what surrounds it."""

    staying: Sequence[FSDPUnit]  # unsharded for the whole step, the root among them
    rank_plan: RankPlan
    random: RandomStates
    norms: BatchNorms
    observers: Observers
    device_type: str
    inputs: InputsOnHost | None  # those of units that the plan keeps on the host
    tiles: Tiles | None  # None: no unit runs in tiles
    tokens: ContextGroup | None = None  # that this rank is in

    def function_of(
        self, module: UnitModule, *, recomputes: bool = False, is_probe: bool = False
    ) -> Callable[..., Any]:
        """The forward of a unit's module, in tiles where the plan says so."""
        if self.tiles is None:
            return module.forward
        return self.tiles.function_of(module, recomputes=recomputes, is_probe=is_probe)

    def of(
        self,
        module: UnitModule,
        rules: VisitRules,
        of: Round,
        *,
        call: int,
        unit: FSDPUnit | None = None,
        backward: BackwardTurn | None = None,
    ) -> Visit:
        """The visit for the ``call``-th call of the unit, or of a module of the root."""
        # The root owns the parameters that a unit shares with it.
        units = (*self.staying, *(() if unit is None else (unit,)))
        flats = [flat for each in units for flat in each.flats]
        one = OneVisit(
            fqn=module.fqn if unit is None else unit.fqn,
            module=module,
            unit=unit,
            rules=rules,
            round=of,
            call=call,
            backward=backward,
        )
        around = [make(self, one) for make in SURROUNDINGS]
        recomputes = unit is not None and self.rank_plan.recomputes(module.fqn)
        function = module.forward
        if unit is not None:
            function = self.function_of(module, recomputes=recomputes)
        return Visit(
            unit_fqn=one.fqn,
            function=function,
            rules=rules,
            microbatch_sizes=of.microbatch_sizes,
            recomputes=recomputes,
            param_addresses=frozenset(flat.unsharded_address for flat in flats),
            device_type=self.device_type,
            around=tuple(each for each in around if each is not None),
            inputs_on_host=self.inputs
            if unit is not None and self.rank_plan.keeps_input_on_host(module.fqn)
            else None,
        )


def _turn(visits: Visits, one: OneVisit) -> Surrounding | None:
    return one.backward


def _inputs(visits: Visits, one: OneVisit) -> Surrounding | None:
    if visits.inputs is None or one.unit is None:
        return None
    return TurnOfInputs(visits.inputs, visits.inputs.number)


def _seeds(visits: Visits, one: OneVisit) -> Surrounding | None:
    if not one.module.module.training:
        return None
    # A call that runs once for all samples draws the same numbers on every rank.
    first_sample = one.round.seeded_as if one.rules.is_batched else 0
    return Seeded(
        visits.random,
        one.fqn,
        call=one.call,
        step=one.round.moment.step,
        first_sample=first_sample,
    )


def _norms(visits: Visits, one: OneVisit) -> Surrounding | None:
    return NotedNorms(visits.norms, one.round.first_sample) if len(visits.norms) else None


def _tokens(visits: Visits, one: OneVisit) -> Surrounding | None:
    if visits.tokens is None:
        return None
    is_batched, number = one.rules.is_batched, one.round.num_samples
    spans = spans_of(one.round.microbatch_sizes) if is_batched else [Span(0, number)]
    keeps = one.unit is not None and visits.tokens.keeps(one.module.fqn)
    return visits.tokens.around(spans, keeps=keeps)


def _observers(visits: Visits, one: OneVisit) -> Surrounding | None:
    return Reported(visits.observers, one.fqn)


def _attributes(visits: Visits, one: OneVisit) -> Surrounding | None:
    recomputes = one.unit is not None and visits.rank_plan.recomputes(one.module.fqn)
    counts = one.rules.counts
    return AsItWas(one.module.module, counts=counts) if recomputes or counts else None


# Entered in this order; a turn begins before anything else of its backward.
SURROUNDINGS: list[Callable[[Visits, OneVisit], Surrounding | None]] = [
    _turn,
    _inputs,
    _seeds,
    _norms,
    _attributes,
    _tokens,
    _observers,
]
