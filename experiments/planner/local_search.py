"""Does a local search over everything that a plan can express beat the planner?

    OMP_NUM_THREADS=1 python -m experiments.planner.local_search
    OMP_NUM_THREADS=1 python -m experiments.planner.local_search --seeds 0 6 --only-show

What is in local_search.csv already is not run again; remove the file to begin anew.

Each case is a described cluster, a model and a batch; in every second one the curves of all
devices are made uneven, so that some microbatches are slower than larger ones.  The local
search starts at the planner's plan and shares no code with the planner's search: it moves
samples between devices, cuts batches anew, changes what is recomputed and whether units stay
gathered, and spreads the state over the memory that is left.  Half of its steps stay in the
class of plans that ``shardhet plan`` names; the others may cut a batch in any way and recompute
any units.  It also asks of every device that recomputes whether it had to.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.common import by_seed
from shardhet.apps.plan import DOOR
from shardhet.apps.planning.inputs import load, read_request
from shardhet.config.planning import PlannerConf
from shardhet.planner import PlanError, solve
from shardhet.planner.candidates.recompute import recompute_choices
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.profiles import Timing

HERE = Path(__file__).parent
CLUSTERS = ("rtx4090_2x3090", "l4_a6000_p40_p100", "h100_a100_20")
MODELS = ("gpt_125m", "bert_large", "llama_1b", "vit_g", "gpt_1_3b", "gpt_2_7b", "llama_3b")
BATCHES = (8, 24, 64, 128)
NUM_CASES, NUM_STEPS = 61, 1500  # of cases one has no plan
RESTART_STEPS = 250  # without a better plan, the walk returns to the best one
UNEVENNESS = 0.15  # of a curve's points
SAME = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case; gains are parts of the planner's predicted step."""

    case: int
    cluster: str
    model: str
    batch: int
    is_uneven: bool
    step_s: float
    stated_gap: float
    gain_inside: float  # of the best plan that the local search found in the class
    gain_outside: float
    reshards: bool
    num_recomputing: int  # devices
    num_needless: int  # that could keep their graphs, and the step would be as fast


class Walk:
    """A local search for one case."""

    def __init__(self, setting: Setting, start: Plan, rng: np.random.Generator) -> None:
        self.rng = rng
        self.model = CostModel(setting)
        self.choices = recompute_choices(self.model, 4)
        self.fqns = [unit.fqn for unit in self.model.visited_units]
        self.start = start
        self.start_s = self.model.predict(start).step_time_s

    def run(self, num_steps: int, *, is_inside: bool) -> float:
        """The least step that it meets."""
        plan, seconds = self.start, self.start_s
        best, best_s, since = plan, seconds, 0
        for _ in range(num_steps):
            moved = self.moved(plan, is_inside=is_inside)
            fitted = None if moved is None else self.fitted(moved)
            since += 1
            if since > RESTART_STEPS:
                plan, seconds, since = best, best_s, 0
            if fitted is None:
                continue
            moved_s = self.model.predict(fitted).step_time_s
            # Slightly slower plans are walked through, too.
            if moved_s <= seconds * (1 + 0.02 * self.rng.random() ** 4):
                plan, seconds = fitted, moved_s
            if moved_s < best_s * (1 - 1e-9):
                best, best_s, since = fitted, moved_s, 0
        return best_s

    def moved(self, plan: Plan, *, is_inside: bool) -> Plan | None:
        """A neighbour of the plan; its shares are still those of the plan."""
        ranks = list(plan.ranks)
        i, j = (int(k) for k in self.rng.integers(len(ranks), size=2))
        move = int(self.rng.integers(5))
        if move == 0:
            return replace(plan, reshard_after_forward=not plan.reshard_after_forward)
        if move == 1:
            ranks[i] = replace(ranks[i], recomputed_units=self.recomputed(is_inside))
        elif move == 2:
            ranks[i] = self.cut(ranks[i], ranks[i].rank_batch_size, is_inside)
        else:
            number = min(int(self.rng.integers(1, 5)), ranks[i].rank_batch_size)
            if i == j or not number:
                return None
            ranks[i] = self.cut(ranks[i], ranks[i].rank_batch_size - number, is_inside)
            ranks[j] = self.cut(ranks[j], ranks[j].rank_batch_size + number, is_inside)
        return replace(plan, ranks=tuple(ranks))

    def recomputed(self, is_inside: bool) -> tuple[str, ...]:
        if is_inside:
            return self.choices[int(self.rng.integers(len(self.choices)))]
        chosen = self.rng.random(len(self.fqns)) < self.rng.random()
        return tuple(fqn for fqn, is_chosen in zip(self.fqns, chosen, strict=True) if is_chosen)

    def cut(self, rank: RankPlan, batch: int, is_inside: bool) -> RankPlan:
        """The rank with another batch: alike but the last, or in any sizes."""
        if not batch:
            return replace(rank, microbatch_sizes=(), recomputed_units=())
        before = max(rank.microbatch_sizes, default=4)
        size = int(np.clip(before + self.rng.integers(-2, 3), 1, min(batch, 32)))
        if is_inside or self.rng.random() < 0.5:
            whole, rest = divmod(batch, size)
            sizes = [size] * whole + [rest] * bool(rest)
        else:
            sizes = []
            while batch:
                sizes.append(min(batch, int(self.rng.integers(1, size + 1))))
                batch -= sizes[-1]
        return replace(rank, microbatch_sizes=tuple(sizes))

    def fitted(self, plan: Plan) -> Plan | None:
        """The plan with its state spread evenly over what memory is left; None if too full."""
        model = replace(self.model, reshard_after_forward=plan.reshard_after_forward)
        devices, numel = model.cluster.devices, model.workload.numel
        lines = [
            model.lines_of(replace(rank, device=devices[i]))
            for i, rank in enumerate(plan.ranks)
        ]
        fits = [
            ((model.cluster.memory_budget_bytes(i) - own) / per_numel).min()
            for i, (own, per_numel) in enumerate(lines)
        ]
        room = np.array(fits) - 2 * max(kind.max_row_numel for kind in model.workload.kinds)
        if room.min() < 0 or room.sum() < numel:
            return None
        shares = spread(room / numel)
        ranks = (
            replace(rank, state_share=float(share))
            for rank, share in zip(plan.ranks, shares, strict=True)
        )
        found = replace(plan, ranks=tuple(ranks))
        return found if all(rank.fits for rank in model.predict(found).ranks) else None

    def num_needless(self) -> int:
        """Devices that recompute although keeping fits and the step is as fast."""
        number = 0
        for i, rank in enumerate(self.start.ranks):
            if not rank.recomputed_units:
                continue
            ranks = list(self.start.ranks)
            ranks[i] = replace(rank, recomputed_units=())
            keeping = self.fitted(replace(self.start, ranks=tuple(ranks)))
            if keeping is not None:
                number += self.model.predict(keeping).step_time_s <= self.start_s * SAME
        return number


