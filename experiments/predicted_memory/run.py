"""How far predicted peaks of memory are from tracked ones.

python -m experiments.predicted_memory.run                     # writes results and README
python -m experiments.predicted_memory.run --stages            # of pipelines, in stages/
python -m experiments.predicted_memory.run --seeds 100 110     # some; writes nothing
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from experiments.common.results import Bar, Page, console, parser_of
from experiments.common.systems import emulated_peak
from experiments.predicted_memory.cases import MemoryCase, demo, draw_flat, draw_pipeline
from shardhet import Cluster, DeviceSpec, Scenario
from shardhet.models.decoder import Decoder
from shardhet.pricing.cost import CostModel
from shardhet.pricing.part import part_of
from shardhet.pricing.step_cost import MemoryParts
from shardhet.profiler.batch import ExampleBatch
from shardhet.profiler.describe import describe
from shardhet.records.cluster import Link, Node
from shardhet.records.profiles import Profile
from shardhet.simulator.stages import price_of
from tests.made_up import collectives, device_profile
from tests.worlds import World

HERE = Path(__file__).parent
NUM_CASES, NUM_PIPELINES = 40, 16
NUM_STEPS = 3  # the first examines the model
MIB = 2**20
LINK = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank of one configuration."""

    case: str
    rank: int
    tracked_bytes: int
    predicted_bytes: int
    ratio: float
    traits: str


def tracked_peak(rank: int, case: MemoryCase) -> int:
    """The most bytes of tensors that the rank's device holds in a step."""
    torch.manual_seed(0)
    mine = case.plan.num_rounds * case.plan.ranks[rank].rank_batch_size
    module, shape = Decoder(case.shape), case.shape
    tokens = torch.randint(shape.vocab_size, (mine, shape.seq_len))
    return emulated_peak(
        module,
        case.plan,
        lambda model: (tokens, tokens),
        num_steps=NUM_STEPS,
        max_norm=1.0,
        **case.options,
    )[1]


def predicted(case: MemoryCase) -> list[MemoryParts]:
    """The predicted memory of every rank."""
    tokens = torch.zeros(1, case.shape.seq_len, dtype=torch.int64)
    with torch.device("meta"):
        model = Decoder(case.shape)
    workload = describe(model, ExampleBatch(args=(tokens, tokens)), **case.options)
    device = DeviceSpec(kind="x", memory_capacity_bytes=2**34)
    cluster = Cluster(
        nodes=(Node(host="a", devices=(device,) * case.plan.world_size, link=LINK),)
    )
    names = [kind.name for kind in workload.kinds]
    profile = Profile(  # seconds do not matter here
        devices=(device_profile("x", lambda m: (1e-4, 2e-4), sizes=[1, 2], unit_kinds=names),),
        collectives=collectives((1, 2), gather_s_per_byte=1e-9, reduce_s_per_byte=1e-9),
    )
    scenario = Scenario(cluster, workload, profile)
    if case.plan.stages is None:
        ranks = CostModel(scenario).predict(case.plan).ranks
    else:
        ranks = price_of(case.plan, scenario, partial(part_of, scenario)).ranks
    return [rank.memory for rank in ranks]


def rows_of(world: World, case: MemoryCase) -> list[Row]:
    """Run it, and compare."""
    outcomes = world.run(tracked_peak, (case,), timeout_s=300.0, grace_s=10.0)
    failed = [each for each in outcomes if not each.has_returned]
    if failed:
        raise RuntimeError(f"{case}: {failed[0]}")
    return [
        Row(
            case=case.name,
            rank=i,
            tracked_bytes=outcome.value,
            predicted_bytes=parts.total_bytes - parts.reserved_bytes,
            ratio=round((parts.total_bytes - parts.reserved_bytes) / max(1, outcome.value), 4),
            traits="; ".join(case.traits),
        )
        for i, (outcome, parts) in enumerate(zip(outcomes, predicted(case), strict=True))
    ]


def main() -> None:
    """Run the configurations and write the tables."""
    parser = parser_of(__doc__, "three of them; writes nothing")
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    parser.add_argument("--stages", action="store_true", help="pipelines")
    given = parser.parse_args()
    folder, draw, number = HERE, draw_flat, NUM_CASES
    if given.stages:
        folder, draw, number = HERE / "stages", draw_pipeline, NUM_PIPELINES
    page = Page(folder, is_kept=not (given.seeds or given.quick))
    cases = [draw(i) for i in range(*(given.seeds or (0, 3 if given.quick else number)))]
    if page.is_kept and not given.stages:
        cases.append(demo())
    worlds: dict[int, World] = {}
    rows: list[Row] = []
    for case in cases:
        size = case.plan.world_size
        if size not in worlds:
            worlds[size] = World(size)
        found = rows_of(worlds[size], case)
        rows += found
        ratios = " ".join(f"{row.ratio:.3f}" for row in found)
        console.print(f"{case.name:>5} {ratios}  {found[0].traits}", soft_wrap=True)
    for world in worlds.values():
        world.close()
    report(rows, page)
    page.keep({"results.csv": rows})


def report(rows: Sequence[Row], page: Page) -> None:
    """The bars, and the ratios by trait."""
    rows = [row for row in rows if row.predicted_bytes]  # others neither compute nor store
    ratios = [row.ratio for row in rows]
    error = fmean(abs(each - 1) for each in ratios)
    page.bars(
        [
            Bar(claim="mean error, whatever its sign", measured=error, at_most=0.05),
            Bar(claim="smallest predicted / tracked", measured=min(ratios), at_least=0.98),
        ]
    )
    by_trait = {"all": ratios}
    for trait in sorted({trait for row in rows for trait in row.traits.split("; ")}):
        by_trait[trait] = [row.ratio for row in rows if trait in row.traits.split("; ")]
    page.table(
        "Ratios by trait",
        ["predicted / tracked", "ranks", "mean", "smallest", "largest"],
        [
            [trait, str(len(each)), *(f"{of(each):.3f}" for of in (fmean, min, max))]
            for trait, each in by_trait.items()
        ],
    )


if __name__ == "__main__":
    main()
