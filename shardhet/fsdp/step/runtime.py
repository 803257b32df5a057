"""One training step on this rank: forward, visits of units, backward."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardhet.comm import devices
from shardhet.comm.channel import Channel
from shardhet.comm.failure import Lifeline
from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.host_inputs import InputsOnHost
from shardhet.fsdp.microbatch.layered import run_visit
from shardhet.fsdp.microbatch.root_dropout import DROPOUT_CALLS, RootDropout, is_checkpointed
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.attempt import RunModule
from shardhet.fsdp.probing.caches import CacheSwitch
from shardhet.fsdp.probing.known_calls import UNKNOWN, KnownCalls
from shardhet.fsdp.probing.module_state import CountedNumbers
from shardhet.fsdp.probing.prober import Findings, Prober
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.seeds import RandomStates
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitModule
from shardhet.fsdp.step.around import BackwardTurn, Visits
from shardhet.fsdp.step.features import FeatureGathers
from shardhet.fsdp.step.host_slabs import reserve_on_hosts
from shardhet.fsdp.step.observer import Activity, Observers
from shardhet.fsdp.step.rank_batch import RankBatch, agree_on_batch
from shardhet.fsdp.step.rounds import Moment, Rounds
from shardhet.fsdp.step.turn_walk import TurnWalk
from shardhet.fsdp.step.unit_by_unit import UnitByUnit
from shardhet.records.plan import Plan


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
        caches: CacheSwitch,
    ) -> None:
        self.units = tuple(units)
        self.root = root  # parameters that no unit owns; unsharded for the whole step
        self.observers = Observers(
            None if devices.is_on_host(comm.device) else comm.mark_device_time
        )
        self.rounds = Rounds(plan)
        self.asks_to_end = self.is_asked_to_end = False  # this rank; any, at the last backward
        self._comm = comm
        self._control = control
        self._lifeline = lifeline
        self._random = RandomStates(seed, comm.device)
        self._module = module
        self._norms = norms
        self._caches = caches
        self._anchor = torch.zeros((), device=comm.device, requires_grad=True)
        self._walk = TurnWalk(
            units, root, comm=comm, lifeline=lifeline, observers=self.observers
        )
        self.features = FeatureGathers(comm, control, lifeline)
        self.had_samples = True  # on any rank, in the last forward
        self.own_samples = range(0)  # of the last forward, in the global batch
        self._inputs: InputsOnHost | None = None
        self.follow(plan)
        self._dropout = RootDropout(module, self.visit_piece)
        self.unit_by_unit: UnitByUnit | None = None  # inside that context
        # Of the step in progress
        self.batch: RankBatch | None = None
        self._has_gradients = False  # at the call of forward; the model may disable them inside
        self._num_visits: Counter[str] = Counter()  # of this forward, by unit
        self._visiting = ""  # the unit that is being computed
        self.awaits_backward = self._is_in_autograd = False

    def follow(self, plan: Plan, batches_per_step: int = 1) -> None:
        """Compute as ``plan`` says from the next forward on, so many of its batches a step."""
        self._plan = plan
        self._rank_plan = plan.ranks[self._control.position]
        self.rounds.follow(plan, batches_per_step)
        self._comm.num_rounds = self.rounds.number
        if self._inputs is not None:
            self._inputs.wait()
        self._inputs = InputsOnHost(self._comm) if self._rank_plan.inputs_on_host else None
        self._visits = Visits(
            staying=self._walk.staying,
            rank_plan=self._rank_plan,
            random=self._random,
            norms=self._norms,
            observers=self.observers,
            device_type=self._comm.device.type,
            inputs=self._inputs,
        )
        self._prober = Prober(
            self._module,
            self.units,
            self.root,
            self._norms,
            self._caches,
            control=self._control,
            device=self._comm.device,
            form=self.rounds.form,
            tell=partial(setattr, self._lifeline, "doing"),
        )
        self._known = KnownCalls(self._prober, self._control)

    @property
    def all_units(self) -> tuple[FSDPUnit, ...]:
        """The units and the root."""
        return (*self.units, self.root)

    @property
    def known_to_stay(self) -> frozenset[int]:
        """Units that some forward so far needed unsharded throughout."""
        return self._prober.staying

    # Forward #

    def forward(self, run_module: RunModule, call: ModelCall, is_training: bool) -> Any:
        """The module's output; on a rank without samples an empty one.  Collective.

        Returns None if no rank has samples, unless earlier rounds of the step had some.
        """
        self._has_gradients = torch.is_grad_enabled()
        if self.rounds.have_begun:
            self.rounds.check_goes_on(
                has_gradients=self._has_gradients, awaits_backward=self.awaits_backward
            )
        else:
            self.abandon()
            self._comm.mark_rows_changed()
        self.features.begin()
        splits = self.rounds.is_cut or (
            call.num_samples > max(self._rank_plan.microbatch_sizes, default=0)
        )
        index = self._known.index_of(call, is_training=is_training, splits=splits)
        with self.observers.watch("", Activity.AGREE):
            self.batch, index = agree_on_batch(
                self._plan,
                self._control,
                num_samples=call.num_samples,
                index=index,
                rounds=self.rounds,
            )
        first = self.batch.first_sample - self.rounds.moment.num_samples_before
        self.own_samples = range(first, first + self.batch.num_samples)
        self.had_samples = bool(self.batch.computing)
        if not self.batch.computing:
            if not self.rounds.have_begun:
                self.features.is_in_forward = False
                return None
            index = self._known.latest  # its turns are taken all the same
        self._comm.receivers = self.batch.computing
        if self.rounds.receivers is not None and self._has_gradients:
            self._comm.receivers = self.rounds.receivers
        self._comm.mark_compute()  # gathers read shards that the optimizer wrote
        if self._comm.host_memory.lets_copies_wait:
            for unit in self.all_units:
                unit.copy_to_device()
        self._walk.take_in(self.root)
        if index == UNKNOWN:
            self._lifeline.doing = "model(...), the probe of its first call of this kind"
        with self._dropout.taken_over(is_needed=index == UNKNOWN):
            findings = self._known.begin(
                index, call, run_module, is_training=is_training, splits=splits
            )
        if index == UNKNOWN and self._has_gradients:
            reserve_on_hosts(
                self._inputs,
                self._plan,
                findings.inputs,
                control=self._control,
                nodes=self._comm.nodes,
            )
        self._num_visits.clear()
        self._walk.begin(findings.schedule, self.rounds.moment.round, findings.staying)
        output = None
        if is_training:
            self._norms.begin()
        if self.batch.num_samples:
            taken_over = self._dropout.taken_over(is_needed=findings.has_root_dropout)
            with self._random.around(is_training), taken_over:
                self._random.seed("", 0, self.batch.step, self.batch.first_sample, is_training)
                output = run_module(*call.with_all())
            self._walk.end_forward()
        else:
            self._walk.pass_forward()
            output = findings.make_empty_output(self._comm.device)
        self._count_everywhere(findings)
        self._end_forward(is_training)
        return output

    def _count_everywhere(self, findings: Findings) -> None:
        """Copy numbers that the forward changed in attributes to ranks without samples."""
        assert self.batch is not None
        num_computing = len(self.batch.computing)
        if findings.counted and 0 < num_computing < len(self._plan.ranks):
            CountedNumbers(self._module, findings.counted).take_over(
                self._control,
                source=self.batch.computing[0],
                is_here=bool(self.batch.num_samples),
            )

    def visit(
        self, unit_index: int, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of one of the unit's modules; its intercepted forward calls this."""
        if self.unit_by_unit is not None:
            return self.unit_by_unit.visit(unit_index, module, args, kwargs)
        unit = self.units[unit_index]
        self._check_is_inside(unit.fqn)
        needs_backward = _needs_backward(module, args, kwargs)
        if self._prober.is_running:
            self._lifeline.doing = f"forward of unit {unit.fqn!r}"
            self._prober.enter(unit_index, needs_backward)
            with self._visiting_unit(unit.fqn):
                return self._prober.call(module.fqn, module.forward, args, kwargs)
        segment, needs_backward = self._walk.expect(unit_index, needs_backward)
        self._walk.begin_turn()
        call = self._num_visits[unit.fqn]
        self._num_visits[unit.fqn] += 1
        with self._dropout.left_alone():
            leaves, rules = self._known.prepare(module, (args, kwargs))
        backward = BackwardTurn(
            self._enter_backward, self._walk.end_turn, segment, self.rounds.moment
        )
        assert self.batch is not None
        with self._visiting_unit(unit.fqn):
            visit = self._visits.of(
                module, rules, self.batch, call=call, unit=unit, backward=backward
            )
            output = run_visit(visit, self._anchor if needs_backward else None, leaves)
        self._walk.end_turn()
        return output

    def visit_piece(
        self, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of a module of the root that has to run microbatch by microbatch."""
        if self.batch is None or not self.batch.num_samples or not module.module.training:
            return module.forward(*args, **kwargs)
        # A checkpoint around functional dropout does not call this again in backward.
        is_function = module.fqn == DROPOUT_CALLS
        if self._is_in_autograd or (
            is_function and is_checkpointed(grad_enabled=self._has_gradients)
        ):
            raise RuntimeError(
                f"{module.fqn} is called outside of units and once more during backward, "
                "perhaps by gradient checkpointing, where it would draw other random numbers. "
                "Switch that off: the plan decides which units are recomputed "
                "(Plan.by_hand(recompute=True))."
            )
        needs_backward = _needs_backward(module, args, kwargs)
        with self._dropout.left_alone():
            if self._prober.is_running:
                return self._prober.call(module.fqn, module.forward, args, kwargs)
            call = self._known.count(module)
            leaves, rules = self._known.prepare(module, (args, kwargs))
            visit = self._visits.of(module, rules, self.batch, call=call)
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
                f"unit {unit_fqn!r} was called during backward, perhaps by gradient "
                "checkpointing around it. Switch that off: the plan decides which units are "
                "recomputed (Plan.by_hand(recompute=True))."
            )
        if self._visiting:
            raise RuntimeError(
                f"unit {unit_fqn!r} was called by unit {self._visiting!r}, so its parameters "
                "would be gathered once for each microbatch. Make both one unit, or call it "
                "outside: HetFSDP(units=[...])."
            )
        if self.batch is None or not self.batch.num_samples:
            with self._lifeline.guard():  # outside of model(...) no other guard tells peers
                raise RuntimeError(
                    f"unit {unit_fqn!r} was called outside of HetFSDP's forward. Call the "
                    f"HetFSDP model, not the module inside it."
                )

    def _end_forward(self, is_training: bool) -> None:
        self.features.is_in_forward = False
        if is_training:
            self._norms.apply(self._control)
        self.awaits_backward = torch.is_grad_enabled()
        if self.awaits_backward:
            self._walk.launch_ahead()  # while the loss is computed and shared
        else:
            self._walk.end_step()
            self.batch = None

    # Backward #

    def drop(self) -> None:
        """Drop the rounds of the step so far, and begin it anew.  Collective."""
        self._walk.finish()  # nothing may write what is dropped
        self.abandon()
        self.rounds.forget()

    def backward(self, run_autograd: Callable[[], None]) -> None:
        """Take all turns of backward; computing ranks call ``run_autograd``.  Collective."""
        assert self.batch is not None
        self.awaits_backward = False
        self._walk.begin_backward()
        if self.batch.num_samples:
            self._is_in_autograd = True
            try:
                run_autograd()
            finally:
                self._is_in_autograd = False
        self.features.finish()
        if self._inputs is not None:
            self._inputs.drop()
        self._walk.end_backward()
        if self.rounds.is_last:
            self._walk.reduce_rest()
            self._walk.end_step()
        else:
            self.rounds.end_round(self.batch.num_together)
        self.batch = None

    def finish_reductions(self) -> None:
        """Wait until nothing is being reduced, so that sums may be changed or dropped."""
        self._walk.finish()

    def _enter_backward(self, segment: int, moment: Moment) -> None:
        """Begin the backward of a visit; take the turns before it that autograd skipped."""
        if self.batch is None or self.rounds.moment != moment or not self._is_in_autograd:
            with self._lifeline.guard():  # outside of model.backward no other guard tells peers
                raise RuntimeError(
                    "backward of an earlier forward, or not through HetFSDP. Call "
                    "model.backward(loss_sum, num_tokens) once after each model(...), before "
                    "the next, instead of loss.backward()."
                )
        self.features.finish()
        self._walk.reach(segment)

    def abandon(self) -> None:
        """End a step without its backward: nothing stays in flight, everything is sharded."""
        self._walk.abandon()
        self._norms.drop()
        if self._inputs is not None:
            self._inputs.drop()
        self.batch = None
        self.awaits_backward = False


def _needs_backward(module: UnitModule, args: Any, kwargs: Any) -> bool:
    return torch.is_grad_enabled() and (
        module.is_trainable or _any_requires_grad((args, kwargs))
    )


def _any_requires_grad(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(tree))