def spread(room: np.ndarray) -> np.ndarray:
    """Shares as even as the room allows; they sum to 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(room, middle).sum() < 1 else (low, middle)
    shares = np.minimum(room, high)
    return shares / shares.sum()


def uneven(setting: Setting, rng: np.random.Generator) -> Setting:
    """The setting with curves of which some sizes are slower than their neighbours."""

    def scaled(timing: Timing, factor: float) -> Timing:
        return Timing.single(timing.mean_s * factor)

    devices = []
    for device in setting.profile.devices:
        units = []
        for unit in device.units:
            known = unit.points[-1].microbatch_size
            points = []
            for size in range(1, known + 1):
                factor = 1 + UNEVENNESS * rng.random()
                like = unit.points[0]
                points.append(
                    replace(
                        like,
                        microbatch_size=size,
                        forward=scaled(Timing.single(unit.forward_s.at(size)), factor),
                        backward=scaled(Timing.single(unit.backward_s.at(size)), factor),
                        peak_bytes=None,
                    )
                )
            units.append(replace(unit, points=tuple(points)))
        devices.append(replace(device, units=tuple(units)))
    return replace(setting, profile=replace(setting.profile, devices=tuple(devices)))


def judge(case: int) -> Result | None:
    """One case; None where there is no plan."""
    rng = np.random.default_rng([16, case])
    cluster, model = str(rng.choice(CLUSTERS)), str(rng.choice(MODELS))
    batch, is_uneven = int(rng.choice(BATCHES)), bool(case % 2)
    request = read_request(DOOR, [f"cluster={cluster}", f"model={model}"])
    assert request is not None
    setting = load(DOOR, request, PlannerConf)[1].setting
    if is_uneven:
        setting = uneven(setting, rng)
    try:
        solution = solve(setting, global_batch_size=batch)
    except PlanError:
        return None
    walk = Walk(setting, solution.plan, rng)
    gains = {
        is_inside: 1 - walk.run(NUM_STEPS, is_inside=is_inside) / walk.start_s
        for is_inside in (True, False)
    }
    return Result(
        case=case,
        cluster=cluster,
        model=model,
        batch=batch,
        is_uneven=is_uneven,
        step_s=walk.start_s,
        stated_gap=solution.relative_gap,
        gain_inside=gains[True],
        gain_outside=gains[False],
        reshards=solution.plan.reshard_after_forward,
        num_recomputing=sum(bool(rank.recomputed_units) for rank in solution.plan.ranks),
        num_needless=walk.num_needless(),
    )


def told(found: Result) -> str:
    """One case, in a line."""
    return (
        f"{found.case} {found.cluster} {found.model} {found.batch}: "
        f"inside {found.gain_inside:.3%}, outside {found.gain_outside:.3%}, "
        f"needless {found.num_needless} of {found.num_recomputing}"
    )


def as_markdown(results: list[Result]) -> str:
    """The worst."""
    return (
        f"{len(results)} cases; at most {max(each.gain_inside for each in results):.3%} faster "
        f"inside the class, {max(each.gain_outside for each in results):.3%} outside; "
        f"{sum(not each.reshards for each in results)} plans keep units gathered; "
        f"{sum(each.num_needless for each in results)} devices recompute without need"
    )


if __name__ == "__main__":
    cases, file = range(NUM_CASES), "local_search.csv"
    by_seed.run(
        HERE, Result, judge, as_markdown, cases, doc=__doc__, told=told, file=file, key="case"
    )
