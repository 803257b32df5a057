"""Prices of drawn plans on drawn clusters as they were recorded, so that a change shows.

``PYTHONPATH=. python -m tests.recorded_prices`` records them anew.  What they are is held by
other tests: against the simulation, measurements and brute force.
"""

import csv
import random
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from math import fsum
from pathlib import Path
from typing import Any

from shardhet import Cluster, DeviceSpec, Plan, Scenario, Stage, Workload
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.part import part_of
from shardhet.records.cluster import Link, Node, built_in_kinds
from shardhet.records.margin import with_fraction, with_libraries
from shardhet.records.profiles import Profile
from shardhet.records.workload import UnitKind
from shardhet.simulator.simulation import timeline_of
from shardhet.simulator.stages import price_of
from tests.test_planner import random_case

FILE = Path(__file__).parent / "recorded" / "prices.csv"
SEEDS = range(400)


@dataclass(frozen=True, slots=True)
class RecordedPrice:
    """Of a case; of several figures each counts by its place, so that each shows in the sum."""

    seed: int
    step_time_s: float
    simulated_s: float
    fullest: float  # the largest part of what was predicted that a rank holds in the simulation
    turns_s: float
    ranks_s: float
    num_bytes: float
    simulated_ranks: float


def by_place(figures: Iterable[float]) -> float:
    return fsum((1 + i) * each for i, each in enumerate(figures))


def record_of(seed: int) -> RecordedPrice:
    """What the prices are today."""
    scenario, plan = drawn(seed)
    price = price_of(plan, scenario, partial(part_of, scenario))
    timeline = timeline_of(price)
    turns = [turn for part in price.parts for turn in part.cost.turns]
    parts = [part.cost.exposed_comm_s for part in price.parts]
    memory = [
        (*astuple(each.memory), each.memory_budget_bytes, each.fits) for each in price.ranks
    ]
    return RecordedPrice(
        seed,
        price.step_time_s,
        timeline.step_time_s,
        max(
            held.peak_bytes / max(1, each.memory.total_bytes)
            for held, each in zip(timeline.ranks, price.ranks, strict=True)
        ),
        by_place([*parts, *(s for each in turns for s in (each.compute_s, each.comm_s))]),
        by_place(s for e in price.ranks for s in (e.forward_s, e.backward_s, e.optimizer_s)),
        by_place(nbytes for each in memory for nbytes in each),
        by_place(
            s
            for each in timeline.ranks
            for s in (each.busy_s, each.waiting_s, each.peak_bytes / 1e9)
        ),
    )


def drawn(seed: int) -> tuple[Scenario, Plan]:
    """One case in three has measured times, the others have those of specifications."""
    draw = random.Random(f"prices {seed}")
    if seed % 3 == 0:
        cluster, profile, _ = random_case(seed)
        link = Link(latency_s=2e-5, bandwidth_bytes_per_s=1e9)
        nodes = [replace(with_host(draw, each), link=link) for each in cluster.nodes]
        cluster = replace(cluster, nodes=tuple(nodes))
        workload = draw_workload(draw, "float32")
        scenario = Scenario(cluster, workload, unlike(draw, profile))
    else:
        cluster, dtype = draw_cluster(draw)
        workload = draw_workload(draw, dtype)
        options: dict[str, Any] = draw.choice(
            [{}, {}, {"link_fraction": 0.3}, {"compute_fraction": 0.4}]
        )
        profile = derive_profile(
            cluster, workload, fp16_accumulation=draw.random() < 0.3, **options
        )
        scenario = Scenario(cluster, workload, profile)
    return scenario, draw_plan(draw, scenario)


def unlike(draw: random.Random, profile: Profile) -> Profile:
    """With the runtime's own time, and messages that go to some more than to others."""
    weights = {
        f"{each}_unevenness_weight": draw.choice([0.0, 0.7]) for each in ("gather", "reduce")
    }
    return replace(
        profile,
        collectives=replace(profile.collectives, **weights),
        unit_overhead_s=draw.choice([0.0, 0.01]),
    )


def with_host(draw: random.Random, node: Node) -> Node:
    return replace(
        node,
        host_memory_bytes=draw.choice([None, 2**28, 2**34]),
        host_bytes_per_s=draw.choice([None, 2e10, 3e7]),
    )


def draw_cluster(draw: random.Random) -> tuple[Cluster, str]:
    """One to three hosts of any cards, and a dtype that all have."""
    known = built_in_kinds()
    kinds = draw.sample(sorted(known), draw.randint(1, 3))
    nodes = []
    for i in range(draw.randint(1, 3)):
        devices = tuple(
            DeviceSpec(
                host=f"h{i}", kind=kind, memory_capacity_bytes=known[kind].memory_capacity_bytes
            )
            for kind in draw.choices(kinds, k=draw.choice([1, 2, 3, 5]))
        )
        link = Link(latency_s=2e-5, bandwidth_bytes_per_s=draw.choice([4e9, 1.2e10, 2e11]))
        region = f"r{i % 2}" if i == 2 else "r0"
        node = Node(host=f"h{i}", link=link, devices=devices, region=region)
        nodes.append(with_host(draw, node))
    between, far = (
        Link(latency_s=1e-4, bandwidth_bytes_per_s=draw.choice([1e8, 1.2e9, 2.5e10]))
        for _ in range(2)
    )
    cluster = Cluster(
        nodes=tuple(nodes),
        kinds=tuple(known[kind] for kind in kinds),
        between_nodes=between,
        between_regions=far,
    )
    cluster = draw.choice([cluster, with_libraries(cluster), with_fraction(cluster, 0.8)])
    dtypes = [
        {dtype for dtype, _ in known[kind].peak_flops_per_s} - {"fp16_accumulation"}
        for kind in kinds
    ]
    return cluster, draw.choice(sorted(set.intersection(*dtypes)))


