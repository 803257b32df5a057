"""What a rank does in a step: forwards and backwards of rounds, and the end of the step.

``RoundByRound`` and ``Pipeline`` say which comes when.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import nn

from shardhet.comm import devices
from shardhet.comm.channel import Channel, progress
from shardhet.comm.devices import available_bytes
from shardhet.fsdp.microbatch.batch_norm import BatchNorms
from shardhet.fsdp.microbatch.host_inputs import ALIGNMENT, InputsOnHost
from shardhet.fsdp.microbatch.layered import autocast_as
from shardhet.fsdp.microbatch.loss import FusedLoss
from shardhet.fsdp.microbatch.surroundings import CacheSwitch, RandomStates
from shardhet.fsdp.params.row_group import ShardGroup
from shardhet.fsdp.probing.attempt import RunModule
from shardhet.fsdp.probing.known_calls import KnownCalls
from shardhet.fsdp.probing.module_state import take_over
from shardhet.fsdp.probing.probe import ProbedModel, SeenInput
from shardhet.fsdp.probing.prober import Findings, Prober
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.stages.calls import StageCalls
from shardhet.fsdp.step.around import Observers, Visits
from shardhet.fsdp.step.calls import FeatureGathers, UnitCalls
from shardhet.fsdp.step.rounds import Round, Rounds, StepInProgress, Written
from shardhet.fsdp.step.schedule_executor import ScheduleExecutor
from shardhet.fsdp.tokens.attention import ContextGroup
from shardhet.fsdp.tokens.tiles import Tiles
from shardhet.records.layout import Span
from shardhet.records.plan import Plan, pipeline_of
from shardhet.records.schedule import Phase, RoundPhase
from shardhet.records.stages import rounds_in_flight, stage_by_unit

MIB = 2**20


class HostStaging:
    """What the hosts of all ranks keep of inputs of units, and where this rank's are."""

    def __init__(
        self, plan: Plan, comm: CommContext, control: Channel, num_rounds: int
    ) -> None:
        self._plan, self._control, self._nodes = plan, control, comm.nodes
        # By position: rounds that the rank has begun and not finished at most.
        groups = zip(rounds_in_flight(pipeline_of(plan), num_rounds), plan.groups, strict=True)
        self._held = [n for n, group in groups for _ in group]
        self.inputs: InputsOnHost | None = None  # the plan keeps none of this rank's there
        if plan.ranks[control.position].inputs_on_host:
            self.inputs = InputsOnHost(comm, self._held[control.position])

    @property
    def nbytes(self) -> int:
        """Bytes that are set aside for this rank."""
        return 0 if self.inputs is None else self.inputs.nbytes

    def reserve(self, seen: Sequence[SeenInput]) -> None:
        """Reserve what each rank needs for a call of a new kind.  Collective.

        Raises ``ValueError`` on every rank if a host's memory is too small for its ranks.
        """
        if not any(rank.inputs_on_host for rank in self._plan.ranks):
            return
        told = self._control.exchange_objects((tuple(seen), available_bytes(), self.nbytes))
        most = max((each for each, _, _ in told), key=len)  # of a rank with samples
        of_round = [_bytes_on_host(self._plan, i, most) for i in range(len(told))]
        needed = [nbytes * n for nbytes, n in zip(of_round, self._held, strict=True)]
        more = [max(0, n - before) for n, (_, _, before) in zip(needed, told, strict=True)]
        for node in range(len(self._nodes)):
            here = self._nodes.positions(node)
            free = min((told[i][1] for i in here if told[i][1] is not None), default=None)
            lacking = sum(more[i] for i in here)
            if free is not None and lacking > free:
                raise ValueError(
                    f"plan: inputs_on_host: the inputs of positions "
                    f"{[i for i in here if more[i]]} need {lacking / MIB:,.0f} MiB of their "
                    f"host's memory, which has {free / MIB:,.0f} MiB. Keep those of fewer "
                    "units there, or give these devices smaller batches."
                )
        if self.inputs is not None:
            self.inputs.reserve(of_round[self._control.position])


def _bytes_on_host(plan: Plan, position: int, seen: Sequence[SeenInput]) -> int:
    """What the host of the rank at ``position`` keeps of a round's inputs."""
    rank = plan.ranks[position]
    stage = pipeline_of(plan)[plan.groups.index(plan.group_of(position))]
    by_tensor = {
        each.tensor: each.bytes_per_sample
        for each in seen
        if rank.keeps_input_on_host(each.fqn) and stage.has(each.fqn)
    }
    unused = ALIGNMENT * len(by_tensor) * rank.num_microbatches
    return int(rank.rank_batch_size * sum(by_tensor.values())) + unused


