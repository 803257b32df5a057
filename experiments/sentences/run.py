"""Random small clusters: is what the planner says of its plan true of all plans?

    python -m experiments.sentences.run                    # all, results.csv and the README
                                                           # (those in results.csv are kept)
    python -m experiments.sentences.run --seeds 0 1150     # a part, beside another process
    python -m experiments.sentences.run --seeds 100 200 --only-show    # writes nothing

Two to four devices of one to three kinds, one to four blocks, batches of up to 40 of which
microbatches of one, two or four samples were measured; memory from too little to ample; rounds
as many as the planner looks at, or few.  From seed 2,000 on, two devices and batches of 33 to
72, so that memory allows microbatches far beyond the measured ones.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.common import by_seed
from experiments.common.results import markdown_table
from experiments.sentences.exhaustive import Asked, Combination, Exhaustive, TooManyError
from shardhet.planner import Constraints, PlanError, PlanSolution, solve
from shardhet.planner.idle import active_positions
from shardhet.planner.preference import FULL
from shardhet.planner.problem.constraints import TOLERANCE
from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
from shardhet.pricing.step_cost import StepCost
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.plan import Plan
from shardhet.records.profiles import Profile
from shardhet.records.schedule import StepForm
from shardhet.records.workload import Workload
from tests.made_up import collectives, device_profile

HERE = Path(__file__).parent
NUM_SMALL, NUM_CASES = 2000, 2300
ROUNDING = 1e-9
MOST_REALIZED = 300  # combinations that are priced with rows, for one sentence
CURVES = ("straight", "noisy", "plateaus", "falling")
SENTENCES = ("bound", "alike", "full", "one round", "recomputed", "none fits")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case."""

    seed: int
    devices: int
    batch: int
    max_rounds: int  # 0: as many as are looked at
    curve: str
    planned_s: float  # 0: no plan
    fastest_s: float
    bound_s: float
    rounds: int
    largest_microbatch: int
    wrong: str  # sentences of SENTENCES that are false, and by how much
    planner_s: float  # of CPU
    cpu_s: float  # with the search for plans that refute it


def draw(seed: int) -> tuple[Asked, str]:
    """A case, and the name of its curves."""
    rng = np.random.default_rng(seed)
    curve = CURVES[int(rng.integers(len(CURVES)))]
    number = 2 if seed >= NUM_SMALL else int(rng.choice([2, 2, 3, 4]))
    most_kinds = min(number, 3)
    names = [f"K{i}" for i in range(int(rng.integers(1, most_kinds + 1)))]
    kinds = sorted(names[i % len(names)] for i in range(number))
    workload = Workload.transformer(
        num_layers=int(rng.choice([1, 2, 4])),
        width=64,
        num_heads=4,
        seq_len=32,
        vocab_size=128,
        hidden_width=160,
    )
    measured = [(1,), (1, 2), (1, 2, 4)][int(rng.integers(3))]
    seconds = {name: curve_of(rng, curve, measured) for name in names}
    profiles = tuple(
        device_profile(
            name,
            lambda size, of_kind=seconds[name]: of_kind[size],
            sizes=measured,
            optimizer_seconds_per_element=float(rng.choice([0.0, 1e-7, 1e-6])),
            overlap_slowdown=float(rng.choice([0.0, 0.3, 1.5])),
        )
        for name in names
    )
    pace = float(np.exp(rng.normal(-13, 2)))
    links = collectives((10**4, 10**5), gather_s_per_byte=pace, reduce_s_per_byte=1.5 * pace)
    batch = int(rng.integers(2, {2: 25, 3: 13, 4: 9}[number]))
    if seed >= NUM_SMALL:
        batch = int(rng.integers(33, 73))
    elif number == 2 and rng.uniform() < 0.1:
        batch = int(rng.integers(25, 41))
    state = 16 * workload.numel
    per_sample = sum(
        workload.num_units_by_kind[kind.name] * (kind.activation_bytes + kind.input_bytes)
        for kind in workload.kinds
    )
    roomy = float(rng.uniform(0.6, 3)) * state
    activations = float(rng.choice([0.3, 0.8, 2.0])) * batch * per_sample
    capacities = {
        name: int((roomy + activations) / number * rng.uniform(0.7, 1.6)) for name in names
    }
    devices = tuple(
        DeviceSpec(kind=kind, memory_capacity_bytes=capacities[kind]) for kind in kinds
    )
    cluster = Cluster(nodes=(Node(host="a", devices=devices),))
    scenario = Scenario(cluster, workload, Profile(devices=profiles, collectives=links))
    max_rounds = [None, None, 1, 2, 3][int(rng.integers(5))]
    most = [None, None, None, 2, 5][int(rng.integers(5))]
    asked = Asked(
        scenario=scenario, batch=batch, max_rounds=max_rounds, max_microbatch_size=most
    )
    return asked, curve


