"""The predicted cost of a plan: the time of a step and the memory of its ranks.

Let C_i be the compute time of rank i in a turn, g the time of the collectives that overlap
the turn, and e_i the seconds that the compute of i loses per second of those collectives
(``overlap_slowdown``).  The turn takes

    max(g,  max C_i + e_i g  over the ranks with C_i > 0)

Turns that are alike (the blocks, in rounds with the same collectives) are added up first, so
the predicted step is

    sum over classes of turns of max(g, max C_i + e_i g)
      + the first gather and the last reduction, which overlap no compute
      + max_i (seconds per element of the optimizer) * (elements stored by i)
      + the runtime's own time in every turn, if the host does not run ahead of its device

The compute of a member of a context group is that of its tokens, and the exchange of keys and
values (``shardhet.pricing.part``).

Devices without samples and rows take no part in collectives, which are then those of the
cluster without these devices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

from shardhet.pricing.matrices import OwnedState, matrices_s
from shardhet.pricing.memory import MemoryPrices
from shardhet.pricing.part import Member
from shardhet.pricing.step_cost import MemoryParts, RankCost, StepCost, TurnCost
from shardhet.pricing.turns import TurnClass, TurnPrices, Turns, taking_part
from shardhet.records.codec import first_places
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import Phase, StepForm

# Of a rank: by class of turns, and by rounds that are alike, seconds of forward and backward.
_Seconds = Sequence[Sequence[tuple[float, float]]]


class _Look(NamedTuple):
    """What the cost of a rank depends on, besides the turns of the step."""

    rank: int  # its ``id``
    stored: int
    budget_bytes: int
    pace: float  # of copies to its host
    last: tuple[int, ...]  # microbatches of the last round
    member: Member | None
    matrices: int  # its position, if it owns any


@dataclass(frozen=True)
class CostModel(TurnPrices, MemoryPrices):
    """What a plan costs in a scenario."""

    def predict(self, plan: Plan) -> StepCost:
        """The cost of one step of the plan, with shares rounded to rows as in the runtime.

        Devices are those of the cluster, in its order.
        """
        plan.refuse_stages("the cost model")
        of_plan = (StepForm.of(plan), plan.two_level_units, plan.resident_units)
        if of_plan != (self.form, self.two_level_units, self.resident_units):
            return self.for_plan(plan).predict(plan)
        self._check_devices(plan)
        self._check_units(plan)
        stored_by = self.stored_by(plan)
        stored = stored_by.numels
        pairs = zip(plan.ranks, self.cluster.devices, strict=True)
        ranks = [r if r.device is each else replace(r, device=each) for r, each in pairs]
        active = taking_part(ranks, stored)
        among = self.among(active)
        turns = among.turns(
            unevenness=among.unevenness_of(ranks, stored, active),
            recomputed=self.policies(ranks),
        )
        compute: dict[tuple[object, ...], _Seconds] = {}
        parts_by_kind: dict[str | None, list[_Seconds]] = {}
        known: dict[tuple[object, ...], RankCost] = {}
        looks, cost_by_key = self._cost_keys(plan, ranks, stored_by), dict[_Look, RankCost]()
        for look, i in first_places(looks).items():
            rank = ranks[i]
            if not (rank.microbatch_sizes or look.stored):
                idle = (rank.device.kind, look.budget_bytes, rank.optimizer_on_host)
                if idle not in known:
                    known[idle] = self._rank_cost(rank, look, ())
                cost_by_key[look] = known[idle]
                continue
            own, sizes = among.of_member(look.member), (rank.microbatch_sizes, look.last)
            key: tuple[object, ...] = (
                (rank.device.kind, look.member),
                sizes,
                rank.recomputed_units,
                (rank.tiled_units, rank.tokens_per_tile),
                rank.optimizer_on_host,
            )
            if rank.inputs_on_host:
                key = (*key, rank.inputs_on_host, look.pace)
            if key not in compute:
                compute[key] = [
                    own._class_seconds(each, rank, look.last, look.pace)
                    for each in turns.classes
                ]
                parts_by_kind.setdefault(rank.device.kind, []).append(compute[key])
            of_rank = (key, look.stored, look.budget_bytes)
            if of_rank not in known:
                alone = self.of_member(look.member)
                known[of_rank] = alone._rank_cost(rank, look, compute[key])
            cost = known[of_rank]
            if stored_by.matrices:
                self._check_has_time(i, rank, stored_by)
                of_matrices_s = matrices_s(
                    self.profile, self.workload, rank.device.kind, stored_by.matrices[i]
                )
                cost = replace(
                    cost,
                    optimizer_s=cost.optimizer_s + of_matrices_s,
                    memory=self._with_uneven(rank, cost.memory, stored_by, i),
                )
            cost_by_key[look] = cost
        of_ranks = self.with_hosts([*map(cost_by_key.__getitem__, looks)], ranks)
        return StepCost(
            turns=tuple(among._turn_costs(turns, parts_by_kind)),
            optimizer_s=max(cost.optimizer_s for cost in of_ranks),
            exposed_comm_s=turns.exposed_comm_s,
            overhead_s=self.overhead_s,
            ranks=of_ranks,
        )

    def _cost_keys(
        self, plan: Plan, ranks: Sequence[RankPlan], stored_by: OwnedState
    ) -> list["_Look"]:
        """By position, what the cost of a rank depends on."""
        every = range(len(ranks))
        members = [self.member_at(plan, i) if plan.context_groups else None for i in every]
        return [
            *map(
                _Look,
                map(id, ranks),
                stored_by.numels,
                self.cluster.budgets,
                self.host_paces(plan),
                map(plan.last_microbatch_sizes, every),
                members,
                every if stored_by.matrices else repeat(0),
            )
        ]

    def policies(self, ranks: Sequence[RankPlan]) -> list[tuple[str, ...]]:
        """Distinct lists of patterns by which ranks treat units alike, or not."""
        found = dict.fromkeys(rank.recomputed_units for rank in ranks)
        on_host = dict.fromkeys(rank.inputs_on_host for rank in ranks if rank.inputs_on_host)
        # Nothing is copied of the first unit's inputs, whatever patterns say.
        first = [(self.visited_units[0].fqn,)] if on_host else []
        in_tiles = dict.fromkeys(rank.tiled_units for rank in ranks if rank.tiled_units)
        return list(found | on_host | dict.fromkeys(first) | in_tiles)

    def _turn_costs(
        self, turns: Turns, parts: Mapping[str | None, Sequence[_Seconds]]
    ) -> Iterator[TurnCost]:
        """The cost of every class of turns in both phases, of rounds that are alike.

        ``parts`` maps each kind of device to the compute of each distinct rank.
        """
        for j, each in enumerate(turns.classes):
            for k, rounds in enumerate(each.rounds):
                for i, (phase, comm_s) in enumerate(zip(Phase, rounds.comm_s, strict=True)):
                    beside_s, compute_s = max(
                        (self.beside_comm_s(kind, part[j][k][i], comm_s), part[j][k][i])
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

    def _class_seconds(
        self, each: TurnClass, rank: RankPlan, last: tuple[int, ...], pace: float
    ) -> list[tuple[float, float]]:
        """Seconds of both phases in rounds that are alike; ``last`` are the microbatches of
        the last.  Copies of inputs to the host and back get ``pace`` bytes per second.
        """
        device, unit = rank.device.kind, each.kind.name
        found = []
        for rounds in each.rounds:
            sizes = last if rounds.is_last else rank.microbatch_sizes
            forward_s, backward_s = self.unit_seconds(device, unit, sizes)
            backward_s += forward_s * self.again_part(rank, each.unit_fqn, each.kind)
            forward_s, backward_s = self.beside_copies_s(
                rank, each.unit_fqn, sizes, (forward_s, backward_s), pace
            )
            number = each.num_units * rounds.num_rounds
            found.append((number * forward_s, number * backward_s))
        return found

    def _rank_cost(self, rank: RankPlan, look: "_Look", parts: _Seconds) -> RankCost:
        per_element_s = self.profile.device(rank.device.kind).optimizer_seconds_per_element
        return RankCost(
            forward_s=sum(forward_s for of_class in parts for forward_s, _ in of_class),
            backward_s=sum(backward_s for of_class in parts for _, backward_s in of_class),
            optimizer_s=per_element_s * look.stored,
            stored_numel=look.stored,
            memory=self.memory(rank, look.stored),
            memory_budget_bytes=look.budget_bytes,
        )

    def _with_uneven(
        self, rank: RankPlan, parts: MemoryParts, stored_by: OwnedState, position: int
    ) -> MemoryParts:
        """The same of a rank that does not have the same share of each unit."""
        beside = self.bytes_per_stored_numel - self.workload.state_bytes_per_element
        early = stored_by.early[position] * bool(rank.rank_batch_size)  # else all are counted
        if rank.optimizer_on_host:
            beside, early = self.device_bytes_per_host_numel - self.sent_itemsize, 0
        elif early:
            numel_bytes, pending = self._numel_bytes
            beside = max(beside, float((numel_bytes + pending).max()) - self._state_bytes)
        more = stored_by.uneven[position] * beside / self._largest_part
        more += early * self.workload.grad_bytes_per_element
        return replace(parts, shard_buffer_bytes=parts.shard_buffer_bytes + int(more))

    def _check_has_time(self, position: int, rank: RankPlan, stored_by: OwnedState) -> None:
        if rank.optimizer_on_host and stored_by.matrices[position]:
            raise ValueError(
                f"plan: ranks[{position}] steps whole matrices on its host "
                "(optimizer_on_host), for which no time is known. Keep its optimizer on the "
                "device, or leave out measured."
            )

    def _check_devices(self, plan: Plan) -> None:
        if plan.world_size != self.cluster.world_size:
            raise ValueError(
                f"plan: it has {plan.world_size} devices but the cluster has "
                f"{self.cluster.world_size}. Make a plan for this cluster."
            )
        for i, (rank, device) in enumerate(zip(plan.ranks, self.cluster.devices, strict=True)):
            if rank.device is not device and not rank.device.accepts(device):
                raise ValueError(
                    f"plan: ranks[{i}] is for {rank.device} but the cluster has {device} "
                    "there. Put the devices in the same order, or plan again."
                )

    def _check_units(self, plan: Plan) -> None:
        # What no unit has is in the root, which has nothing in many plans of runs.
        here = {unit.fqn: unit.numel for unit in self.workload.planned_units if unit.numel}
        wanted = {unit.fqn: unit.numel for unit in plan.units if unit.numel}
        if wanted and wanted != here:
            differing = [
                fqn or "root" for fqn in {**wanted, **here} if wanted.get(fqn) != here.get(fqn)
            ]
            raise ValueError(
                f"plan: it was made for a model with {sum(wanted.values())} parameters, but "
                f"this one has {self.workload.numel}; units {', '.join(differing[:3])} differ. "
                "Give the model of the plan, or plan again."
            )