def draw_workload(draw: random.Random, dtype: str) -> Workload:
    """A decoder, perhaps with frozen weights and adapters."""
    heads, width = draw.choice([(2, 64), (4, 256), (8, 1024)])
    workload = Workload.transformer(
        num_layers=draw.randint(1, 5),
        width=width,
        num_heads=heads,
        num_kv_heads=draw.choice([None, heads // 2]),
        hidden_width=draw.choice([None, 3 * width]),
        vocab_size=draw.choice([100, 4000]),
        seq_len=draw.choice([16, 128, 1024]),
        is_gated=draw.random() < 0.5,
        has_biases=draw.random() < 0.5,
        fuses_norms=draw.random() < 0.5,
        param_dtype=dtype,
        reduce_dtype=draw.choice(["float32", dtype]),
        state_bytes_per_element=draw.choice([16.0, 8.0]),
    )
    if draw.random() < 0.7:
        return workload
    is_stored = draw.random() < 0.5
    kinds = tuple(frozen(each, is_stored) for each in workload.kinds)
    return replace(workload, kinds=kinds)


def frozen(kind: UnitKind, as_stored: bool) -> UnitKind:
    """A kind with frozen weights, and in a block an adapter."""
    adapter = ((4, 64), (64, 4)) if kind.name == "block" else ()
    return replace(
        kind,
        param_shapes=(*kind.param_shapes, *adapter),
        frozen_params=tuple(range(len(kind.param_shapes))),
        frozen_as_stored=as_stored,
    )


def draw_plan(draw: random.Random, scenario: Scenario) -> Plan:
    """A plan of anything."""
    cluster, number = scenario.cluster, scenario.cluster.world_size
    patterns = (False, False, True, ["block*.0"], ["block*"])
    weights = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(number)]
    weights = weights if any(weights) else [1.0] * number
    recompute = [draw.choice(patterns) for _ in range(number)]
    gathers = draw.randrange(3)
    changes: dict[str, Any] = {}
    special = draw.choice(["", "", "stages", "groups", "tiles", "levels", "resident", "hosts"])
    sizes = [draw.randint(0, 3) for _ in range(number)]
    counts = [draw.randint(1, 3) * bool(each) for each in sizes]
    shares = [each / sum(weights) for each in weights]
    if special == "stages" and number > 1:
        units = [unit.fqn for unit in scenario.workload.units]
        cut, ranks = draw.randint(1, len(units) - 1), draw.randint(1, number - 1)
        changes["stages"] = [
            Stage(units=tuple(units[:cut]), num_ranks=ranks, in_flight=draw.choice([None, 3])),
            Stage(units=tuple(units[cut:]), num_ranks=number - ranks),
        ]
        sizes, counts = [2] * number, [1] * number
        for first, stop in ((0, ranks), (ranks, number)):
            counts[first] = 1 + number - (stop - first)
            shares[first:stop] = [1 / (stop - first)] * (stop - first)
    elif special == "groups" and number > 1:
        sizes[:2], counts[:2] = [1, 1], [2, 2]
        changes = {
            "context_groups": [[0, 1]],
            "token_shares": [draw.choice([1, 3]), *[1] * (number - 1)],
        }
    elif special == "tiles":
        changes = {"tiles": [draw.choice(patterns) for _ in sizes], "tokens_per_tile": 8}
    elif special == "levels":
        changes["two_level_units"] = draw.choice([True, ["block*"]])
    elif special == "resident":
        changes["resident_units"] = draw.choice([True, ["block*.0"]])
    if special in ("hosts", "stages"):
        changes["inputs_on_host"] = [each is True and draw.random() < 0.7 for each in recompute]
        changes["optimizer_on_host"] = [draw.random() < 0.5 for _ in sizes]
    if not any(sizes):
        sizes[0], counts[0] = 2, 1
    return Plan.by_hand(
        microbatch_sizes=sizes,
        num_microbatches=counts,
        state_shares=shares,
        recompute=recompute,
        devices=cluster.devices,
        num_rounds=draw.choice([1, 1, 2, 3]),
        reshard_after_forward=gathers == 0,
        reshard_after_backward=gathers < 2,
        reduce_each_round=draw.random() < 0.6,
        **changes,
    )


def recorded() -> Iterator[RecordedPrice]:
    """What was recorded, in the order of seeds."""
    with FILE.open(newline="") as file:
        for seed, *figures in [*csv.reader(file)][1:]:
            yield RecordedPrice(int(seed), *map(float, figures))


def main() -> None:
    """Write the file."""
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([each.name for each in fields(RecordedPrice)])
        for seed in SEEDS:
            writer.writerow(f"{each:.12g}" for each in astuple(record_of(seed)))


if __name__ == "__main__":
    main()
