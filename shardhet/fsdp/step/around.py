"""What surrounds the forward or backward of a unit: turn, seeds, batch norm, observers.

Observers get one record per computation or wait.

[Note: Whose clock]
On an accelerator the host runs ahead: it launches a computation long before the device begins
it, and does not block in a wait between streams.  The time on the device is therefore taken
between two device events on the compute stream, one before and one after the activity:

    host      |launch|launch|agree ....|launch|
    device           |b  forward  e|   |b  forward  e|
                                 b...e                  in a wait the device is idle that long

Nothing waits for these events within a step; they are read after the device has passed them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from torch.profiler import record_function

from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.batching import BatchingRules
from shardhet.fsdp.microbatch.host_inputs import InputsOnHost
from shardhet.fsdp.microbatch.layered import Visit
from shardhet.fsdp.microbatch.surroundings import Context, RandomStates, Seeded, VisitContext
from shardhet.fsdp.probing.module_state import AsItWas
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitModule
from shardhet.fsdp.step.rounds import Round, RoundKey
from shardhet.fsdp.tokens.attention import ContextGroup
from shardhet.fsdp.tokens.tiles import Tiles
from shardhet.records.plan import RankPlan
from shardhet.records.schedule import Phase


class Activity(Enum):
    """What a rank did between the two times of a record."""

    FORWARD = "forward"
    BACKWARD = "backward"  # including recomputation
    WAIT_GATHER = "wait_gather"  # waiting for parameters that other ranks store
    WAIT_REDUCE = "wait_reduce"  # waiting for gradients of other ranks, and adding them up
    WAIT_STAGE = "wait_stage"  # waiting for samples or gradients of another stage
    AGREE = "agree"  # a small exchange between hosts, which waits for the slowest rank


COMPUTING = (Activity.FORWARD, Activity.BACKWARD)


class DeviceSpan(NamedTuple):
    """The device events before and after an activity ([Note: Whose clock])."""

    begin: Any  # a timed device event, as is ``end``
    end: Any

    @property
    def seconds(self) -> float:
        """Time on the device.  Raises ``RuntimeError`` until the device has passed ``end``."""
        return float(self.begin.elapsed_time(self.end)) / 1000  # from milliseconds


class Observed(NamedTuple):
    """One activity.  Times are those of ``time.perf_counter`` on the host."""

    unit: str  # fqn; "" is the root
    activity: Activity
    microbatch: int | None
    start_s: float
    end_s: float
    cpu_s: float | None = None  # CPU time of the thread; None: not counted
    device_span: DeviceSpan | None = None  # None: not requested, or the device is a CPU

    @property
    def seconds(self) -> float:
        """Device time if it was measured, else host time.  Raises as ``DeviceSpan.seconds``."""
        span = self.device_span
        return self.end_s - self.start_s if span is None else span.seconds


Observer = Callable[[Observed], None]


class Observers:
    """The observers of a runtime; without any, an activity costs two truth tests.

    ``is_traced`` labels every activity in the trace that torch.profiler records.
    """

    def __init__(self, mark_device_time: Callable[[], Any] | None = None) -> None:
        """``mark_device_time`` records a timed event on the compute stream; None on CPU, where
        the host itself is the device.
        """
        self.is_traced = False
        self._observers: dict[Observer, tuple[bool, bool]] = {}  # and what each asks for
        self._counts_cpu = False
        self._times_device = False
        self._mark_device_time = mark_device_time

    def add(
        self, observer: Observer, *, counts_cpu: bool = False, times_device: bool = False
    ) -> Callable[[], None]:
        """Call ``observer`` with every record from now on, in the thread that does the work.

        Returns a function that ends it.

        ``counts_cpu`` fills ``cpu_s`` of all records, at two system calls each;
        ``times_device`` fills ``device_span`` if the device is not the host, at two device
        events each.  The time that an observer takes counts as part of the activity for
        observers added after it and in traces; this is used to make a device look slower.
        """
        self._observers[observer] = (counts_cpu, times_device)
        self._follow_observers()

        def remove() -> None:
            del self._observers[observer]
            self._follow_observers()

        return remove

    def _follow_observers(self) -> None:
        asked = self._observers.values()
        self._counts_cpu = any(counts_cpu for counts_cpu, _ in asked)
        self._times_device = any(times_device for _, times_device in asked)

    def watch(
        self, unit: str, activity: Activity | Phase, microbatch: int | None = None
    ) -> AbstractContextManager[None]:
        """A context whose activity, or phase of a unit, is reported to the observers."""
        if not self._observers and not self.is_traced:
            return _UNWATCHED
        return self._watch(unit, Activity(activity.value), microbatch)

    def label(self, text: str) -> AbstractContextManager[Any]:
        """A context that the trace shows as ``text``, around activities."""
        return record_function(text) if self.is_traced else _UNWATCHED

    @contextmanager
    def _watch(self, unit: str, activity: Activity, microbatch: int | None) -> Iterator[None]:
        start_s = time.perf_counter()
        start_cpu_s = time.thread_time() if self._counts_cpu else None
        mark = self._mark_device_time if self._times_device else None
        begin = None if mark is None else mark()
        with (
            record_function(_label(unit, activity, microbatch))
            if self.is_traced
            else _UNWATCHED
        ):
            yield
            cpu_s = None if start_cpu_s is None else time.thread_time() - start_cpu_s
            span = None if mark is None else DeviceSpan(begin, mark())
            for observer in self._observers:
                end_s = time.perf_counter()
                observer(Observed(unit, activity, microbatch, start_s, end_s, cpu_s, span))


def _label(unit: str, activity: Activity, microbatch: int | None) -> str:
    place = unit or "root"
    return f"{activity.value} {place}" + ("" if microbatch is None else f" [{microbatch}]")


_UNWATCHED = nullcontext()


@dataclass(frozen=True, slots=True)
class BackwardTurn(VisitContext):
    """The backward turn of a visit of a unit."""

    enter: Callable[[int, RoundKey], None]  # called with segment and moment
    leave: Callable[[], None]  # not called after an error
    segment: int
    round_key: RoundKey

    def in_phase(self, phase: Phase) -> Context | None:
        """Begin the unit's turn when autograd reaches the visit, and end it."""
        return self._taken() if phase is Phase.BACKWARD else None

    @contextmanager
    def _taken(self) -> Iterator[None]:
        self.enter(self.segment, self.round_key)
        yield
        self.leave()


