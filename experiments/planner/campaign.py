"""Whole plans against exhaustive search, on random and on adversarial small clusters.

    python -m experiments.planner.campaign                           # goes on with campaign.csv
    python -m experiments.planner.campaign --seeds 0 4 --only-show   # writes nothing

Two or three devices, a model of three units, batches of up to six.  Every instance draws from:
curves that are noisy, have plateaus or fall; collectives that are slower with uneven shares;
compute that loses more than a second per second of collectives (excess > 1); ranks that may
not compute; exact shares; even shares; sets of equal devices; memory from ample to too little.

The exhaustive search goes through all batches, microbatches that are alike but the last, and
recomputation, with units resharded or kept, and for each through three ways to share the state;
every plan is priced by ``CostModel.predict``, so by rows, and must fit.  It shares nothing with
the planner but the prices.  A bound above its best plan is a fault.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from experiments.common import by_seed
from shardhet.planner import Constraints, DeviceLimits, PlanError, solve
from shardhet.planner.candidates.recompute import recompute_choices
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.profiles import Profile
from shardhet.records.workload import Workload
from tests.made_up import collectives, device_profile

HERE = Path(__file__).parent
WORKLOAD = Workload.transformer(
    num_layers=1, width=64, num_heads=4, seq_len=32, vocab_size=128, hidden_width=160
)
STATE_BYTES = 16 * WORKLOAD.numel
SIZES = (1, 2, 3, 4, 6)
CURVES = ("straight", "noisy", "plateaus", "falling")
DEMANDS = ("none", "idle", "exact", "all_exact", "even", "equal")
HOPELESS = 1.05  # a plan this much slower than the best so far is not shared out in other ways


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One instance."""

    seed: int
    devices: int
    batch: int
    curve: str
    demand: str
    planned_s: float  # 0: the planner finds no plan
    bound_s: float
    best_s: float  # of the exhaustive search; 0: it finds no plan
    num_tried: int
    cpu_s: float  # of the planner

    @property
    def is_wrong(self) -> bool:
        """Whether the bound is above a plan."""
        least = min((s for s in (self.planned_s, self.best_s) if s), default=np.inf)
        return self.bound_s > least * (1 + 1e-9)


