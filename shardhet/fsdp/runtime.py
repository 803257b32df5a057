"""The walk of a step over its units: order, prefetch, and what each rank does at each turn.

[Note: Turns without compute]
Every rank takes every turn of the schedule and launches the same collectives.  On a rank
without samples the turn is only that.  On a computing rank the same happens in backward to
a unit that autograd passed by, because nothing that it returned was used.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardhet.comm.channel import Channel
from shardhet.comm.failure import Lifeline
from shardhet.fsdp.attempt import RunModule
from shardhet.fsdp.batch_norm import BatchNorms
from shardhet.fsdp.batching import VisitRules
from shardhet.fsdp.comm import CommContext
from shardhet.fsdp.known_calls import UNKNOWN, KnownCalls
from shardhet.fsdp.layered import Visit, run_visit
from shardhet.fsdp.module_state import CountedNumbers
from shardhet.fsdp.observer import Activity, Observers
from shardhet.fsdp.order import VisitOrder
from shardhet.fsdp.prober import Findings, Prober
from shardhet.fsdp.root_dropout import DROPOUT_CALLS, RootDropout, is_checkpointed
from shardhet.fsdp.seeds import RandomStates
from shardhet.fsdp.signature import ModelCall
from shardhet.fsdp.unit import FSDPUnit, UnitModule, UnitState
from shardhet.fsdp.unit_by_unit import UnitByUnit
from shardhet.records.plan import Plan
from shardhet.records.schedule import MAX_REDUCTIONS_IN_FLIGHT, Phase, Turn


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What of this step's global batch the rank computes."""

    microbatch_sizes: tuple[int, ...]
    first_sample: int  # index in the global batch
    computing: tuple[int, ...]  # positions of all ranks that compute something

    @property
    def num_samples(self) -> int:
        """Samples of this rank."""
        return sum(self.microbatch_sizes)


def _nothing() -> None:
    """Around the backward of what belongs to the root, which is always unsharded."""