@dataclass(frozen=True, slots=True)
class TurnOfInputs(VisitContext):
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
class NotedNorms(VisitContext):
    """Batch norms note their statistics, unless it is a recomputation."""

    norms: BatchNorms
    first_sample: int  # global index of the first sample of the rank's batch

    def in_function(self, start: int, is_repeated: bool) -> Context | None:
        """Note them for this microbatch."""
        return self.norms.noting(self.first_sample + start, is_repeated=is_repeated)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Makes the visits of a rank: what a call computes and what surrounds it."""

    always_unsharded: Sequence[FSDPUnit]  # unsharded for the whole step, the root among them
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
        rules: BatchingRules,
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
        units = self.always_unsharded if unit is None else (*self.always_unsharded, unit)
        fqn = module.fqn if unit is None else unit.fqn
        return Visit(
            unit_fqn=fqn,
            function=function,
            rules=rules,
            spans=rules.runs(of.spans),
            recomputes=policy.recomputes,
            param_storages=frozenset(
                [flat.unsharded_storage for each in units for flat in each.flats]
            ),
            device_type=self.device_type,
            around=tuple(self.around(module, rules, of, call, unit, backward, policy)),
            watch=partial(self.observers.watch, fqn),
            inputs_on_host=self.inputs if policy.keeps_input else None,
        )

    def around(
        self,
        module: UnitModule,
        rules: BatchingRules,
        of: Round,
        call: int,
        unit: FSDPUnit | None,  # None: the module belongs to the root, which stays unsharded
        backward: BackwardTurn | None,
        policy: "_OfModule",
    ) -> list[VisitContext]:
        """What surrounds a visit, in the order of entering; a new concern is a line here."""
        fqn, found = module.fqn if unit is None else unit.fqn, list[VisitContext]()
        if backward is not None:  # a turn begins before anything else of its backward
            found.append(backward)
        if self.inputs is not None and unit is not None:
            found.append(TurnOfInputs(self.inputs, self.inputs.number))
        if module.module.training:
            # A call that runs once for all samples draws the same numbers on every rank.
            first = of.seeded_as if rules.is_batched else 0
            step, repeats = of.round_key.step, policy.recomputes
            found.append(Seeded(self.random, fqn, call, step, first, repeats))
        if self.norms is not None:
            found.append(NotedNorms(self.norms, of.first_sample))
        if policy.recomputes or rules.counts:
            found.append(AsItWas(module.module, counts=rules.counts))
        if self.tokens is not None:
            found.append(self.tokens.around(rules.runs(of.spans), keeps=policy.keeps_tokens))
        return found

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
