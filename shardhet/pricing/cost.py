"""Predicted seconds and bytes of units, ranks and steps: one model for planner and simulator.

A turn is one visit of a unit in one phase.  Ranks meet at every turn, because each gather
takes something from all of them, and beside a turn's compute run the gather of the next
unit and, in backward, the reduction of the one before.  With C_i the compute of rank i in a
turn, g what the collectives beside it take, and kappa_i how much the compute of i slows
beside them, the turn takes

    max(g,  max_i C_i + (1 - 1/kappa_i) g)

Turns that are alike (the blocks) are added up first, so the predicted step is

    sum over classes of turns of max(g, max_i C_i + (1 - 1/kappa_i) g)
      + the first gather and the last reduction, which nothing hides
      + max_i (seconds per element of the optimizer) * (elements stored by i)
      + the runtime's own time in every turn, where the host does not run ahead of its device
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from shardhet.pricing.step_cost import MemoryParts, RankCost, StepCost, TurnCost
from shardhet.records.cluster import Cluster
from shardhet.records.layout import stored_numels
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.profiles import Profile
from shardhet.records.schedule import Phase, Segment, make_schedule
from shardhet.records.workload import Unit, UnitKind, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnClass:
    """Units that are alike in kind and in who recomputes them, and what runs beside them."""

    kind: UnitKind
    num_units: int
    unit_fqn: str  # of one of them: who recomputes it recomputes all
    forward_comm_s: float  # beside all their forward turns together
    backward_comm_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """All classes of turns of a step, and the communication that nothing hides."""

    classes: tuple[TurnClass, ...]
    exposed_comm_s: float

    @property
    def comm_s(self) -> float:
        """All communication of the step, hidden or not."""
        beside = sum(each.forward_comm_s + each.backward_comm_s for each in self.classes)
        return beside + self.exposed_comm_s


@dataclass(frozen=True)
class CostModel:
    """What a plan costs on this cluster, for this workload, by this profile."""

    cluster: Cluster
    workload: Workload
    profile: Profile

    @property
    def overhead_s(self) -> float:
        """The runtime's own time in all turns of a step."""
        return len(Phase) * len(self.visited_units) * self.profile.turn_overhead_s

    @cached_property
    def visited_units(self) -> tuple[Unit, ...]:
        """The units that compute, in order of execution."""
        return tuple(unit for unit in self.workload.units if unit.fqn)

    @cached_property
    def root_numel(self) -> int:
        """Elements that are unsharded for the whole step."""
        kinds = [self.workload.kind_of(unit) for unit in self.workload.units if not unit.fqn]
        return sum(kind.numel for kind in kinds)

    # Seconds #

    def unit_seconds(
        self, device_kind: str | None, unit_kind: str, microbatch_sizes: Iterable[int]
    ) -> tuple[float, float]:
        """Forward and backward of one unit on a rank's microbatches, nothing recomputed."""
        unit = self.profile.unit(device_kind, unit_kind)
        sizes = list(microbatch_sizes)
        return (
            sum(unit.forward_s.at(size) for size in sizes),
            sum(unit.backward_s.at(size) for size in sizes),
        )

    def beside_comm_s(self, device_kind: str | None, compute_s: float, comm_s: float) -> float:
        """How long a device computes what takes ``compute_s`` alone beside ``comm_s``."""
        return compute_s + self.profile.device(device_kind).overlap_excess * comm_s

    def unevenness(self, shares: Sequence[float], computes: Sequence[bool]) -> float:
        """What the busiest port moves when owners send directly, over what a ring moves.

        With R devices of which R' receive, owner i sends s_i (R' - r_i) and receives
        r_i (1 - s_i) of a unit's bytes; a ring moves (R - 1) / R of them past every device.
        """
        world_size = len(shares)
        if world_size == 1:
            return 0.0
        num_receivers = sum(computes)
        busiest = max(
            max(share * (num_receivers - receives), receives * (1 - share))
            for share, receives in zip(shares, computes, strict=True)
        )
        return busiest * world_size / (world_size - 1)

    def turns(
        self,
        *,
        unevenness: float,
        recomputed: Sequence[Sequence[str]] = (),
        reshard_after_forward: bool = True,
    ) -> Turns:
        """The classes of turns of a step.

        ``recomputed`` holds the different patterns that ranks recompute by; units are of one
        class where all of them agree.
        """
        gather_s, reduce_s = self._collective_seconds(unevenness)
        forward_s, backward_s = (
            self._mean_by_kind(seconds)
            for seconds in self._beside(gather_s, reduce_s, reshard_after_forward)
        )
        root_s = sum(
            self._collective_s(self.root_numel, is_gather, unevenness)
            for is_gather in (True, False)
            if self.root_numel
        )
        return Turns(
            classes=tuple(
                TurnClass(
                    kind=self.workload.kind_of(self.visited_units[members[0]]),
                    num_units=len(members),
                    unit_fqn=self.visited_units[members[0]].fqn,
                    forward_comm_s=sum(forward_s[i] for i in members),
                    backward_comm_s=sum(backward_s[i] for i in members),
                )
                for members in self._alike(recomputed)
            ),
            exposed_comm_s=gather_s[0] + reduce_s[0] + root_s,
        )

    def unit_collectives(self, plan: Plan) -> tuple[list[float], list[float]]:
        """Seconds of the gather and the reduction of every visited unit under a plan."""
        shares = [
            numel / self.workload.numel for numel in self.stored_numels(plan.state_shares)
        ]
        computes = [rank.rank_batch_size > 0 for rank in plan.ranks]
        return self._collective_seconds(self.unevenness(shares, computes))

    def _alike(self, recomputed: Sequence[Sequence[str]]) -> list[list[int]]:
        """Indices of units that agree in kind and in who recomputes them."""
        ranks = [
            RankPlan(microbatch_sizes=(), state_share=0.0, recomputed_units=tuple(patterns))
            for patterns in recomputed
        ]
        members: dict[tuple[str, tuple[bool, ...]], list[int]] = {}
        for i, unit in enumerate(self.visited_units):
            signature = tuple(rank.recomputes(unit.fqn) for rank in ranks)
            members.setdefault((unit.kind, signature), []).append(i)
        return list(members.values())

    def _mean_by_kind(self, seconds: Sequence[float]) -> list[float]:
        """Of every visited unit what its kind has in the mean.

        So a step takes as long however turns that are alike are put into classes.
        """
        by_kind: dict[str, list[float]] = {}
        for unit, each in zip(self.visited_units, seconds, strict=True):
            by_kind.setdefault(unit.kind, []).append(each)
        return [fmean(by_kind[unit.kind]) for unit in self.visited_units]

    def _collective_seconds(self, unevenness: float) -> tuple[list[float], list[float]]:
        """Gather and reduction of every visited unit."""
        kinds = [self.workload.kind_of(unit) for unit in self.visited_units]
        gather_s = [self._collective_s(kind.numel, True, unevenness) for kind in kinds]
        reduce_s = [self._collective_s(kind.numel, False, unevenness) for kind in kinds]
        return gather_s, reduce_s

    def _collective_s(self, numel: int, is_gather: bool, unevenness: float) -> float:
        collectives, workload = self.profile.collectives, self.workload
        if is_gather:
            curve, weight = collectives.gather_s, collectives.gather_unevenness_weight
        else:
            curve, weight = collectives.reduce_s, collectives.reduce_unevenness_weight
        if curve is None or self.cluster.world_size == 1:
            return 0.0
        itemsize = workload.param_itemsize if is_gather else workload.reduce_itemsize
        return curve.at(numel * itemsize * (1 - weight + weight * unevenness))

    def _beside(
        self, gather_s: Sequence[float], reduce_s: Sequence[float], reshard_after_forward: bool
    ) -> tuple[list[float], list[float]]:
        """What is communicated beside the forward and the backward turn of each unit."""
        num_units = len(gather_s)
        schedule = make_schedule(
            [Segment(i, True) for i in range(num_units)],
            trainable_units=frozenset(range(num_units)),
            reshard_after_forward=reshard_after_forward,
        ).turns
        forward_s, backward_s = [0.0] * num_units, [0.0] * num_units
        for i, turn in enumerate(schedule):
            following, previous = schedule[i + 1 : i + 2], schedule[max(0, i - 1) : i]
            seconds = sum(gather_s[later.unit] for later in following if later.gathers)
            seconds += sum(reduce_s[earlier.unit] for earlier in previous if earlier.reduces)
            side = forward_s if turn.phase is Phase.FORWARD else backward_s
            side[turn.unit] += seconds
        return forward_s, backward_s

    # Bytes #

    @cached_property
    def bytes_per_stored_numel(self) -> float:
        """Bytes that a rank needs per element that it stores, buffers included.

        Of the largest unit's shard there are two copies in flight where parameters travel in
        another dtype, and one where gradients are summed in another.
        """
        workload = self.workload
        numels = [workload.kind_of(unit).numel for unit in workload.units]
        copies = 2 * workload.param_itemsize * (workload.param_dtype != "float32")
        copies += workload.reduce_itemsize * (workload.reduce_dtype != "float32")
        return workload.state_bytes_per_element + copies * max(numels) / workload.numel

    @cached_property
    def unsharded_bytes(self) -> int:
        """Gathered parameters of the root and of two neighbours in the order of execution."""
        return (self._max_of_neighbours + self.root_numel) * self.workload.param_itemsize

    @cached_property
    def grad_bytes(self) -> int:
        """Unsharded gradients of the unit in backward and of the one being reduced."""
        return (self._max_of_neighbours + self.root_numel) * self.workload.reduce_itemsize

    @cached_property
    def _max_of_neighbours(self) -> int:
        if self.cluster.world_size == 1:
            return 0  # the shard is the storage
        numels = [self.workload.kind_of(unit).numel for unit in self.visited_units]
        return max(a + b for a, b in zip(numels, [*numels[1:], 0], strict=True))

    @cached_property
    def boundary_bytes_per_sample(self) -> int:
        """Inputs of every unit, kept for backward, and two gradients of the largest."""
        kinds = [self.workload.kind_of(unit) for unit in self.visited_units]
        return sum(kind.input_bytes for kind in kinds) + 2 * max(k.input_bytes for k in kinds)

    def kept_bytes_per_sample(self, rank: RankPlan) -> int:
        """Graphs of the units that the rank does not recompute."""
        runs = self._runs_of(rank.recomputed_units)
        return sum(
            number * self.workload.kind_by_name[kind].activation_bytes
            for (kind, is_recomputed), number in runs.items()
            if not is_recomputed
        )

    def running_bytes(self, rank: RankPlan, device_kind: str | None, size: int) -> int:
        """What the running microbatch needs besides graphs that are kept anyway."""
        runs, known = self._runs_of(rank.recomputed_units), self._known_running_bytes
        key = (tuple(runs), device_kind, size)
        if key not in known:
            known[key] = max(
                self._running_bytes(kind, is_recomputed, device_kind, size)
                for kind, is_recomputed in runs
            )
        return known[key]

    def _runs_of(self, recomputed_units: tuple[str, ...]) -> Mapping[tuple[str, bool], int]:
        """How many units there are of each kind that are recomputed, and that are not."""
        known = self._known_runs
        if recomputed_units not in known:
            rank = RankPlan(
                microbatch_sizes=(), state_share=0.0, recomputed_units=recomputed_units
            )
            runs = ((unit.kind, rank.recomputes(unit.fqn)) for unit in self.visited_units)
            known[recomputed_units] = Counter(runs)
        return known[recomputed_units]

    @cached_property
    def _known_runs(self) -> dict[tuple[str, ...], Mapping[tuple[str, bool], int]]:
        return {}

    @cached_property
    def _known_running_bytes(self) -> dict[tuple[object, ...], int]:
        return {}

    def _running_bytes(
        self, kind_name: str, is_recomputed: bool, device_kind: str | None, size: int
    ) -> int:
        kind = self.workload.kind_by_name[kind_name]
        graph = size * kind.activation_bytes
        measured = self.profile.unit(device_kind, kind.name).peak_bytes
        peak = graph + size * kind.transient_bytes
        if measured is not None:
            peak = int(measured.at(size))
        return peak if is_recomputed else max(0, peak - graph)

    def memory(self, rank: RankPlan, stored_numel: int) -> MemoryParts:
        """Everything that a rank holds which stores this many elements."""
        workload, device_kind = self.workload, rank.device.kind
        batch, sizes = rank.rank_batch_size, rank.microbatch_sizes
        buffers = self.bytes_per_stored_numel - workload.state_bytes_per_element
        kept = batch * self.kept_bytes_per_sample(rank)
        return MemoryParts(
            state_bytes=stored_numel * workload.state_bytes_per_element,
            shard_buffer_bytes=int(stored_numel * buffers),
            unsharded_bytes=self.unsharded_bytes if batch else 0,
            grad_bytes=self.grad_bytes if batch else 0,
            boundary_bytes=batch * self.boundary_bytes_per_sample,
            activation_bytes=kept + self.running_bytes(rank, device_kind, max(sizes))
            if batch
            else 0,
            reserved_bytes=self.profile.device(device_kind).reserved_bytes,
        )

    # A plan #

    def predict(self, plan: Plan) -> StepCost:
        """The step that the plan makes, with every share rounded to rows as the runtime does.

        Devices are those of the cluster, in its order.
        """
        self._check_devices(plan)
        self._check_units(plan)
        stored = self.stored_numels(plan.state_shares)
        ranks = [
            replace(rank, device=device)
            for rank, device in zip(plan.ranks, self.cluster.devices, strict=True)
        ]
        shares = [numel / self.workload.numel for numel in stored]
        computes = [rank.rank_batch_size > 0 for rank in ranks]
        turns = self.turns(
            unevenness=self.unevenness(shares, computes),
            recomputed=list(dict.fromkeys(rank.recomputed_units for rank in ranks)),
            reshard_after_forward=plan.reshard_after_forward,
        )
        compute: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        parts_by_kind: dict[str | None, list[list[tuple[float, float]]]] = {}
        costs = []
        for i, rank in enumerate(ranks):
            key = (rank.device.kind, rank.microbatch_sizes, rank.recomputed_units)
            if key not in compute:
                compute[key] = [self._class_seconds(each, rank) for each in turns.classes]
                parts_by_kind.setdefault(rank.device.kind, []).append(compute[key])
            costs.append(self._rank_cost(i, rank, stored[i], compute[key]))
        return StepCost(
            turns=tuple(self._turn_costs(turns, parts_by_kind)),
            optimizer_s=max(cost.optimizer_s for cost in costs),
            exposed_comm_s=turns.exposed_comm_s,
            overhead_s=self.overhead_s,
            ranks=tuple(costs),
        )

    def _turn_costs(
        self, turns: Turns, parts: Mapping[str | None, Sequence[Sequence[tuple[float, float]]]]
    ) -> Iterator[TurnCost]:
        """Every class of turns in both phases; ``parts`` is compute by kind of device, and of
        its ranks by class and phase.
        """
        for j, each in enumerate(turns.classes):
            both_comm_s = (each.forward_comm_s, each.backward_comm_s)
            for i, (phase, comm_s) in enumerate(zip(Phase, both_comm_s, strict=True)):
                beside_s, compute_s = max(
                    (self.beside_comm_s(kind, part[j][i], comm_s), part[j][i])
                    for kind, of_kind in parts.items()
                    for part in of_kind
                )
                yield TurnCost(
                    unit_kind=each.kind.name,
                    phase=phase,
                    compute_s=compute_s,
                    comm_s=comm_s,
                    seconds=max(comm_s, beside_s),
                )

    def stored_numels(self, state_shares: Sequence[float]) -> list[int]:
        """Elements that each device stores once every border lies between rows."""
        return stored_numels(self.workload.layouts(), state_shares)

    def _class_seconds(self, each: TurnClass, rank: RankPlan) -> tuple[float, float]:
        forward_s, backward_s = self.unit_seconds(
            rank.device.kind, each.kind.name, rank.microbatch_sizes
        )
        if rank.recomputes(each.unit_fqn):
            backward_s += forward_s
        return each.num_units * forward_s, each.num_units * backward_s

    def _rank_cost(
        self, position: int, rank: RankPlan, stored: int, parts: list[tuple[float, float]]
    ) -> RankCost:
        per_element_s = self.profile.device(rank.device.kind).optimizer_seconds_per_element
        return RankCost(
            forward_s=sum(forward_s for forward_s, _ in parts),
            backward_s=sum(backward_s for _, backward_s in parts),
            optimizer_s=per_element_s * stored,
            stored_numel=stored,
            memory=self.memory(rank, stored),
            memory_budget_bytes=self.cluster.memory_budget_bytes(position),
        )

    def _check_devices(self, plan: Plan) -> None:
        if plan.world_size != self.cluster.world_size:
            raise ValueError(
                f"plan: it has {plan.world_size} devices but the cluster has "
                f"{self.cluster.world_size}. Make a plan for this cluster."
            )
        for i, (rank, device) in enumerate(zip(plan.ranks, self.cluster.devices, strict=True)):
            if not rank.device.accepts(device):
                raise ValueError(
                    f"plan: ranks[{i}] is for {rank.device} but the cluster has {device} "
                    "there. Put the devices in the same order, or plan again."
                )

    def _check_units(self, plan: Plan) -> None:
        workload = self.workload
        here = {unit.fqn: workload.kind_of(unit).numel for unit in workload.units}
        wanted = {unit.fqn: unit.numel for unit in plan.units}
        if wanted and wanted != here:
            differing = [fqn for fqn in {**wanted, **here} if wanted.get(fqn) != here.get(fqn)]
            raise ValueError(
                f"plan: it was made for a model with {sum(wanted.values())} parameters, but "
                f"this one has {workload.numel}; units {', '.join(differing[:3])} differ. Give "
                "the model of the plan, or plan again."
            )
