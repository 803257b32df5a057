"""The forward and backward of rounds on one stage, of which several may be in flight."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from shardhet.comm.progress import progress
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.attempt import RunModule
from shardhet.fsdp.probing.known_calls import UNKNOWN
from shardhet.fsdp.probing.prober import Findings
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.residence import share_holders
from shardhet.fsdp.stages.calls import Kind, StageCalls
from shardhet.fsdp.stages.parts import carried_of, check_dropouts, parts_of
from shardhet.fsdp.stages.refusals import check_hooks, refuse
from shardhet.fsdp.stages.rounds import StageRound
from shardhet.fsdp.step.runtime import Runtime
from shardhet.records.plan import Plan
from shardhet.records.schedule import (
    Op,
    Phase,
    RoundPhase,
    Schedule,
    make_schedule,
)
from shardhet.records.stages import positions_by_stage, rounds_in_flight, stage_by_unit


def runtime_by(plan: Plan, comm: CommContext) -> Callable[..., Runtime]:
    """Makes the runtime of a rank of ``plan``; ``comm`` is that of all ranks."""
    return Runtime if plan.stages is None else partial(StageRuntime, root_comm=comm)


class StageRuntime(Runtime):
    """The runtime of a rank of one stage of a pipeline."""

    _make_calls = StageCalls
    function: Callable[..., Any] | None = None  # see ``HetFSDP.computing``

    def __init__(self, *args: Any, root_comm: CommContext, plan: Plan, **kwargs: Any) -> None:
        super().__init__(*args, plan=plan, **kwargs)
        assert plan.stages is not None
        self.plan, self.stages = plan, plan.stages
        self.control, self.peers = self._control, self._peers
        self.positions = positions_by_stage(self.stages)
        position = self._control.position
        self.stage = next(i for i, each in enumerate(self.positions) if position in each)
        progress.stage = self.stage
        self.unit_fqns = [unit.fqn for unit in self.units]
        self.stage_by_fqn = stage_by_unit(self.stages, self.unit_fqns)
        self._follow_rounds()
        self._dropouts = [e for e in self._module.modules() if isinstance(e, _DropoutNd)]
        self.root_comm = root_comm  # of all ranks; that of units is of those of a stage
        computing = [i for i, rank in enumerate(plan.ranks) if rank.rank_batch_size]
        self._computing = tuple(computing)  # of all stages
        own = self.positions[self.stage]
        self.computing_here = tuple(i for i in computing if i in own)

    def follow(self, plan: Plan, batches_per_step: int = 1) -> None:
        """See ``Runtime.follow``."""
        super().follow(plan, batches_per_step)
        if hasattr(self, "stage"):  # else the stage is not known yet
            self._follow_rounds()

    def _follow_rounds(self) -> None:
        # By stage
        self.in_flight = rounds_in_flight(self.stages, self.rounds.number)
        self._index_by_key: dict[Any, int] = {}  # of findings, on this rank
        self._kinds: dict[int, Kind] = {}  # by index of findings
        self._schedules: dict[tuple[int, int], Schedule] = {}  # and number of rounds

    @property
    def comms(self) -> tuple[CommContext, ...]:
        """See ``Runtime.comms``."""
        return (self._comm, self.root_comm)

    # Before the rounds

    def begin_step(self) -> None:
        """Unshard the root on all ranks, before any stage waits for another.  Collective."""
        self.abandon()
        self.features.begin()
        for comm, receivers in (
            (self.root_comm, self._computing),
            (self._comm, self.computing_here),
        ):
            comm.receivers = receivers
            comm.mark_compute()
            comm.mark_rows_changed()
        if self._comm.host_memory.lets_copies_wait:
            for unit in self.all_units:
                unit.copy_to_device()
        self.walk.take_in(self.root)

    def know(
        self, rounds: Sequence[StageRound], run_module: RunModule, *, is_training: bool
    ) -> None:
        """Find what belongs to the calls of ``rounds``, by probes where needed.  Collective."""
        if torch.is_grad_enabled():
            check_hooks(self._module)
        keys = [self._key_of(each.call, is_training=is_training) for each in rounds]
        known = self._index_by_key
        while True:
            mine = [
                float(known.get(key, UNKNOWN)) if each.batch.num_samples else math.inf
                for key, each in zip(keys, rounds, strict=True)
            ]
            rows = self._control.exchange(mine)
            unknown = []
            for i, column in enumerate(zip(*rows, strict=True)):
                found = {int(x) for x in column if x != math.inf}
                if rounds[i].index == UNKNOWN and len(found) == 1:
                    rounds[i].index = found.pop()
                if rounds[i].index == UNKNOWN:
                    unknown.append(i)
            if not unknown:
                break
            each = rounds[unknown[0]]
            each.index = self._probe(each, run_module, is_training=is_training)
            if each.batch.num_samples and self._kinds[each.index].findings.is_certain:
                known[keys[unknown[0]]] = each.index

    def _probe(self, each: StageRound, run_module: RunModule, *, is_training: bool) -> int:
        """Run the whole model on all ranks; the index of what is found.  Collective."""
        doing = progress.doing
        progress.mark(f"{doing}, the probe of its first call of this kind")
        if self._plan.resident_units:
            share_holders(self.flats, self._control)
        self._comm.receivers = self._computing
        self.step.has_gradients = torch.is_grad_enabled()
        self._enter(each)
        with self.calls.dropout.taken_over(is_needed=True):
            findings = self._known.begin(
                UNKNOWN, each.call, run_module, is_training=is_training, splits=True
            )
        self.step.batch = None
        self._comm.receivers = self.computing_here
        progress.mark(doing)
        index, kind, problem = self._known.latest, None, None
        try:
            kind = self._kind_of(findings)
        except ValueError as error:
            problem = str(error)
        told = [each for each in self._control.exchange_objects(problem) if each]
        if kind is None or told:  # ranks without samples see less
            raise ValueError(told[0])
        self._kinds[index] = kind
        if self.step.has_gradients:
            self._slabs.reserve(findings.inputs)
        return index

    def _kind_of(self, findings: Findings) -> Kind:
        """What belongs to this rank's stage; raises ``ValueError`` for what it cannot do."""
        fqns = self.unit_fqns
        staying = ", ".join(repr(fqns[i]) for i in sorted(findings.staying))
        counted = ", ".join(f"{name} of {fqn or 'the model'}" for fqn, name in findings.counted)
        refused = {
            f"parameters of {staying} used outside of it, or a module in two units": staying,
            f"attributes that change in every forward ({counted})": counted,
        }
        for what, found in refused.items():
            refuse(what, is_there=bool(found), where=progress.doing)
        parts = parts_of(findings, fqns, self.stage_by_fqn, len(self.stages))
        if not findings.results:  # a rank without samples hands nothing over
            return Kind(findings, parts[self.stage], [], [])
        called = [fqns[each.unit] for each in findings.schedule.segments]
        check_dropouts(findings, [self.stage_by_fqn[fqn] for fqn in called])
        # Those of all stages, so that all ranks raise if one has to.
        received = [carried_of(each.received, findings, called) for each in parts]
        sent = [carried_of(each.sent, findings, called) for each in parts]
        return Kind(findings, parts[self.stage], received[self.stage], sent[self.stage])

    def kind_for(self, index: int) -> Kind:
        """What was found for calls with the findings at ``index``."""
        return self._kinds[index]

    def _key_of(self, call: ModelCall, *, is_training: bool) -> Any:
        """What calls have in common that the same findings are for, shapes included."""
        key = self._known.key_of(call, is_training=is_training, splits=True)
        drops = tuple(bool(each.p) for each in self._dropouts)
        return key, call.lengths, self.function, drops

    # Rounds

    def begin_rounds(
        self, index: int, num_rounds: int, hand_over: Callable[[Op], None] | None = None
    ) -> None:
        """Lay out the rounds of a step, and do what comes before the first turn of this stage.

        ``hand_over`` launches messages where the list has them; None: it has none.
        """
        key = index, num_rounds
        if key not in self._schedules:
            part, whole = self._kinds[index].part, self._kinds[index].findings.schedule
            self._schedules[key] = make_schedule(
                whole.segments[part.start : part.stop],
                trainable_units=whole.trainable_units,
                form=replace(self.rounds.form, num_rounds=num_rounds),
                in_flight=self.in_flight[self.stage],
            )
        self.walk.hand_over = hand_over
        place = () if hand_over is None else (self.stage, self.in_flight)
        # As all ranks talk: a stage alone may do so in another way than the next one.
        in_one_order = self.root_comm.host_runs_ahead
        self.walk.lay_out(self._schedules[key], *place, in_one_order=in_one_order)

    def forward_round(
        self,
        each: StageRound,
        run_module: RunModule,
        received: Sequence[Tensor],
        *,
        is_training: bool,
    ) -> Any:
        """This stage's part of a round's forward.

        Returns the tensors to hand over, or of the last stage the model's output.
        """
        self.step.has_gradients = torch.is_grad_enabled()
        self._enter(each)
        call, batch = each.call, each.batch
        self.step.num_visits.clear()
        self.walk.begin_round()
        self._known.begin(each.index, call, run_module, is_training=is_training, splits=True)
        output: Any = ()
        if batch.num_samples:
            assert isinstance(self.calls, StageCalls)
            kind = self._kinds[each.index]
            is_needed = kind.findings.has_root_dropout
            taken_over = self.calls.dropout.taken_over(is_needed=is_needed)
            with self._random.around(is_training), taken_over:
                self._random.seed("", 0, batch.step, batch.first_sample, is_training)
                output = self.calls.run_part(run_module, call, kind, received)
            self.walk.end_forward()
        else:
            self.walk.pass_forward()
        self._known.end_forward(follows=self.rounds.have_begun, is_cut=batch.is_cut)
        return output

    def backward_round(self, each: StageRound, run_autograd: Callable[[], None]) -> None:
        """This stage's part of a round's backward."""
        self._enter(each)
        self.walk.begin_backward()
        if each.batch.num_samples:
            with self.step.in_autograd(self._comm.device.type):
                run_autograd()
        if self._inputs is not None:
            self._inputs.end_round()
        self.walk.end_backward()

    def begin_phase(self, now: RoundPhase, following: RoundPhase) -> None:
        """Let what a backward that follows begins with come back from the host meanwhile."""
        if self._inputs is not None:
            self._inputs.enter(now.round)
            if following.phase is Phase.BACKWARD:
                self._inputs.expect(following.round)

    def _enter(self, each: StageRound) -> None:
        self.rounds.moment = each.moment
        self.step.batch = each.batch
        if self._inputs is not None:
            self._inputs.enter(each.moment.round)

    def end_step_of_stages(self) -> None:
        """Reduce what is left, the root's last, on all ranks.  Collective."""
        for unit in self.units:
            if self.stage_by_fqn[unit.fqn] != self.stage:
                unit.pass_over()
        self.walk.reduce_rest()
        self.end_rounds()

    def end_rounds(self) -> None:
        """Reshard what stayed, once the last round is finished."""
        self.walk.end_step()
        self.root_comm.wait_all_sent()
        self.step.batch = None

    def abandon(self) -> None:
        """See ``Runtime.abandon``."""
        super().abandon()
        self.root_comm.wait_all_sent()
