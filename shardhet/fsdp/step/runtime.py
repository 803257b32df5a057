"""One training step on this rank: forward and backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardhet.comm import devices
from shardhet.comm.channel import Channel
from shardhet.comm.peers import Peers
from shardhet.comm.progress import progress
from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.caches import CacheSwitch
from shardhet.fsdp.microbatch.host_inputs import InputsOnHost
from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.attempt import RunModule
from shardhet.fsdp.probing.known_calls import UNKNOWN, KnownCalls
from shardhet.fsdp.probing.module_state import CountedNumbers
from shardhet.fsdp.probing.probe import ProbedModel
from shardhet.fsdp.probing.prober import Findings, Prober
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.seeds import RandomStates
from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.stages.calls import StageCalls
from shardhet.fsdp.step.agreement import agree_on_round, beside_others
from shardhet.fsdp.step.around import Visits
from shardhet.fsdp.step.calls import StepInProgress
from shardhet.fsdp.step.features import FeatureGathers
from shardhet.fsdp.step.host_slabs import HostSlabs
from shardhet.fsdp.step.observer import Activity, Observers
from shardhet.fsdp.step.rounds import Round, Rounds
from shardhet.fsdp.step.turn_walk import TurnWalk
from shardhet.fsdp.tokens.attention import ContextGroup
from shardhet.fsdp.tokens.tiles import Tiles
from shardhet.records.plan import Plan


class Runtime:
    """Takes all units of one model through its steps; ``StageRuntime`` is what is made."""

    def __init__(
        self,
        units: Sequence[FSDPUnit],
        root: FSDPUnit,
        *,
        plan: Plan,
        comm: CommContext,
        root_comm: CommContext,
        control: Channel,
        peers: Peers,
        seed: int,
        module: nn.Module,
        norms: BatchNorms,
        caches: CacheSwitch,
        loss: FusedLoss,
        observers: Observers | None,  # None: there are none yet
    ) -> None:
        self.units = tuple(units)
        self.root = root  # parameters that no unit owns; unsharded for the whole step
        self.all_units = (*self.units, root)
        self.flats = [flat for unit in self.all_units for flat in unit.flats]
        marks_time = None if devices.is_on_host(comm.device) else comm.mark_device_time
        self.observers = observers or Observers(marks_time)
        self.rounds = Rounds(plan)
        self.asks_to_end = self.is_asked_to_end = False  # this rank; any, at the last backward
        self.raises_bad_loss = True  # that is not finite
        self._comm, self.root_comm = comm, root_comm  # of those of a stage, and of all ranks
        self.comms = tuple(dict.fromkeys((comm, root_comm)))
        self.control, self.peers = control, peers
        self._random = RandomStates(seed, comm.device)
        self._module, self.norms = module, norms
        self._caches, self._loss = caches, loss
        self.walk = TurnWalk(units, root, comm=comm, observers=self.observers)
        self.features = FeatureGathers(root_comm, control, peers)
        self.had_samples = True  # on any rank, in the last forward
        self.own_samples = range(0)  # of the last forward, in the global batch
        self._inputs: InputsOnHost | None = None
        self.step = StepInProgress()
        self.calls = StageCalls(
            module,
            units,
            step=self.step,
            rounds=self.rounds,
            walk=self.walk,
            features=self.features,
            peers=peers,
            device=comm.device,
        )
        self.follow(plan)

    def follow(self, plan: Plan, batches_per_step: int = 1) -> None:
        """Compute as ``plan`` says from the next forward on, so many of its batches a step."""
        self.plan = plan
        self._rank_plan = plan.ranks[self.control.position]
        self.rounds.follow(plan, batches_per_step)
        self._comm.num_rounds = self.rounds.number
        self.features.has_parts = plan.num_rounds > 1 or plan.stages is not None
        self.features.has_groups = plan.context_groups is not None
        if self._inputs is not None:
            self._inputs.wait()
        self.slabs = HostSlabs(plan, self._comm, self.control, self.rounds.number)
        self._inputs = self.slabs.inputs
        self.tokens = ContextGroup.of(plan, self._module, self._comm, self.control)
        visits = Visits(
            staying=self.walk.staying,
            rank_plan=self._rank_plan,
            random=self._random,
            norms=self.norms,
            observers=self.observers,
            device_type=self._comm.device.type,
            inputs=self._inputs,
            tokens=self.tokens,
            tiles=Tiles(self._rank_plan, self._comm.device),
        )
        probed = ProbedModel(
            module=self._module,
            units=self.units,
            root=self.root,
            norms=self.norms,
            caches=self._caches,
            loss=self._loss,
            control=self.control,
            device=self._comm.device,
            plan=plan,
        )
        self._prober = Prober(probed, form=self.rounds.form)
        self._known = KnownCalls(self._prober, self.control)
        self.calls.follow(visits, self._prober, self._known)

    @property
    def known_to_stay(self) -> frozenset[int]:
        """Units that some forward so far needed unsharded throughout."""
        return self._prober.staying

    # Forward #

    def forward(self, run_module: RunModule, call: ModelCall, is_training: bool) -> Any:
        """The module's output; on a rank without samples an empty one.  Collective.

        Returns None if no rank has samples, unless earlier rounds of the step had some.
        """
        self.step.has_gradients = torch.is_grad_enabled()
        if self.rounds.have_begun:
            self.rounds.check_goes_on(
                has_gradients=self.step.has_gradients, awaits_backward=self.step.awaits_backward
            )
        else:
            self.begin_step()
        self.features.begin()
        call, is_ragged = beside_others(call, self.control)
        most = max(self._rank_plan.microbatch_sizes, default=0)
        splits = is_ragged or self.rounds.is_cut or call.num_samples > most
        index = self._known.index_of(call, is_training=is_training, splits=splits)
        with self.observers.watch("", Activity.AGREE):
            each = self.step.round = agree_on_round(
                self.plan,
                self.control,
                call,
                index=index,
                rounds=self.rounds,
                flats=self.flats,
                checksum=0.0 if self.tokens is None else self.tokens.cutter.checksum,
            )
        first = each.first_sample - each.moment.num_samples_before
        self.own_samples = range(first, first + each.num_samples)
        self.had_samples = bool(each.computing)
        index = each.index
        if not each.computing:
            if not self.rounds.have_begun:
                self.features.is_in_forward = False
                return None
            index = self._known.latest  # its turns are taken all the same
        receivers = self._comm.receivers_for(each.computing)
        if self.rounds.receivers is not None and self.step.has_gradients:
            receivers = self.rounds.receivers
        self.unshard_root(receivers, receivers)
        if index == UNKNOWN:
            progress.mark("model(...), the probe of its first call of this kind")
        with self.calls.dropout.taken_over(is_needed=index == UNKNOWN):
            findings = self._known.begin(
                index, call, run_module, is_training=is_training, splits=splits
            )
        if index == UNKNOWN and self.step.has_gradients:
            self.slabs.reserve(findings.inputs)
        self.step.num_visits.clear()
        self.walk.is_behind = call.is_behind
        self.walk.begin(findings.schedule, self.rounds.moment.round, findings.staying)
        if is_training:
            self.norms.begin()
        output = self.run_forward(
            findings, partial(run_module, *call.with_all()), is_training=is_training
        )
        del each.call
        if not each.num_samples:
            output = findings.make_empty_output(self.calls.anchor)
        self._end_forward(is_training)
        return output

    def begin_step(self) -> None:
        """Begin anew, and read rows again that are on the host."""
        self.abandon()
        for comm in self.comms:
            comm.mark_rows_changed()

    def unshard_root(self, everywhere: tuple[int, ...], here: tuple[int, ...]) -> None:
        """Unshard the root ``everywhere``; units of this stage later are ``here``."""
        for comm, receivers in {self.root_comm: everywhere, self._comm: here}.items():
            comm.receivers = receivers
            comm.mark_compute()  # gathers read shards that the optimizer wrote
        if self._comm.host_memory.lets_copies_wait:
            for unit in self.all_units:
                unit.copy_to_device()
        self.walk.take_in(self.root)

    def run_forward(
        self, findings: Findings, run: Callable[[], Any], *, is_training: bool
    ) -> Any:
        """Take all turns of a round's forward; what ``run`` returns on ranks with samples."""
        each, output = self.step.round, None
        assert each is not None
        if each.num_samples:
            taken_over = self.calls.dropout.taken_over(is_needed=findings.has_root_dropout)
            with self._random.around(is_training), taken_over:
                self._random.seed("", 0, each.moment.step, each.seeded_as, is_training)
                output = run()
            self.walk.end_forward()
        else:
            self.walk.pass_forward()
        _count_everywhere(self._module, findings, each, self.control)
        self._known.end_forward(
            follows=self.rounds.have_begun, is_cut=len(each.microbatch_sizes) > 1
        )
        return output

    def _end_forward(self, is_training: bool) -> None:
        self.features.is_in_forward = False
        if is_training:
            self.norms.apply(self.control)
        self.step.awaits_backward = torch.is_grad_enabled()
        if self.step.awaits_backward:
            self.walk.go_on()  # while the loss is computed and shared
        else:
            self.end_rounds()

    # Backward #

    def drop(self) -> None:
        """Drop the rounds of the step so far, and begin it anew.  Collective."""
        self.walk.finish()  # nothing may write what is dropped
        self.abandon()
        self.rounds.forget()

    def backward(self, run_autograd: Callable[[], None]) -> None:
        """Take all turns of backward; computing ranks call ``run_autograd``.  Collective."""
        assert self.step.round is not None
        self.step.awaits_backward = False
        self.run_backward(run_autograd)
        if self.rounds.is_last:
            self.walk.reduce_rest()
            self.end_rounds()
        else:
            self.rounds.end_round(self.step.round.num_together)
        self.step.round = None

    def run_backward(self, run_autograd: Callable[[], None]) -> None:
        """Take all turns of a round's backward."""
        assert self.step.round is not None
        self.walk.begin_backward()
        if self.step.round.num_samples:
            with self.step.in_autograd(self._comm.device.type):
                run_autograd()
        self.features.finish()
        if self._inputs is not None:
            self._inputs.end_round()
        self.walk.end_backward()

    def end_rounds(self) -> None:
        """Reshard what stayed, once the last round is finished."""
        self.walk.end_step()
        self.root_comm.wait_all_sent()
        self.features.is_in_forward = False
        self.step.round = None

    def abandon(self) -> None:
        """End a step without its backward: nothing stays in flight, everything is sharded."""
        self.walk.abandon()
        self.root_comm.wait_all_sent()
        self.norms.drop()
        if self._inputs is not None:
            self._inputs.drop()
        self.step.round, self.step.awaits_backward = None, False


def _count_everywhere(
    module: nn.Module, findings: Findings, each: Round, control: Channel
) -> None:
    """Copy numbers that the forward changed in attributes to ranks without samples."""
    if findings.counted and 0 < len(each.computing) < control.world_size:
        CountedNumbers(module, findings.counted).take_over(
            control, source=each.computing[0], is_here=bool(each.num_samples)
        )
