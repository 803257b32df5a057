"""The walk of a step over its units: order, prefetch, and what each rank does at each turn.

[Note: Turns without compute]
Every rank takes every turn of the schedule and launches the same collectives.  On a rank
without samples the turn is only that.  On a computing rank the same happens in backward to
a unit that autograd passed by, because nothing that it returned was used.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardhet.distributed import Channel, Lifeline
from shardhet.fsdp.batching import BatchRule, first_length
from shardhet.fsdp.comm import CommContext
from shardhet.fsdp.layered import Visit, run_visit
from shardhet.fsdp.observer import Activity, Observers
from shardhet.fsdp.order import VisitOrder
from shardhet.fsdp.seeds import RandomStates
from shardhet.fsdp.unit import FSDPUnit, UnitModule, UnitState
from shardhet.fsdp.unit_by_unit import UnitByUnit
from shardhet.plan import Plan
from shardhet.schedule import Phase, Segment, Turn

MAX_REDUCTIONS_IN_FLIGHT = 1  # besides the unit whose gradients accumulate


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
        batch_rule: BatchRule,
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
        self._batch_rule = batch_rule
        self._anchor = torch.zeros((), device=comm.device, requires_grad=True)
        self._order = VisitOrder(
            [unit.fqn for unit in units],
            trainable_units=frozenset(i for i, unit in enumerate(units) if unit.is_trainable),
            reshard_after_forward=plan.reshard_after_forward,
            control=control,
        )

        self.unit_by_unit: UnitByUnit | None = None  # inside that context
        # Of the step in progress
        self.batch: RankBatch | None = None
        self.awaits_backward = False
        self._cursor = 0  # the turn in progress, or the next one
        self._calls_by_unit: dict[int, int] = {}
        self._reductions: deque[FSDPUnit] = deque()
        self._is_in_autograd = False

    # Forward #

    def forward(self, run_module: Callable[[], Any], inputs: Any, is_training: bool) -> Any:
        """The module's output, or None on a rank without samples.  Collective.

        ``inputs`` are what ``run_module`` computes on; dim 0 of the first tensor is the batch.
        """
        num_samples = first_length(inputs)
        self.abandon()
        self._agree_on_batch(num_samples)
        assert self.batch is not None
        if not self.batch.computing:
            return None
        self._comm.receivers = self.batch.computing
        self._order.begin(has_gradients=torch.is_grad_enabled())
        self._cursor = 0
        self._calls_by_unit = {}
        self._comm.mark_compute()  # gathers read what the optimizer wrote
        self.root.unshard()
        self._launch_ahead()
        self._take_in(self.root)
        output = None
        if self.batch.num_samples:
            with self._random.around(is_training), self._following(inputs):
                self._random.seed("", 0, self.step, self.batch.first_sample, is_training)
                output = run_module()
            self._order.end_visits(self._cursor)
        else:
            self._follow_forward()
        self._end_forward()
        return output

    def _following(self, inputs: Any) -> AbstractContextManager[Any]:
        assert self.batch is not None
        self._batch_rule.end()
        is_worth_it = self._order.schedule is None and len(self.batch.microbatch_sizes) > 1
        num_samples = self.batch.num_samples
        return self._batch_rule.follow(inputs, num_samples) if is_worth_it else nullcontext()

    def _agree_on_batch(self, num_samples: int) -> None:
        mine = [num_samples, torch.is_grad_enabled(), self.step]
        with self.observers.watch("", Activity.AGREE):
            rows = self._control.enter("model(...)", mine)
        for name, column in (("gradients enabled", 1), ("the number of finished steps", 2)):
            values = [row[column] for row in rows]
            if len(set(values)) > 1:
                raise ValueError(
                    f"model(...): ranks differ in {name}: {values} in plan order. Call it in "
                    "the same way on every rank."
                )
        sizes = [int(row[0]) for row in rows]
        position = self._control.position
        if torch.is_grad_enabled():
            self._check_fits_plan(sizes)
        self.batch = RankBatch(
            microbatch_sizes=self._rank_plan.split(num_samples),
            first_sample=sum(sizes[:position]),
            computing=tuple(i for i, size in enumerate(sizes) if size),
        )

    def _check_fits_plan(self, sizes: Sequence[int]) -> None:
        for i, (size, rank) in enumerate(zip(sizes, self._plan.ranks, strict=True)):
            if size > rank.rank_batch_size:
                raise ValueError(
                    f"model(...): position {i} of the plan got {size} samples but the plan "
                    f"gives it {rank.rank_batch_size}, and memory was planned for that. Deal "
                    "the global batch as the plan does (see shardhet.data.deal)."
                )

    def visit(
        self, unit_index: int, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of one of the unit's modules: what its intercepted forward does."""
        if self.unit_by_unit is not None:
            return self.unit_by_unit.visit(unit_index, module, args, kwargs)
        unit = self.units[unit_index]
        if self.batch is None or not self.batch.num_samples:
            with self._lifeline.guard():  # outside of model(...) nobody else tells peers
                raise RuntimeError(
                    f"unit {unit.fqn!r} was called outside of HetFSDP's forward. Call the "
                    f"HetFSDP model, not the module inside it."
                )
        needs_backward = torch.is_grad_enabled() and (
            unit.is_trainable or _any_requires_grad((args, kwargs))
        )
        call = self._calls_by_unit.get(unit_index, 0)
        self._calls_by_unit[unit_index] = call + 1
        segment = self._cursor
        if self._order.schedule is None:
            found = self._order.find(unit_index, needs_backward)
            needs_backward = found.needs_backward
            self._adopt(found)
        else:
            needs_backward = self._order.expect(segment, unit_index, needs_backward)
            self._begin_turn()
        whole = self._batch_rule.passed_whole(
            unit.fqn, module.forward, self.batch.num_samples, (args, kwargs)
        )
        visit = self._make_visit(unit, module, call, segment, whole)
        with self._batch_rule.visit():
            output = run_visit(visit, self._anchor if needs_backward else None, args, kwargs)
        self._batch_rule.end_visit(output)
        self._end_turn()
        return output

    def _make_visit(
        self,
        unit: FSDPUnit,
        module: UnitModule,
        call: int,
        segment: int,
        passed_whole: frozenset[int],
    ) -> Visit:
        assert self.batch is not None
        is_training = module.module.training
        watch = self.observers.watch
        return Visit(
            unit_fqn=unit.fqn,
            function=module.forward,
            microbatch_sizes=self.batch.microbatch_sizes,
            recomputes=self._rank_plan.recomputes(module.fqn),
            unbatched_addresses=passed_whole,
            param_addresses=frozenset(flat.unsharded_address for flat in unit.flats),
            device_type=self._comm.device.type,
            random_state=partial(self._random.around, is_training),
            seed_microbatch=self._seeder(unit.fqn, call, is_training),
            watch_forward=partial(watch, unit.fqn, Activity.FORWARD),
            watch_backward=partial(watch, unit.fqn, Activity.BACKWARD),
            enter_backward=partial(self._enter_backward, segment, self.step),
            leave_backward=self._end_turn,
        )

    def _adopt(self, visited: Segment) -> None:
        """All ranks have agreed that this is the next visit ([Note: Finding the order])."""
        for previous in self._order.found[-2:-1]:
            if not self._order.keeps_after_forward(previous.unit, visited.unit):
                self.units[previous.unit].reshard()
        self._lifeline.doing = f"forward of unit {self.units[visited.unit].fqn!r}"
        self._take_in(self.units[visited.unit])

    def _follow_forward(self) -> None:
        """The forward of a rank without samples."""
        if self._order.schedule is None:
            while (visited := self._order.follow()) is not None:
                self._adopt(visited)
                self._cursor += 1
        else:
            while self._cursor < self._order.schedule.num_forward:
                self._begin_turn()
                self._end_turn()

    def _end_forward(self) -> None:
        if self._order.schedule is None:
            turns = self._order.settle().turns[: self._cursor]
            for turn in {turn.unit: turn for turn in turns}.values():  # each unit's last one
                if turn.reshards:
                    self.units[turn.unit].reshard()
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
        assert self._order.schedule is not None
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
        if self._order.schedule is not None:
            for turn in self._order.schedule.turns[self._cursor : self._cursor + 2]:
                if turn.gathers:
                    self.units[turn.unit].unshard()

    def _take_in(self, unit: FSDPUnit) -> None:
        unit.unshard()  # nothing if it was launched ahead
        with self.observers.watch(unit.fqn, Activity.WAIT_GATHER):
            unit.wait_for_unshard()

    def _end_turn(self) -> None:
        if self._order.schedule is not None:
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
        assert self._order.schedule is not None
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
        self.batch = None
        self.awaits_backward = False

    def _seeder(self, unit_fqn: str, call: int, is_training: bool) -> Callable[[int], None]:
        assert self.batch is not None
        first_sample, step = self.batch.first_sample, self.step

        def seed_microbatch(start: int) -> None:
            self._random.seed(unit_fqn, call, step, first_sample + start, is_training)

        return seed_microbatch


def _any_requires_grad(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(tree))