def curve_of(
    rng: np.random.Generator, curve: str, sizes: tuple[int, ...]
) -> dict[int, tuple[float, float]]:
    """Seconds of forward and backward by size."""
    speed, start = float(np.exp(rng.normal(0, 0.7))), float(rng.uniform(0, 0.6))
    found = {}
    for size in sizes:
        forward_s = speed * (size + start)
        if curve == "noisy":
            forward_s *= float(np.exp(rng.normal(0, 0.15)))
        elif curve == "plateaus":
            forward_s = speed * (2 * -(-size // 2) + start)
        elif curve == "falling" and size == max(sizes):
            forward_s *= 0.6
        found[size] = (forward_s, forward_s * float(rng.uniform(1.5, 2.5)))
    return found


def judged(seed: int) -> Row:
    """What the planner says, and which of it is false."""
    started_s, (asked, curve) = time.process_time(), draw(seed)
    demands = Constraints(
        max_rounds=asked.max_rounds, max_microbatch_size=asked.max_microbatch_size
    )
    chosen: PlanSolution | None = None
    try:
        chosen = solve(
            asked.scenario,
            global_batch_size=asked.batch,
            constraints=demands,
            tolerance=TOLERANCE,
        )
        bound_s = chosen.lower_bound_s
    except PlanError as error:
        bound_s = error.lower_bound_s
    planner_s = time.process_time() - started_s
    try:
        wrong = "; ".join(_falsehoods(asked, chosen, bound_s))
    except TooManyError:
        wrong = "too many"
    ranks = chosen.plan.ranks if chosen else ()
    return Row(
        seed=seed,
        devices=asked.scenario.cluster.world_size,
        batch=asked.batch,
        max_rounds=asked.max_rounds or 0,
        curve=curve,
        planned_s=chosen.predicted.step_time_s if chosen else 0.0,
        fastest_s=(chosen.fastest_s or 0.0) if chosen else 0.0,
        bound_s=bound_s,
        rounds=chosen.plan.num_rounds if chosen else 0,
        largest_microbatch=max(
            (size for each in ranks for size in each.microbatch_sizes), default=0
        ),
        wrong=wrong,
        planner_s=planner_s,
        cpu_s=time.process_time() - started_s,
    )


def _falsehoods(asked: Asked, chosen: PlanSolution | None, bound_s: float) -> Iterator[str]:
    """Sentences that some plan refutes, with that plan."""
    if chosen is None:
        if np.isinf(bound_s):
            every = Exhaustive(asked, limit_s=np.inf)
            for found in _realized(every, every.combinations):
                yield f"none fits: {_told(*found)}"
                return
        return
    assert chosen.fastest_s is not None
    limit_s, active = (1 + TOLERANCE) * chosen.fastest_s, active_positions(chosen)
    every = Exhaustive(asked, limit_s=limit_s, active=active)
    faster = [each for each in every.combinations if each.min_s < bound_s * (1 - ROUNDING)]
    for plan, cost in _realized(every, faster):
        if cost.step_time_s < bound_s * (1 - ROUNDING):
            yield f"bound: {cost.step_time_s / bound_s - 1:.1e} {_told(plan, cost)}"
            break
    for is_alike, part in ((True, FULL), (False, FULL), (True, 1.0), (False, 1.0)):
        wished = every
        if is_alike or part < 1:
            wished = Exhaustive(
                asked, limit_s=limit_s, part=part, is_alike=is_alike, active=active
            )
        differs = is_alike and not _is_alike(asked, chosen.plan)
        is_full = part < 1 and _fullest(chosen.predicted) > FULL * (1 + 1e-6)
        if not differs and not is_full:
            yield from _of_work(asked, wished, chosen.plan)
            return
        met = next(_fast(wished, wished.combinations), None)
        if met is not None:
            yield f"{'full' if is_full else 'alike'}: {_told(*met)}"
            return


def _of_work(asked: Asked, wished: Exhaustive, plan: Plan) -> Iterator[str]:
    """Whether there is one round if possible, and then the least is recomputed."""
    alike_form = wished.combinations
    if plan.num_rounds > 1:
        once = [each for each in alike_form if each.form.num_rounds == 1]
        met = next(_fast(wished, once), None)
        if met is not None:
            yield f"one round: {_told(*met)}"
            return
    model = CostModel(asked.scenario)
    recomputed = sum(model.num_recomputed(each) for each in plan.ranks if each.rank_batch_size)
    less = [
        each
        for each in alike_form
        if (each.form.num_rounds > 1) == (plan.num_rounds > 1) and each.recomputed < recomputed
    ]
    met = next(_fast(wished, less), None)
    if met is not None:
        yield f"recomputed: {recomputed}, {_told(*met)}"


def _realized(
    of: Exhaustive, combinations: list[Combination]
) -> Iterator[tuple[Plan, StepCost]]:
    for each in combinations[:MOST_REALIZED]:
        found = of.realized(each)
        if found is not None:
            yield found


def _fast(of: Exhaustive, combinations: list[Combination]) -> Iterator[tuple[Plan, StepCost]]:
    """Those within the limit."""
    for plan, cost in _realized(of, combinations):
        if cost.step_time_s <= of.limit_s:
            yield plan, cost


def _is_alike(asked: Asked, plan: Plan) -> bool:
    done: dict[DeviceSpec, object] = {}
    return all(
        done.setdefault(device, (rank.microbatch_sizes, rank.recomputed_units))
        == (rank.microbatch_sizes, rank.recomputed_units)
        for device, rank in zip(asked.scenario.cluster.devices, plan.ranks, strict=True)
    )


def _fullest(cost: StepCost) -> float:
    return max(each.memory.total_bytes / each.memory_budget_bytes for each in cost.ranks)


def _told(plan: Plan, cost: StepCost) -> str:
    """A plan in few words."""
    form = StepForm.of(plan)
    ranks = " | ".join(
        f"{each.microbatch_sizes} {','.join(each.recomputed_units)} {each.state_share:.2f}"
        for each in plan.ranks
    )
    gathers = (
        f"{form.reshard_after_forward:d}{form.reshard_after_backward:d}"
        f"{form.reduce_each_round:d}"
    )
    return f"{cost.step_time_s:.6g} s {plan.num_rounds}x {gathers} {ranks}"


def told(row: Row) -> str:
    """One case, in a line."""
    return f"{row.seed:>4} {row.devices} devices, batch {row.batch}: {row.wrong or 'true'}"


def as_markdown(rows: list[Row]) -> str:
    """How many sentences are false, by sorts of cases."""
    groups = {
        "all": rows,
        "no plan": [row for row in rows if not row.planned_s],
        "several rounds chosen": [row for row in rows if row.rounds > 1],
        "batches of 33 to 72": [row for row in rows if row.seed >= NUM_SMALL],
    }
    header = ["cases", "number", *(f"{each} false" for each in SENTENCES), "too many"]
    lines = [
        [
            name,
            str(len(of)),
            *(str(sum(f"{each}:" in row.wrong for row in of)) for each in SENTENCES),
            str(sum(row.wrong == "too many" for row in of)),
        ]
        for name, of in groups.items()
    ]
    return markdown_table(header, lines)


if __name__ == "__main__":
    by_seed.run(HERE, Row, judged, as_markdown, range(NUM_CASES), doc=__doc__, told=told)
