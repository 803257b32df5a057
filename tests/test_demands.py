"""Demands against exhaustive search over whole plans of small clusters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
import pytest

from shardhet.planner import Constraints, DeviceLimits, PlanError, baselines, solve
from shardhet.planner.candidates.recompute import policies
from shardhet.planner.forms import BatchRounds
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.pricing.cost import CostModel
from shardhet.pricing.hosts import DEVICE_LINK_BYTES_PER_S, HostPart
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.schedule import StepForm
from shardhet.records.workload import Workload
from tests.planning_problems import optimizer_seconds
from tests.selection import one_in
from tests.test_planner import random_case

WORKLOAD = Workload.transformer(
    num_layers=2, width=32, num_heads=2, seq_len=16, vocab_size=64, hidden_width=64
)
MAX_MICROBATCH = 2
ONE_ROUND = StepForm()
ROUNDING = 2e-2  # rows are large beside so small a state


@dataclass(frozen=True)
class Option:
    """What one device may do."""

    batch: int
    size: int
    rank: RankPlan  # what it computes, and what is done with units
    turns_s: tuple[float, ...]  # compute of a round, by class of turns, forward and backward
    used_bytes: int  # besides what it stores


class Storing(NamedTuple):
    """A way to store a part of the state."""

    room: float  # elements, at most
    per_numel_s: float  # of the optimizer


class Case:
    """A cluster of three devices; memory is about what the state needs."""

    def __init__(
        self,
        seed: int,
        *,
        roomy: float,
        form: StepForm = ONE_ROUND,
        on_host: bool = False,
        optimizer_on_host: bool = False,
    ) -> None:
        """With ``optimizer_on_host``, hosts are about as fast as devices, and links slow."""
        rng = np.random.default_rng(seed)
        cluster, profile, _ = random_case(seed)
        overhead_s = float(np.random.default_rng([seed, 1]).uniform(0, 0.01))
        profile = replace(profile, unit_overhead_s=overhead_s)
        num_turns = 2 * form.num_rounds * sum(bool(unit.fqn) for unit in WORKLOAD.units)
        self.overhead_s = num_turns * overhead_s
        capacity = {
            kind: int(16 * WORKLOAD.numel * roomy * rng.uniform(0.4, 1)) for kind in "ABC"
        }
        devices = tuple(
            DeviceSpec(kind=device.kind, memory_capacity_bytes=capacity[str(device.kind)])
            for device in cluster.devices[:3]
        )
        self.cluster = Cluster(nodes=(Node(host="a", devices=devices),))
        self.hosts: list[tuple[HostPart, float]] = []  # and bytes in equal parts
        if optimizer_on_host:
            self.cluster = on_hosts(np.random.default_rng([seed, 2]), devices)
            self.hosts = [
                (HostPart.of(node, number), (node.host_memory_bytes or inf) / number)
                for node in self.cluster.nodes
                for number in [len(node.devices)] * len(node.devices)
            ]
        self.scenario = Scenario(self.cluster, WORKLOAD, profile)
        self.model = CostModel(self.scenario).in_form(form)
        self.batch = int(rng.integers(2, 4))
        self.choices = policies(
            self.model,
            1 if optimizer_on_host else DEFAULT_EFFORT.recompute_steps,
            on_host=on_host,
            optimizer_on_host=optimizer_on_host,
        )
        self.turns = self.model.turns(
            unevenness=1.0, recomputed=self.model.policies(self.choices)
        )
        # By class and phase: number of rounds and communication, of rounds that are alike.
        self.rounds = [
            [(each.num_rounds, each.comm_s[phase]) for each in turns.rounds]
            for turns in self.turns.classes
            for phase in (0, 1)
        ]
        profiles = [profile.device(device.kind) for device in devices]
        self.per_numel_s = [each.optimizer_seconds_per_element for each in profiles]
        self.overlap_slowdowns = [each.overlap_slowdown for each in profiles]

    @cache  # noqa: B019 -- a case lives as long as its test
    def options(self, position: int, batch: int) -> list[Option]:
        """Every microbatch size, and recomputation, for so many samples."""
        if not batch:
            idle = {each.optimizer_on_host: each for each in reversed(self.choices)}
            return [self.option(position, 0, 1, each) for each in idle.values()]
        sizes = range(1, min(batch, MAX_MICROBATCH) + 1)
        return [self.option(position, batch, m, c) for m in sizes for c in self.choices]

    def option(self, position: int, batch: int, size: int, treated: RankPlan) -> Option:
        whole, rest = divmod(batch, size)
        rank = replace(
            treated,
            microbatch_sizes=(size,) * whole + ((rest,) if rest else ()),
            device=self.cluster.devices[position],
        )
        turns_s = []
        for each in self.turns.classes:
            forward_s, backward_s = self.model.unit_seconds(
                rank.device.kind, each.kind.name, rank.microbatch_sizes
            )
            backward_s += forward_s if rank.recomputes(each.unit_fqn) else 0.0
            both_s = self.model.beside_copies_s(
                rank,
                each.unit_fqn,
                rank.microbatch_sizes,
                (forward_s, backward_s),
                DEVICE_LINK_BYTES_PER_S,
            )
            turns_s += [each.num_units * seconds for seconds in both_s]
        used = self.model.memory(rank, 0).total_bytes
        return Option(batch, size, rank, tuple(turns_s), used)

    def stores(self, position: int, option: Option, budget_bytes: float) -> list[Storing]:
        """How much of the state a device may store, and how fast its optimizer is then."""
        if not option.rank.optimizer_on_host:
            own, per_numel = self.model.lines_of(option.rank)
            room = float(((budget_bytes - own) / per_numel).min())
            return [Storing(room, self.per_numel_s[position])]
        host, host_bytes = self.hosts[position]
        low, high = 0, 4 * WORKLOAD.numel
        while high - low > 1:
            middle = (low + high) // 2
            memory = self.model.memory(option.rank, middle)
            fits = memory.total_bytes <= budget_bytes and memory.host_bytes <= host_bytes
            low, high = (middle, high) if fits else (low, middle)
        to_device_s = 4 / host.copied_bytes_per_s
        reductions = self.reductions
        update_s, to_host_s = 28 / host.bytes_per_s, to_device_s * reductions
        unit = max(kind.numel for kind in WORKLOAD.kinds) / WORKLOAD.numel
        number = self.model.num_rounds
        forward_s, backward_s = (number * sum(option.turns_s[phase::2]) for phase in (0, 1))
        hidden = min(
            forward_s / to_device_s / (1 - unit),
            backward_s / to_host_s / (1 - unit / reductions),
        )
        of_units_s = unit * to_device_s + unit * to_host_s / reductions
        return [
            Storing(min(low, hidden), update_s + of_units_s),
            Storing(low, update_s + to_device_s + to_host_s),
        ]

    @property
    def reductions(self) -> int:
        """How often gradients cross to or from the host in a step."""
        number = self.model.num_rounds
        return 2 * number - 1 if self.model.reduce_each_round else 1


def on_hosts(rng: np.random.Generator, devices: tuple[DeviceSpec, ...]) -> Cluster:
    """The devices on one host, or on one each; how much memory hosts have is said of some."""
    each = [devices] if rng.random() < 0.3 else [(device,) for device in devices]
    nodes = []
    for i, here in enumerate(each):
        bandwidth = float(np.exp(rng.uniform(np.log(1e5), np.log(1e7))))
        memory = int(16 * WORKLOAD.numel * rng.uniform(0.2, 1)) if rng.random() < 0.5 else None
        nodes.append(
            Node(
                host=str(i),
                devices=here,
                link=Link(latency_s=0.0, bandwidth_bytes_per_s=bandwidth),
                host_bytes_per_s=28 / float(rng.uniform(1e-7, 2e-6)),
                host_memory_bytes=memory,
            )
        )
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    return Cluster(nodes=tuple(nodes), between_nodes=link)


def all_plans(
    case: Case,
    batch: int,
    demands: Constraints,
    *,
    part: float = 1.0,
) -> Iterator[float]:
    """The step of every plan of one form that fits, with its best shares; ``batch`` is of a
    round.

    Every split of the batch, microbatch size and recomputation; ``part`` of each budget may
    be used.
    """
    size = case.cluster.world_size
    for batches in product(range(batch + 1), repeat=size):
        if sum(batches) != batch:
            continue
        options = [
            [
                option
                for option in case.options(i, b)
                if option.used_bytes <= part * demands.budget_bytes(case.cluster, i)
            ]
            for i, b in enumerate(batches)
        ]
        for taken in product(*options):
            seconds = step_time_s(case, taken, demands, part)
            if seconds is not None:
                yield seconds


def step_time_s(
    case: Case, taken: Sequence[Option], demands: Constraints, part: float
) -> float | None:
    """The step with the best shares; None where it breaks a demand or a budget."""
    stores, per_numel_s = [], case.per_numel_s
    rest_numel, fixed_s = float(WORKLOAD.numel), 0.0
    for i, option in enumerate(taken):
        limits = demands.limits.get(i, DeviceLimits())
        if limits.rank_batch_size not in (None, option.batch):
            return None
        share = limits.max_state_share
        cap = inf if share is None else share * WORKLOAD.numel
        stored = case.stores(i, option, part * demands.budget_bytes(case.cluster, i))
        stored = [each._replace(room=min(cap, each.room)) for each in stored]
        fixed = demands.state_share(i)
        if fixed is not None:
            if option.rank.optimizer_on_host or stored[0].room < fixed * WORKLOAD.numel:
                return None
            fixed_s = max(fixed_s, fixed * WORKLOAD.numel * per_numel_s[i])
            rest_numel -= fixed * WORKLOAD.numel
            stored = [stored[0]._replace(room=0.0)]
        stores.append(stored)
    for members in demands.equal:
        alike = {replace(taken[i].rank, device=DeviceSpec()) for i in members}
        if len(alike) > 1:
            return None
        for way in range(len(stores[members[0]])):
            of_way = [stores[i][way] for i in members]
            slowest = max(each.per_numel_s for each in of_way)
            for i in members:
                stores[i][way] = Storing(min(each.room for each in of_way), slowest)
    seconds = [
        optimizer_seconds(
            [s.room for s in each], [(s.per_numel_s, 0.0) for s in each], rest_numel
        )
        for each in product(*stores)
        if all(
            len({stores[i].index(each[i]) for i in members}) == 1 for members in demands.equal
        )
    ]
    possible = [each for each in seconds if each is not None]
    if not possible:
        return None
    optimizer_s = max(min(possible), fixed_s)
    turns_s = 0.0
    for j, rounds in enumerate(case.rounds):
        for number, comm_s in rounds:
            ends_s = [
                number * option.turns_s[j] + excess * comm_s if option.turns_s[j] else 0.0
                for option, excess in zip(taken, case.overlap_slowdowns, strict=True)
            ]
            turns_s += max(comm_s, *ends_s)
    return turns_s + case.turns.exposed_comm_s + optimizer_s + case.overhead_s


def demands_of(seed: int) -> Constraints:
    """Of several kinds, by turns; two devices that must be equal in most cases."""
    limits = {
        0: {},
        1: {2: DeviceLimits(max_state_share=0.0)},
        2: {1: DeviceLimits(rank_batch_size=1)},
        3: {0: DeviceLimits(max_state_share=0.25)},
        4: {1: DeviceLimits(state_share=0.4)},
    }[seed % 5]
    equal = ((0, 1), (1, 2), ())[seed % 3]
    return Constraints(
        limits=limits, equal=(equal,) if equal else (), max_microbatch_size=MAX_MICROBATCH
    )


def plans_of_all_forms(
    seed: int, roomy: float, demands: Constraints, batch: int, *, part: float = 1.0
) -> Iterator[float]:
    """The step of every plan with equal rounds."""
    for number in range(1, batch + 1):
        rounds = BatchRounds(number, batch)
        of_round = demands.of_round(rounds, 3)
        if rounds.are_equal and of_round is not None:
            for form in rounds.forms():
                case = Case(
                    seed,
                    roomy=roomy,
                    form=form,
                    on_host=demands.may_keep_inputs_on_host,
                    optimizer_on_host=demands.may_keep_optimizer_on_host,
                )
                yield from all_plans(case, rounds.round_size, of_round, part=part)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", one_in(3, [seed for seed in range(16) if seed != 11]))
def test_plans_under_demands_are_as_fast_as_the_best_of_all(seed: int) -> None:
    """In one round and in as many as there are samples; memory binds in most cases.

    In a third of them inputs of units may be on the host.
    """
    roomy, demands = 1.3 + 0.4 * (seed % 4), demands_of(seed)
    demands = replace(demands, may_keep_inputs_on_host=seed % 3 == 2)
    case = Case(seed, roomy=roomy)
    plans = [*plans_of_all_forms(seed, roomy, demands, case.batch)]
    try:
        solution = solve(case.scenario, global_batch_size=case.batch, constraints=demands)
    except PlanError:
        # What fits only before it is rounded to rows may be refused.
        assert not [*plans_of_all_forms(seed, roomy, demands, case.batch, part=0.95)]
        return
    best_s = min(plans, default=inf)  # perhaps only rounds of which the last is smaller fit
    assert solution.lower_bound_s <= best_s * (1 + 1e-9)
    assert solution.predicted.step_time_s <= best_s * (1 + ROUNDING)
    check_demands(solution.plan, demands)


@pytest.mark.parametrize("seed", one_in(24, [seed for seed in range(24) if seed != 11]))
def test_optimizers_go_to_hosts_as_in_the_best_of_all_plans(seed: int) -> None:
    """With three devices on one host, or on one each; of plans in which all are on hosts or
    none are, too, so that none of these is faster.
    """
    roomy = 0.7 + 0.3 * (seed % 4)
    demands = replace(demands_of(seed), may_keep_optimizer_on_host=True)
    case = Case(seed, roomy=roomy, optimizer_on_host=True)
    plans = [*plans_of_all_forms(seed, roomy, demands, case.batch)]
    effort = Effort(recompute_steps=1)
    try:
        solution = solve(
            case.scenario, global_batch_size=case.batch, constraints=demands, effort=effort
        )
    except PlanError:
        assert not [*plans_of_all_forms(seed, roomy, demands, case.batch, part=0.95)]
        return
    best_s = min(plans, default=inf)
    assert solution.lower_bound_s <= best_s * (1 + 1e-9)
    assert solution.predicted.step_time_s <= best_s * (1 + ROUNDING)
    assert all(rank.fits for rank in solution.predicted.ranks)
    check_demands(solution.plan, demands)


def check_demands(plan: Plan, demands: Constraints) -> None:
    for members in demands.equal:
        ranks = [plan.ranks[i] for i in members]
        assert len({(r.microbatch_sizes, r.recomputed_units) for r in ranks}) == 1
        assert len({round(r.state_share, 12) for r in ranks}) == 1
    for position, limits in demands.limits.items():
        rank = plan.ranks[position]
        computed = rank.rank_batch_size * plan.num_rounds
        assert limits.rank_batch_size in (None, computed)
        if limits.max_state_share is not None:
            assert rank.state_share <= limits.max_state_share + 1e-9
    for position, rank in enumerate(plan.ranks):
        share = demands.state_share(position)
        assert share is None or rank.state_share == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize(
    "shares", [(0.5, 0.3, 0.2), (0.5, 0.5 - 1e-7, None), (0.0, 0.7, None), (None, 0.0, 1.0)]
)
def test_exact_shares_are_kept(shares: Sequence[float | None]) -> None:
    case = Case(0, roomy=3.0)
    demands = Constraints(
        limits={i: DeviceLimits(state_share=s) for i, s in enumerate(shares) if s is not None}
    )
    solution = solve(case.scenario, global_batch_size=case.batch, constraints=demands)
    for rank, share in zip(solution.plan.ranks, shares, strict=True):
        assert share is None or rank.state_share == pytest.approx(share, abs=2e-7)
    even = baselines.even(case.scenario, global_batch_size=case.batch, constraints=demands)
    assert [r.state_share for r in even.plan.ranks] == pytest.approx([1 / len(shares)] * 3)
