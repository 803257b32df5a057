"""What surrounds the forward or backward of a unit: turn, seeds, batch norm, observers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.batching import VisitRules
from shardhet.fsdp.microbatch.host_inputs import InputsOnHost
from shardhet.fsdp.microbatch.joining import spans_of
from shardhet.fsdp.microbatch.layered import Visit
from shardhet.fsdp.microbatch.surroundings import Context, RandomStates, Seeded, Surrounding
from shardhet.fsdp.probing.module_state import AsItWas
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
class Visits:
    """Makes the visits of a rank: what a call computes and what surrounds it."""

    staying: Sequence[FSDPUnit]  # unsharded for the whole step, the root among them
    rank_plan: RankPlan
    random: RandomStates
    norms: BatchNorms | None  # None: there are none
    observers: Observers
    device_type: str
    inputs: InputsOnHost | None  # those of units that the plan keeps on the host
    tiles: Tiles | None  # None: no unit runs in tiles
    tokens: ContextGroup | None = None  # that this rank is in

    _known: dict[str, "_OfModule"] = field(default_factory=dict)  # by fqn

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
        policy = _OF_ROOT
        if unit is not None:
            policy = self._known.get(module.fqn) or self._know(module.fqn)
        function = module.forward
        if unit is not None:
            function = self.function_of(module, recomputes=policy.recomputes)
        # The root owns the parameters that a unit shares with it.
        units = self.staying if unit is None else (*self.staying, unit)
        return Visit(
            unit_fqn=module.fqn if unit is None else unit.fqn,
            function=function,
            rules=rules,
            microbatch_sizes=of.microbatch_sizes,
            recomputes=policy.recomputes,
            param_storages=frozenset(
                [flat.unsharded_storage for each in units for flat in each.flats]
            ),
            device_type=self.device_type,
            around=tuple(self.around(module, rules, of, call, unit, backward, policy)),
            inputs_on_host=self.inputs if policy.keeps_input else None,
        )

    def around(
        self,
        module: UnitModule,
        rules: VisitRules,
        of: Round,
        call: int,
        unit: FSDPUnit | None,  # None: the module belongs to the root, which stays unsharded
        backward: BackwardTurn | None,
        policy: "_OfModule",
    ) -> list[Surrounding]:
        """What surrounds a visit, in the order of entering; a new concern is a line here."""
        fqn, found = module.fqn if unit is None else unit.fqn, list[Surrounding]()
        if backward is not None:  # a turn begins before anything else of its backward
            found.append(backward)
        if self.inputs is not None and unit is not None:
            found.append(TurnOfInputs(self.inputs, self.inputs.number))
        if module.module.training:
            # A call that runs once for all samples draws the same numbers on every rank.
            first = of.seeded_as if rules.is_batched else 0
            step = of.moment.step
            found.append(Seeded(self.random, fqn, call=call, step=step, first_sample=first))
        if self.norms is not None:
            found.append(NotedNorms(self.norms, of.first_sample))
        if policy.recomputes or rules.counts:
            found.append(AsItWas(module.module, counts=rules.counts))
        if self.tokens is not None:
            whole = [Span(0, of.num_samples)]
            spans = spans_of(of.microbatch_sizes) if rules.is_batched else whole
            found.append(self.tokens.around(spans, keeps=policy.keeps_tokens))
        return [*found, Reported(self.observers, fqn)]

    def _know(self, fqn: str) -> "_OfModule":
        plan, tokens = self.rank_plan, self.tokens
        policy = self._known[fqn] = _OfModule(
            recomputes=plan.recomputes(fqn),
            keeps_input=plan.keeps_input_on_host(fqn),
            keeps_tokens=tokens is not None and tokens.keeps(fqn),
        )
        return policy


class _OfModule(NamedTuple):
    """What the plan says of the visits of a module."""

    recomputes: bool = False
    keeps_input: bool = False  # on the host
    keeps_tokens: bool = False  # those of the other members of its group


_OF_ROOT = _OfModule()