class Runtime:
    """State of the step in progress, shared by all units of one model."""

    def __init__(
        self,
        units: Sequence[FSDPUnit],
        root: FSDPUnit,
        *,
        plan: Plan,
        comm: CommContext,
        control: Channel,
        lifeline: Lifeline,
        seed: int,
        module: nn.Module,
        norms: BatchNorms,
    ) -> None:
        self.units = tuple(units)
        self.root = root  # what no unit owns; unsharded for the whole step
        self.observers = Observers(None if comm.device.type == "cpu" else comm.mark_device_time)
        self.step = 0  # optimizer steps finished
        self._plan = plan
        self._rank_plan = plan.ranks[control.position]
        self._comm = comm
        self._control = control
        self._lifeline = lifeline
        self._random = RandomStates(seed, comm.device)
        self._module = module
        self._norms = norms
        self._anchor = torch.zeros((), device=comm.device, requires_grad=True)
        self._order = VisitOrder([unit.fqn for unit in units])
        self._prober = Prober(
            module,
            units,
            norms,
            control=control,
            device=comm.device,
            reshard_after_forward=plan.reshard_after_forward,
        )
        self._known = KnownCalls(self._prober, control)
        self._dropout = RootDropout(module, self.visit_piece)

        self.unit_by_unit: UnitByUnit | None = None  # inside that context
        # Of the step in progress
        self.batch: RankBatch | None = None
        self.awaits_backward = False
        self._has_gradients = False  # of the call, whatever code inside of it switches off
        self._cursor = 0  # the turn in progress, or the next one
        self._num_visits: Counter[str] = Counter()  # of this forward, by unit
        self._visiting = ""  # the unit that is being computed
        self._reductions: deque[FSDPUnit] = deque()
        self._is_in_autograd = False

    # Forward #

    def forward(self, run_module: RunModule, call: ModelCall, is_training: bool) -> Any:
        """The module's output; on a rank without samples what it is for none.  Collective.

        Returns None where nobody has samples.
        """
        self.abandon()
        self._has_gradients = torch.is_grad_enabled()
        splits = call.num_samples > max(self._rank_plan.microbatch_sizes, default=0)
        index = self._known.index_of(call, is_training=is_training, splits=splits)
        index = self._agree_on_batch(call, index)
        assert self.batch is not None
        if not self.batch.computing:
            return None
        self._comm.receivers = self.batch.computing
        self._comm.mark_compute()  # gathers read what the optimizer wrote
        self.root.unshard()
        self._take_in(self.root)
        if index == UNKNOWN:
            self._lifeline.doing = "model(...), the probe of its first call of this kind"
        with self._dropout.taken_over(is_needed=index == UNKNOWN):
            findings = self._known.begin(
                index, call, run_module, is_training=is_training, splits=splits
            )
        self._order.begin(findings.schedule)
        self._cursor = 0
        self._num_visits.clear()
        self._launch_ahead()
        output = None
        if is_training:
            self._norms.begin()
        if self.batch.num_samples:
            taken_over = self._dropout.taken_over(is_needed=findings.has_root_dropout)
            with self._random.around(is_training), taken_over:
                self._random.seed("", 0, self.step, self.batch.first_sample, is_training)
                output = run_module(*call.with_all())
            self._order.end_visits(self._cursor)
        else:
            self._follow_forward()
            output = findings.make_empty_output(self._comm.device)
        self._count_everywhere(findings)
        self._end_forward(is_training)
        return output

    def _count_everywhere(self, findings: Findings) -> None:
        """A rank without samples has the same numbers among its attributes as the others."""
        assert self.batch is not None
        if findings.counted and len(self.batch.computing) < len(self._plan.ranks):
            CountedNumbers(self._module, findings.counted).take_over(
                self._control,
                source=self.batch.computing[0],
                is_here=bool(self.batch.num_samples),
            )

    def _agree_on_batch(self, call: ModelCall, index: int) -> int:
        """Who computes what in this forward; which findings hold, UNKNOWN if none do."""
        num_samples = call.num_samples
        with_gradients = torch.is_grad_enabled()
        mine = [num_samples, 2 * index + with_gradients, self.step]
        with self.observers.watch("", Activity.AGREE):
            rows = self._control.enter("model(...)", mine)
        gradients = [bool(int(row[1]) % 2) for row in rows]
        steps = [row[2] for row in rows]
        for name, values in (
            ("gradients enabled", gradients),
            ("the number of finished steps", steps),
        ):
            if len(set(values)) > 1:
                raise ValueError(
                    f"model(...): ranks differ in {name}: {values} in plan order. Call it in "
                    "the same way on every rank."
                )
        sizes = [int(row[0]) for row in rows]
        position = self._control.position
        if with_gradients:
            self._check_fits_plan(sizes)
        self.batch = RankBatch(
            microbatch_sizes=self._rank_plan.split(num_samples),
            first_sample=sum(sizes[:position]),
            computing=tuple(i for i, size in enumerate(sizes) if size),
        )
        known = {int(row[1]) // 2 for row in rows if row[0]}
        return known.pop() if len(known) == 1 else UNKNOWN

    def _check_fits_plan(self, sizes: Sequence[int]) -> None:
        for i, (size, rank) in enumerate(zip(sizes, self._plan.ranks, strict=True)):
            if size > rank.rank_batch_size:
                raise ValueError(
                    f"model(...): position {i} of the plan got {size} samples but the plan "
                    f"gives it {rank.rank_batch_size}, and memory was planned for that. Deal "
                    "the global batch as the plan does (see shardhet.training.data.deal)."
                )

    def visit(
        self, unit_index: int, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of one of the unit's modules: what its intercepted forward does."""
        if self.unit_by_unit is not None:
            return self.unit_by_unit.visit(unit_index, module, args, kwargs)
        unit = self.units[unit_index]
        self._check_is_inside(unit.fqn)
        needs_backward = self._needs_backward(module, args, kwargs)
        if self._prober.is_running:
            self._lifeline.doing = f"forward of unit {unit.fqn!r}"
            self._prober.enter(unit_index, needs_backward)
            with self._visiting_unit(unit.fqn):
                return self._prober.call(module.fqn, module.forward, args, kwargs)
        segment = self._cursor
        needs_backward = self._order.expect(segment, unit_index, needs_backward)
        self._begin_turn()
        call = self._num_visits[unit.fqn]
        self._num_visits[unit.fqn] += 1
        with self._dropout.left_alone():
            leaves, rules = self._known.prepare(module, (args, kwargs))
        visit = self._make_visit(
            module,
            rules,
            unit=unit,
            call=call,
            recomputes=self._rank_plan.recomputes(module.fqn),
            enter_backward=partial(self._enter_backward, segment, self.step),
            leave_backward=self._end_turn,
        )
        with self._visiting_unit(unit.fqn):
            output = run_visit(visit, self._anchor if needs_backward else None, leaves)
        self._end_turn()
        return output

    def visit_piece(
        self, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a module of the root's that has to run microbatch by microbatch."""
        if self.batch is None or not self.batch.num_samples or not module.module.training:
            return module.forward(*args, **kwargs)
        is_function = module.fqn == DROPOUT_CALLS  # its checkpoint does not come here again
        if self._is_in_autograd or (
            is_function and is_checkpointed(grad_enabled=self._has_gradients)
        ):
            raise RuntimeError(
                f"{module.fqn} is called outside of units and once more during backward, by "
                "gradient checkpointing perhaps, where it would draw other numbers. Switch "
                "that off: which units are recomputed is the plan's choice "
                "(Plan.by_hand(recompute=True))."
            )
        needs_backward = self._needs_backward(module, args, kwargs)
        with self._dropout.left_alone():
            if self._prober.is_running:
                return self._prober.call(module.fqn, module.forward, args, kwargs)
            call = self._known.count(module)
            leaves, rules = self._known.prepare(module, (args, kwargs))
            visit = self._make_visit(module, rules, call=call)
            return run_visit(visit, self._anchor if needs_backward else None, leaves)

    @contextmanager
    def _visiting_unit(self, unit_fqn: str) -> Iterator[None]:
        self._visiting = unit_fqn
        try:
            with self._dropout.left_alone():
                yield
        finally:
            self._visiting = ""

    def _check_is_inside(self, unit_fqn: str) -> None:
        if self._is_in_autograd:
            raise RuntimeError(
                f"unit {unit_fqn!r} was called during backward, by gradient checkpointing "
                "around it perhaps. Switch that off: which units are recomputed is the "
                "plan's choice (Plan.by_hand(recompute=True))."
            )
        if self._visiting:
            raise RuntimeError(
                f"unit {unit_fqn!r} was called by unit {self._visiting!r}, so their parameters "
                "would be gathered once for each microbatch. Make one unit of both, or call it "
                "outside: HetFSDP(units=[...])."
            )
        if self.batch is None or not self.batch.num_samples:
            with self._lifeline.guard():  # outside of model(...) nobody else tells peers
                raise RuntimeError(
                    f"unit {unit_fqn!r} was called outside of HetFSDP's forward. Call the "
                    f"HetFSDP model, not the module inside it."
                )

    def _needs_backward(self, module: UnitModule, args: Any, kwargs: Any) -> bool:
        return torch.is_grad_enabled() and (
            module.is_trainable or _any_requires_grad((args, kwargs))
        )

    def _make_visit(
        self,
        module: UnitModule,
        rules: VisitRules,
        *,
        call: int,
        unit: FSDPUnit | None = None,  # None: the module is one of the root's
        recomputes: bool = False,
        enter_backward: Callable[[], None] = _nothing,
        leave_backward: Callable[[], None] = _nothing,
    ) -> Visit:
        assert self.batch is not None
        is_training = module.module.training
        first_sample = self.batch.first_sample
        # The root's too: it may own a parameter that the unit shares with it.
        flats = (*self.root.flats, *(() if unit is None else unit.flats))

        def around_forward(start: int, is_repeated: bool) -> AbstractContextManager[None]:
            return self._norms.noting(first_sample + start, is_repeated=is_repeated)

        unit_fqn = module.fqn if unit is None else unit.fqn
        return Visit(
            unit_fqn=unit_fqn,
            function=module.forward,
            rules=rules,
            microbatch_sizes=self.batch.microbatch_sizes,
            recomputes=recomputes,
            param_addresses=frozenset(flat.unsharded_address for flat in flats),
            device_type=self._comm.device.type,
            random_state=partial(self._random.around, is_training),
            # What is computed once for all samples draws the same on every rank.
            seed_microbatch=self._seeder(
                unit_fqn, call, first_sample if rules.is_batched else 0, is_training
            ),
            around_forward=around_forward,
            watch_forward=partial(self.observers.watch, unit_fqn, Activity.FORWARD),
            watch_backward=partial(self.observers.watch, unit_fqn, Activity.BACKWARD),
            enter_backward=enter_backward,
            leave_backward=leave_backward,
        )

    def _follow_forward(self) -> None:
        """The forward of a rank without samples."""
        while self._cursor < self._order.schedule.num_forward:
            self._begin_turn()
            self._end_turn()

    def _end_forward(self, is_training: bool) -> None:
        if is_training:
            self._norms.apply(self._control)
        self.awaits_backward = torch.is_grad_enabled()
        if self.awaits_backward:
            self._launch_ahead()  # while the loss is computed and shared
        else:
            self.root.reshard()
            self._comm.wait_all_sent()
            self.batch = None

    # Turns #

    @property
    def _turn(self) -> Turn:
        return self._order.schedule.turns[self._cursor]

    def _begin_turn(self) -> None:
        """Have the turn's unit unsharded and the next one's gather on its way."""
        turn = self._turn
        unit = self.units[turn.unit]
        self._lifeline.doing = f"{turn.phase.value} of unit {unit.fqn!r}"
        self._launch_ahead()
        self._take_in(unit)
        if turn.phase is Phase.BACKWARD:
            unit.begin_backward()

    def _launch_ahead(self) -> None:
        """Launch the gathers of this turn and the next, unless that has happened already."""
        for launch in self._order.schedule.gathers_by(self._cursor):
            self.units[launch.unit].unshard()

    def _take_in(self, unit: FSDPUnit) -> None:
        unit.unshard()  # nothing if it was launched ahead
        with self.observers.watch(unit.fqn, Activity.WAIT_GATHER):
            unit.wait_for_unshard()

    def _end_turn(self) -> None:
        turn = self._turn
        unit = self.units[turn.unit]
        if turn.reshards:
            unit.reshard()
        if turn.reduces:
            self._reduce(unit)
        self._lifeline.doing = f"{turn.phase.value} outside of units"
        self._cursor += 1

    def _reduce(self, unit: FSDPUnit) -> None:
        # Finishing the previous one first bounds the gradient buffers alive to two units'.
        while len(self._reductions) >= MAX_REDUCTIONS_IN_FLIGHT:
            self._finish_oldest_reduction()
        unit.reduce()
        self._reductions.append(unit)

    def _finish_oldest_reduction(self) -> None:
        unit = self._reductions.popleft()
        with self.observers.watch(unit.fqn, Activity.WAIT_REDUCE):
            unit.finish_reduce()

    # Backward #

    def backward(self, run_autograd: Callable[[], None]) -> None:
        """All turns of backward; ``run_autograd`` is called on computing ranks.  Collective."""
        assert self.batch is not None
        self.awaits_backward = False
        self.root.begin_backward()
        if self.batch.num_samples:
            self._is_in_autograd = True
            try:
                run_autograd()
            finally:
                self._is_in_autograd = False
        # [Note: Turns without compute]
        while self._cursor < len(self._order.schedule.turns):
            self._begin_turn()
            self._end_turn()
        if self.root.is_trainable:
            self._reduce(self.root)
        while self._reductions:
            self._finish_oldest_reduction()
        self.root.reshard()
        self._comm.wait_all_sent()
        self.batch = None

    def _enter_backward(self, segment: int, step: int) -> None:
        """Autograd has reached a visit; turns before it have been passed by."""
        if self.batch is None or self.step != step or not self._is_in_autograd:
            with self._lifeline.guard():  # outside of model.backward nobody else tells peers
                raise RuntimeError(
                    "backward of an earlier forward, or not through HetFSDP. Call "
                    "model.backward(loss_sum, num_tokens) once after each model(...), before "
                    "the next, instead of loss.backward()."
                )
        while self._turn.segment != segment:
            self._begin_turn()
            self._end_turn()
        self._begin_turn()

    def agree_on_grads(self) -> dict[str, bool]:
        """Which parameters have a gradient on any rank, by fqn.  Collective."""
        flats = [flat for unit in (*self.units, self.root) for flat in unit.flats]
        names = [slot.fqn for flat in flats for slot in flat.slots]
        mine = [float(has) for flat in flats for has in flat.has_grad]
        with self.observers.watch("", Activity.AGREE):
            rows = self._control.exchange(mine)
        return {
            name: any(column)
            for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }

    def abandon(self) -> None:
        """Leave a step whose backward never came: nothing in flight, everything sharded."""
        for unit in (*self.units, self.root):
            if unit.state is not UnitState.SHARDED:
                unit.reshard()
            unit.drop_grads()
        self._comm.wait_all_sent()
        self._norms.drop()
        self.batch = None
        self.awaits_backward = False

    def _seeder(
        self, unit_fqn: str, call: int, first_sample: int, is_training: bool
    ) -> Callable[[int], None]:
        step = self.step

        def seed_microbatch(start: int) -> None:
            self._random.seed(unit_fqn, call, step, first_sample + start, is_training)

        return seed_microbatch


def _any_requires_grad(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(tree))