def curve_of(rng: np.random.Generator, curve: str) -> dict[int, tuple[float, float]]:
    """Seconds of forward and backward by size."""
    speed, start = float(np.exp(rng.normal(0, 0.7))), float(rng.uniform(0, 0.6))
    seconds = {}
    for size in SIZES:
        forward_s = speed * (size + start)
        if curve == "noisy":
            forward_s *= float(np.exp(rng.normal(0, 0.15)))
        elif curve == "plateaus":
            forward_s = speed * (4 * -(-size // 4) + start)
        elif curve == "falling" and size in (3, 6):
            forward_s *= 0.5
        seconds[size] = (forward_s, forward_s * float(rng.uniform(1.5, 2.5)))
    return seconds


def instance(seed: int) -> tuple[Setting, int, Constraints, str, str]:
    """The setting, the batch, the demands, and the names of curve and demand."""
    rng = np.random.default_rng(seed)
    curve, demand = CURVES[seed % 4], DEMANDS[int(rng.integers(len(DEMANDS)))]
    number = 3 if rng.uniform() < 0.25 else 2
    kinds = ["A", "B", "C"][:number] if rng.uniform() < 0.7 else ["A"] * number
    roomy = float(rng.uniform(0.8, 6))
    profiles = []
    for kind in dict.fromkeys(kinds):
        seconds = curve_of(rng, curve)
        profiles.append(
            device_profile(
                kind,
                lambda size, seconds=seconds: seconds[size],
                sizes=SIZES,
                optimizer_seconds_per_element=float(rng.choice([0.0, 1e-6, 3e-5])),
                overlap_excess=float(rng.choice([0.0, 0.4, 1.7])),
            )
        )
    pace = float(np.exp(rng.normal(-12, 2)))
    links = collectives(
        (10**4, 10**5),
        gather_s_per_byte=pace,
        reduce_s_per_byte=2 * pace,
        gather_unevenness_weight=float(rng.choice([0.0, 0.0, 1.0])),
        reduce_unevenness_weight=float(rng.choice([0.0, 0.0, 0.5])),
    )
    devices = tuple(
        DeviceSpec(
            kind=kind, memory_capacity_bytes=int(roomy * STATE_BYTES * rng.uniform(0.5, 1))
        )
        for kind in kinds
    )
    cluster = Cluster(nodes=(Node(host="a", devices=devices),))
    setting = Setting(cluster, WORKLOAD, Profile(devices=tuple(profiles), collectives=links))
    batch = int(rng.integers(2, 7 if number == 2 else 4))
    return setting, batch, demands_of(rng, demand, number), curve, demand


def demands_of(rng: np.random.Generator, demand: str, number: int) -> Constraints:
    """The demands by this name on so many devices."""
    if demand == "idle":
        return Constraints(limits={number - 1: DeviceLimits(rank_batch_size=0)})
    if demand == "exact":
        return Constraints(limits={0: DeviceLimits(state_share=float(rng.uniform(0, 0.7)))})
    if demand == "all_exact":
        shares = rng.dirichlet(np.ones(number)).tolist()
        return Constraints(
            limits={i: DeviceLimits(state_share=s) for i, s in enumerate(shares)}
        )
    if demand == "even":
        return Constraints(has_even_state=True)
    return Constraints(equal=((0, 1),)) if demand == "equal" else Constraints()


class Exhaustive:
    """The best of all plans of an instance, each priced as it would run."""

    def __init__(self, setting: Setting, batch: int, demands: Constraints) -> None:
        self.setting, self.batch, self.constraints = setting, batch, demands
        self.number = setting.cluster.world_size
        self.best_s = np.inf
        self.num_tried = 0
        self.budgets = [demands.budget_bytes(setting.cluster, i) for i in range(self.number)]
        for reshards in (True, False):
            self.model = CostModel(setting, reshards)
            choices = recompute_choices(self.model, 1)
            for ranks in product(*(self.ranks_of(i, choices) for i in range(self.number))):
                if sum(rank.rank_batch_size for rank in ranks) == batch and self.is_equal(
                    ranks
                ):
                    self.share_out(ranks)

    def ranks_of(self, i: int, choices: Sequence[tuple[str, ...]]) -> list[RankPlan]:
        """What the device at ``i`` may compute."""
        limits = self.constraints.limits.get(i)
        stated = None if limits is None else limits.rank_batch_size
        found = []
        for batch in range(self.batch + 1) if stated is None else [stated]:
            for size in range(1, batch + 1) if batch else [1]:
                whole, rest = divmod(batch, size)
                sizes = (size,) * whole + ((rest,) if rest else ())
                found += [
                    RankPlan(
                        device=self.setting.cluster.devices[i],
                        microbatch_sizes=sizes,
                        state_share=0.0,
                        recomputed_units=choice,
                    )
                    for choice in (choices if batch else [()])
                ]
        return found

    def is_equal(self, ranks: Sequence[RankPlan]) -> bool:
        """Whether sets of equal devices compute the same."""
        return all(
            len({(ranks[i].microbatch_sizes, ranks[i].recomputed_units) for i in each}) == 1
            for each in self.constraints.equal
        )

    def share_out(self, ranks: Sequence[RankPlan]) -> None:
        """Try ways to share the state out."""
        for shares in self.shares_of(ranks):
            plan = Plan(
                ranks=tuple(
                    RankPlan(
                        device=rank.device,
                        microbatch_sizes=rank.microbatch_sizes,
                        state_share=share,
                        recomputed_units=rank.recomputed_units,
                    )
                    for rank, share in zip(ranks, shares, strict=True)
                ),
                reshard_after_forward=self.model.reshard_after_forward,
            )
            predicted = self.model.predict(plan).within(self.budgets)
            self.num_tried += 1
            if all(rank.fits for rank in predicted.ranks):
                self.best_s = min(self.best_s, predicted.step_time_s)
            if predicted.step_time_s > HOPELESS * self.best_s:
                return

    def shares_of(self, ranks: Sequence[RankPlan]) -> Iterator[list[float]]:
        """For the fastest optimizer, as even as there is room, and in proportion to room."""
        if self.constraints.has_even_state:
            yield [1 / self.number] * self.number
            return
        fixed = self.constraints.state_shares(self.number)
        lines = [self.model.lines_of(rank) for rank in ranks]
        fits = [
            max(0.0, float(((budget - own) / per_numel).min()))
            for (own, per_numel), budget in zip(lines, self.budgets, strict=True)
        ]
        room = np.array(fits) / WORKLOAD.numel
        for each in self.constraints.equal:
            room[list(each)] = room[list(each)].min()
        room[list(fixed)] = 0.0
        rest = 1 - sum(fixed.values())
        if room.sum() < rest * (1 - 1e-9):
            return
        seconds = np.array(
            [
                self.setting.profile.device(rank.device.kind).optimizer_seconds_per_element
                for rank in ranks
            ]
        )
        for each in self.constraints.equal:
            seconds[list(each)] = seconds[list(each)].max()
        for rate in (1 / (seconds + 1e-12), np.ones(self.number), room):
            low, high = 0.0, 1e12
            for _ in range(200):
                middle = (low + high) / 2
                filled = np.minimum(room, middle * rate).sum()
                low, high = (middle, high) if filled < rest else (low, middle)
            shares = np.minimum(room, high * rate)
            if rest > 0:
                shares *= rest / shares.sum()
            yield [fixed.get(i, float(share)) for i, share in enumerate(shares)]


def planned(setting: Setting, batch: int, demands: Constraints) -> tuple[float, float, float]:
    """The planner's step and bound, and the seconds of its processor."""
    started_s = time.process_time()
    try:
        solution = solve(setting, global_batch_size=batch, constraints=demands)
    except PlanError as error:
        planned_s, bound_s = 0.0, error.lower_bound_s
    else:
        planned_s, bound_s = solution.predicted.step_time_s, solution.lower_bound_s
    return planned_s, bound_s, time.process_time() - started_s


def row_of(seed: int) -> Row:
    """What planner and exhaustive search say of one instance."""
    setting, batch, demands, curve, demand = instance(seed)
    planned_s, bound_s, spent_s = planned(setting, batch, demands)
    tried = Exhaustive(setting, batch, demands)
    return Row(
        seed=seed,
        devices=setting.cluster.world_size,
        batch=batch,
        curve=curve,
        demand=demand,
        planned_s=planned_s,
        bound_s=bound_s,
        best_s=tried.best_s if np.isfinite(tried.best_s) else 0.0,
        num_tried=tried.num_tried,
        cpu_s=spent_s,
    )


def as_markdown(rows: list[Row]) -> str:
    """What went wrong, and how much slower the planner's plans are."""
    both = [row for row in rows if row.planned_s and row.best_s]
    ratios = np.array([row.planned_s / row.best_s - 1 for row in both])
    return (
        f"{len(rows)} instances, {len(both)} planned by both; bounds above a plan: "
        f"{sum(row.is_wrong for row in rows)}; planner slower by p50 {np.median(ratios):.1e}, "
        f"p99 {np.quantile(ratios, 0.99):.1e}, at most {ratios.max():.1e}; found by the "
        f"exhaustive search only: {sum(not r.planned_s and r.best_s > 0 for r in rows)}"
    )


if __name__ == "__main__":
    by_seed.run(HERE, Row, row_of, as_markdown, range(3000), doc=__doc__, file="campaign.csv")
