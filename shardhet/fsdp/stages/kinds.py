"""What is found for the calls of a pipeline: the part of this rank's stage, and its turns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardhet.comm.channel import progress
from shardhet.fsdp.probing.attempt import RunModule
from shardhet.fsdp.probing.known_calls import UNKNOWN
from shardhet.fsdp.probing.prober import Findings
from shardhet.fsdp.sharding.persistence import share_holders
from shardhet.fsdp.stages.calls import CallKind, StageCalls
from shardhet.fsdp.stages.channels import check_hooks, refuse
from shardhet.fsdp.stages.stage_transfer import check_dropouts, parts_of, stage_tensors_of
from shardhet.fsdp.step.rounds import Round
from shardhet.fsdp.step.runtime import Runtime
from shardhet.records.ops import Op
from shardhet.records.schedule import Schedule, make_schedule


class CallKinds:
    """The kinds of calls that a pipeline was called with."""

    def __init__(self, runtime: Runtime, run_module: RunModule) -> None:
        self._runtime = runtime
        self._run_module = run_module
        self._kinds: dict[int, CallKind] = {}  # by index of findings
        self._schedules: dict[tuple[int, int], Schedule] = {}  # and number of rounds

    def know(self, rounds: Sequence[Round], *, is_training: bool) -> None:
        """Find what belongs to the calls of ``rounds``, by probes where needed.  Collective."""
        if torch.is_grad_enabled():
            check_hooks(self._runtime.calls.root)
        known, control = self._runtime.known, self._runtime.control
        while True:
            mine = [
                float(known.index_of(each.call, is_training=is_training, splits=True))
                if each.num_samples
                else math.inf
                for each in rounds
            ]
            columns = zip(*control.exchange(mine), strict=True)
            for each, column in zip(rounds, columns, strict=True):
                found = {int(x) for x in column if x != math.inf}
                if each.index == UNKNOWN and len(found) == 1:
                    each.index = found.pop()
            unknown = next((each for each in rounds if each.index == UNKNOWN), None)
            if unknown is None:
                break
            self._probe(unknown, is_training=is_training)

    def _probe(self, each: Round, *, is_training: bool) -> None:
        """Run the whole model on all ranks, and find this stage's part of it.  Collective."""
        runtime = self._runtime
        comm, *_ = runtime.comms
        if runtime.plan.resident_units:
            share_holders(runtime.of_frozen, runtime.control)
        comm.set_receivers(runtime.root_comm.computing)
        findings = runtime.probe(each, self._run_module, is_training=is_training, splits=True)
        comm.set_receivers(runtime.computing_here)
        kind, problem = None, None
        try:
            kind = self._kind_of(findings)
        except ValueError as error:
            problem = str(error)
        told = [each for each in runtime.control.exchange_objects(problem) if each]
        if kind is None or told:  # ranks without samples see less
            raise ValueError(told[0])
        self._kinds[each.index] = kind
        knows = runtime.known.knows
        self._kinds = {i: kind for i, kind in self._kinds.items() if knows(i)}
        self._schedules = {key: s for key, s in self._schedules.items() if knows(key[0])}

    def _kind_of(self, findings: Findings) -> CallKind:
        """What belongs to this rank's stage; raises ``ValueError`` for what it cannot do."""
        by_fqn, stage = self._runtime.stage_by_fqn, self._runtime.stage
        fqns = [*by_fqn]
        always_unsharded = ", ".join(repr(fqns[i]) for i in sorted(findings.always_unsharded))
        counted = ", ".join(f"{name} of {fqn or 'the model'}" for fqn, name in findings.counted)
        refused = {
            f"parameters of {always_unsharded} used outside of it, or a module in two "
            "units": always_unsharded,
            f"attributes that change in every forward ({counted})": counted,
        }
        for what, found in refused.items():
            refuse(what, is_there=bool(found), where=progress.doing)
        parts = parts_of(findings, fqns, by_fqn, len(self._runtime.in_flight))
        if not findings.results:  # a rank without samples hands nothing over
            return CallKind(findings, parts[stage], [], [])
        called = [fqns[each.unit] for each in findings.schedule.segments]
        check_dropouts(findings, [by_fqn[fqn] for fqn in called])
        # Those of all stages, so that all ranks raise if one has to.
        received = [stage_tensors_of(each.received, findings, called) for each in parts]
        sent = [stage_tensors_of(each.sent, findings, called) for each in parts]
        return CallKind(findings, parts[stage], received[stage], sent[stage])

    def of(self, each: Round) -> CallKind:
        """What was found for the call of a round."""
        return self._kinds[each.index]

    def lay_out(
        self, each: Round, num_rounds: int, hand_over: Callable[[Op], None] | None = None
    ) -> None:
        """Lay out so many rounds like this one, and do what comes before the first turn.

        ``hand_over`` launches messages where the list has them; None: it has none.
        """
        runtime, kind = self._runtime, self.of(each)
        stage, in_flight = runtime.stage, runtime.in_flight
        key = each.index, num_rounds
        if key not in self._schedules:
            whole = kind.findings.schedule
            self._schedules[key] = make_schedule(
                whole.segments[kind.part.start : kind.part.stop],
                trainable_units=whole.trainable_units,
                form=replace(runtime.rounds.form, num_rounds=num_rounds),
                in_flight=in_flight[stage],
            )
        runtime.executor.hand_over = hand_over
        place = () if hand_over is None else (stage, in_flight)
        # As all ranks talk: a stage alone may do so in another way than the next one.
        in_one_order = runtime.root_comm.host_runs_ahead
        runtime.executor.lay_out(self._schedules[key], *place, in_one_order=in_one_order)

    def forward(self, each: Round, received: Sequence[Tensor], *, is_training: bool) -> Any:
        """This stage's part of a round's forward: the tensors to hand over, or of the last
        stage the model's output.
        """
        runtime, call, kind = self._runtime, each.call, self.of(each)
        assert isinstance(runtime.calls, StageCalls)
        run = partial(runtime.calls.run_part, self._run_module, call, kind, received)
        return runtime.forward_round(each, run, is_training=is_training)
