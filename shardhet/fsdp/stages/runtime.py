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
from shardhet.fsdp.sharding.residence import share_holders
from shardhet.fsdp.stages.calls import CallKind
from shardhet.fsdp.stages.parts import carried_of, check_dropouts, parts_of
from shardhet.fsdp.stages.refusals import check_hooks, refuse
from shardhet.fsdp.step.rounds import Round
from shardhet.fsdp.step.runtime import Runtime
from shardhet.records.plan import Plan, pipeline_of
from shardhet.records.schedule import (
    Op,
    Phase,
    RoundPhase,
    Schedule,
    make_schedule,
)
from shardhet.records.stages import rounds_in_flight, stage_by_unit


class StageRuntime(Runtime):
    """The runtime of a rank of one stage; without stages all ranks are one."""

    function: Callable[..., Any] | None = None  # see ``HetFSDP.computing``

    def follow(self, plan: Plan, batches_per_step: int = 1) -> None:
        """See ``Runtime.follow``."""
        super().follow(plan, batches_per_step)
        self.stage = plan.groups.index(own := plan.group_of(self.control.position))
        progress.stage = None if plan.stages is None else self.stage
        self.computing_here = tuple(i for i in self.root_comm.computing if i in own)
        self.unit_fqns = [unit.fqn for unit in self.units]
        self.stage_by_fqn = stage_by_unit(pipeline_of(plan), self.unit_fqns)
        self.in_flight = rounds_in_flight(pipeline_of(plan), self.rounds.number)  # by stage
        self._dropouts = [e for e in self._module.modules() if isinstance(e, _DropoutNd)]
        self._index_by_key: dict[Any, int] = {}  # of findings, on this rank
        self._kinds: dict[int, CallKind] = {}  # by index of findings
        self._schedules: dict[tuple[int, int], Schedule] = {}  # and number of rounds

    # Before the rounds

    def know(
        self, rounds: Sequence[Round], run_module: RunModule, *, is_training: bool
    ) -> None:
        """Find what belongs to the calls of ``rounds``, by probes where needed.  Collective."""
        if torch.is_grad_enabled():
            check_hooks(self._module)
        keys = [self._key_of(each.call, is_training=is_training) for each in rounds]
        known = self._index_by_key
        while True:
            mine = [
                float(known.get(key, UNKNOWN)) if each.num_samples else math.inf
                for key, each in zip(keys, rounds, strict=True)
            ]
            rows = self.control.exchange(mine)
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
            if each.num_samples and self._kinds[each.index].findings.is_certain:
                known[keys[unknown[0]]] = each.index

    def _probe(self, each: Round, run_module: RunModule, *, is_training: bool) -> int:
        """Run the whole model on all ranks; the index of what is found.  Collective."""
        doing = progress.doing
        progress.mark(f"{doing}, the probe of its first call of this kind")
        if self.plan.resident_units:
            share_holders(self.flats, self.control)
        self._comm.receivers = self.root_comm.computing
        self.step.has_gradients = torch.is_grad_enabled()
        self._enter(each)
        with self.calls.dropout.taken_over(is_needed=True):
            findings = self._known.begin(
                UNKNOWN, each.call, run_module, is_training=is_training, splits=True
            )
        self.step.round = None
        self._comm.receivers = self.computing_here
        progress.mark(doing)
        index, kind, problem = self._known.latest, None, None
        try:
            kind = self._kind_of(findings)
        except ValueError as error:
            problem = str(error)
        told = [each for each in self.control.exchange_objects(problem) if each]
        if kind is None or told:  # ranks without samples see less
            raise ValueError(told[0])
        self._kinds[index] = kind
        if self.step.has_gradients:
            self.slabs.reserve(findings.inputs)
        return index

    def _kind_of(self, findings: Findings) -> CallKind:
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
        parts = parts_of(findings, fqns, self.stage_by_fqn, len(self.in_flight))
        if not findings.results:  # a rank without samples hands nothing over
            return CallKind(findings, parts[self.stage], [], [])
        called = [fqns[each.unit] for each in findings.schedule.segments]
        check_dropouts(findings, [self.stage_by_fqn[fqn] for fqn in called])
        # Those of all stages, so that all ranks raise if one has to.
        received = [carried_of(each.received, findings, called) for each in parts]
        sent = [carried_of(each.sent, findings, called) for each in parts]
        return CallKind(findings, parts[self.stage], received[self.stage], sent[self.stage])

    def kind_for(self, index: int) -> CallKind:
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
        each: Round,
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
        call = each.call
        del each.call
        self.step.num_visits.clear()
        self.walk.begin_round()
        self._known.begin(each.index, call, run_module, is_training=is_training, splits=True)
        kind = self._kinds[each.index]
        run = partial(self.calls.run_part, run_module, call, kind, received)
        return self.run_forward(kind.findings, run, is_training=is_training)

    def backward_round(self, each: Round, run_autograd: Callable[[], None]) -> None:
        """This stage's part of a round's backward."""
        self._enter(each)
        self.run_backward(run_autograd)

    def begin_phase(self, now: RoundPhase, following: RoundPhase) -> None:
        """Let what a backward that follows begins with come back from the host meanwhile."""
        if self._inputs is not None:
            self._inputs.enter(now.round)
            if following.phase is Phase.BACKWARD:
                self._inputs.expect(following.round)

    def _enter(self, each: Round) -> None:
        self.rounds.moment = each.moment
        self.step.round = each
        if self._inputs is not None:
            self._inputs.enter(each.moment.round)

    def end_step_of_stages(self) -> None:
        """Reduce what is left, the root's last, on all ranks.  Collective."""
        for unit in self.units:
            if self.stage_by_fqn[unit.fqn] != self.stage:
                unit.pass_over()
        self.walk.reduce_rest()
        self.end_rounds()