class Runtime:
    """Takes the units of one stage through its steps; without stages all ranks are one."""

    def __init__(
        self,
        units: Sequence[FSDPUnit],
        root: FSDPUnit,
        *,
        plan: Plan,
        comm: CommContext,
        group: ShardGroup,  # of all ranks, whatever their stages
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
        self.group, self.control, self.peers = group, group.control, group.peers
        self.flats = [flat for unit in self.all_units for flat in unit.flats]
        self.of_frozen = [e.persistence for e in self.flats if e.persistence is not None]
        marks_time = None if devices.is_on_host(comm.device) else comm.mark_device_time
        self.observers = observers or Observers(marks_time)
        self.rounds = Rounds(plan, self.control.position)
        self.asks_to_end = self.is_asked_to_end = False  # this rank; any, at the last backward
        self.raises_bad_loss = True  # that is not finite
        # Nothing is in flight, and there is no gradient but those that users have.
        self.is_at_rest = False
        self._comm, self.root_comm = comm, group.comm  # of those of a stage, and of all ranks
        self.comms = tuple(dict.fromkeys((comm, group.comm)))
        self._random = RandomStates(seed, comm.device)
        self._module, self.norms, self.has_norms = module, norms, len(norms) > 0
        self._caches, self._loss = caches, loss
        self.executor = ScheduleExecutor(units, root, comm=comm, observers=self.observers)
        self._inputs: InputsOnHost | None = None
        self.step = StepInProgress()
        self.written = Written(self.flats, is_alone=self.control.group is None)
        self.features = FeatureGathers(group, self.step)
        self._of_features = ref(self.features)
        self.calls = (UnitCalls if plan.stages is None else StageCalls)(
            module,
            units,
            step=self.step,
            rounds=self.rounds,
            executor=self.executor,
            features=self.features,
            peers=self.peers,
            device=comm.device,
        )
        self.follow(plan)

    def follow(self, plan: Plan, batches_per_step: int = 1) -> None:
        """Compute as ``plan`` says from the next forward on, so many of its batches a step."""
        self.plan = plan
        self.rank_plan = plan.ranks[self.control.position]
        self.rounds.follow(plan, batches_per_step)
        self._comm.num_rounds = self.rounds.number
        self.features.has_parts = plan.num_rounds > 1 or plan.stages is not None
        self.features.has_groups = plan.context_groups is not None
        if self._inputs is not None:
            self._inputs.wait()
        self.staging = HostStaging(plan, self._comm, self.control, self.rounds.number)
        self._inputs = self.staging.inputs
        of_group = plan, self._module, self._comm, self.control
        self.tokens = None if plan.context_groups is None else ContextGroup.of(*of_group)
        visits = Visits(
            always_unsharded=self.executor.always_unsharded,
            rank_plan=self.rank_plan,
            random=self._random,
            norms=self.norms if self.has_norms else None,
            observers=self.observers,
            device_type=self._comm.device.type,
            inputs=self._inputs,
            tokens=self.tokens,
            tiles=Tiles(self.rank_plan, self._comm.device)
            if self.rank_plan.tiled_units
            else None,
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
        self.stage = plan.groups.index(own := plan.group_of(self.control.position))
        progress.stage = None if plan.stages is None else self.stage
        self.computing_here = tuple(i for i in self.root_comm.computing if i in own)
        self.stage_by_fqn = stage_by_unit(pipeline_of(plan), [unit.fqn for unit in self.units])
        self.in_flight = rounds_in_flight(pipeline_of(plan), self.rounds.number)  # by stage
        self._prober = Prober(probed, form=self.rounds.form)
        self.known = KnownCalls(self._prober, self.control, in_stages=plan.stages is not None)
        self.calls.follow(visits, self._prober, self.known)

    @property
    def known_to_stay(self) -> frozenset[int]:
        """Units that some forward so far needed unsharded throughout."""
        return self._prober.always_unsharded

    # Rounds #

    def enter_forward(self) -> None:
        """Begin a forward of the model, whose features are gathered next."""
        self.step.is_in_forward = True
        FeatureGathers.latest = self._of_features

    def begin_step(self) -> None:
        """Begin anew, and read rows again that are on the host."""
        if not self.is_at_rest:
            self.abandon()
        self.is_at_rest = False
        self.begin_to_gather()

    def gather_anew(self) -> None:
        """Let the round that comes next read rows that were written between rounds."""
        self.executor.gather_anew()
        for comm in self.comms:
            comm.mark_rows_changed()

    def begin_to_gather(self) -> None:
        self.step.has_gradients = torch.is_grad_enabled()
        for comm in self.comms:
            comm.mark_rows_changed()

    def unshard_root(self, everywhere: tuple[int, ...], here: tuple[int, ...]) -> None:
        """Unshard the root ``everywhere``; units of this stage later are ``here``."""
        for comm, receivers in {self.root_comm: everywhere, self._comm: here}.items():
            comm.set_receivers(receivers)
            comm.mark_compute()  # gathers read shards that the optimizer wrote
        if self.rank_plan.optimizer_on_host and self._comm.host_memory.lets_copies_wait:
            for unit in self.all_units:
                unit.copy_to_device()
        self.executor.take_in(self.root)

    def probe(
        self, each: Round, run_module: RunModule, *, is_training: bool, splits: bool
    ) -> Findings:
        """Run the whole model on all ranks, and find what belongs to the round.  Collective."""
        doing = progress.doing
        progress.mark(f"{doing}, the probe of its first call of this kind")
        self._enter(each)
        with self.calls.dropout.taken_over(is_needed=True):
            each.index = self.known.probe(
                each.call, run_module, is_training=is_training, splits=splits
            )
        findings = self.known.findings(each.index)
        if self.step.has_gradients:
            self.staging.reserve(findings.inputs)
        progress.mark(doing)
        return findings

    def forward_round(self, each: Round, run: Callable[[], Any], *, is_training: bool) -> Any:
        """Take all turns of a round's forward; what ``run`` returns on ranks with samples, on
        others an empty output of the model.
        """
        self._enter(each)
        self.step.num_visits.clear()
        self.executor.begin_round()
        findings = self.known.begin(each.index, each.call)
        del each.call
        if each.num_samples:
            taken_over = self.calls.dropout.taken_over(is_needed=findings.has_root_dropout)
            with self._random.around(is_training), taken_over:
                self._random.seed("", 0, each.round_key.step, each.seeded_as, is_training)
                output = run()
            self.executor.end_forward()
        else:
            self.executor.pass_forward()
            output = findings.make_empty_output(self.calls.anchor)
        _count_everywhere(self._module, findings, each, self.control)
        is_cut = len(each.spans) > 1
        self.known.end_forward(follows=self.rounds.have_begun, is_cut=is_cut)
        return output

    def around_root(self) -> AbstractContextManager[Any]:
        """What surrounds code outside of units: attention among the members of a group."""
        each = self.step.round
        number = 0 if each is None or self._prober.probe is not None else each.num_samples
        if self.tokens is None or not number:
            return nullcontext()
        return self.tokens.around([Span(0, number)]).in_function(0, is_repeated=False)

    def backward_round(self, each: Round, run_autograd: Callable[[], None]) -> None:
        """Take all turns of a round's backward; ranks with samples call ``run_autograd``."""
        self._enter(each)
        self.executor.begin_backward()
        if each.num_samples:
            self.step.is_in_autograd = True
            try:
                # Without autocast, which plain programs leave before it.
                with autocast_as(self._comm.device.type, None):
                    run_autograd()
            finally:
                self.step.is_in_autograd = False
        if self.features.open:
            self.features.finish()
        if self._inputs is not None:
            self._inputs.end_round()
        self.executor.end_backward()

    def begin_phase(self, now: RoundPhase, following: RoundPhase) -> None:
        """Let what a backward that follows begins with come back from the host meanwhile."""
        if self._inputs is not None:
            self._inputs.enter(now.round)
            if following.phase is Phase.BACKWARD:
                self._inputs.expect(following.round)

    def _enter(self, each: Round) -> None:
        self.rounds.round_key, self.step.round = each.round_key, each
        if self._inputs is not None:
            self._inputs.enter(each.round_key.round)

    # The end of a step #

    def reduce_rest(self) -> None:
        """Launch the reductions that are left, of which the root's, the last, is in flight
        afterwards (``MeanLoss.end_step`` waits for it), and end the rounds.  Collective.
        """
        self.executor.reduce_rest()
        self.end_rounds()

    def end_rounds(self) -> None:
        """Reshard what stayed, once the last round is finished."""
        self.executor.end_step()
        self.root_comm.wait_all_sent()
        self.step.is_in_forward, self.step.round = False, None

    def drop(self) -> None:
        """Drop the rounds of the step so far, and begin it anew.  Collective."""
        self.executor.finish()  # nothing may write what is dropped
        self.abandon()
        self.rounds.forget()

    def abandon(self) -> None:
        """End a step without its backward: nothing stays in flight, everything is sharded."""
        self.executor.abandon()
        self.root_comm.wait_all_sent()
        self.norms.drop()
        if self._inputs is not None:
            self._inputs.drop()
        self.step.round, self.step.awaits_backward = None, False


@contextmanager
def aside(runtime: Runtime) -> Iterator[None]:
    """A context for calls without gradients, beside the steps: one that is between two of its
    rounds goes on after it.
    """
    rounds, step, executor = runtime.rounds, runtime.step, runtime.executor
    is_between = not rounds.have_begun
    if is_between and not runtime.is_at_rest:
        runtime.abandon()
    runtime.is_at_rest = False
    round_key, had_gradients = rounds.round_key, step.has_gradients
    rounds.forget()
    executor.gather_anew()
    turns, unsharded = (executor.schedule, executor.cursor), [*executor.always_unsharded]
    runtime.begin_to_gather()
    yield
    (executor.schedule, executor.cursor), executor.base = turns, None
    executor.always_unsharded[:] = unsharded
    rounds.round_key, step.has_gradients = round_key, had_gradients
    runtime.is_at_rest = runtime.is_at_rest and is_between


def _count_everywhere(
    module: nn.Module, findings: Findings, each: Round, control: Channel
) -> None:
    """Copy numbers that the forward changed in attributes to ranks without samples."""
    if findings.counted and 0 < len(each.computing) < control.world_size:
        source, is_here = each.computing[0], bool(each.num_samples)
        take_over(module, findings.counted, control, source=source, is_here=is_here)
