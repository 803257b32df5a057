"""Replicas: what they cost while all goes well, and what they save when a node is lost.

python -m experiments.recovery.replicas.run            a state of 1 GB, about ten minutes
python -m experiments.recovery.replicas.run --quick    one of 0.1 GB; keeps nothing
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.common.launch import FORKED, run_ranks
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.recovery.replicas.ranks import STORE_BYTES_PER_S, Cost, Restored, keep, restore

HERE = Path(__file__).parent
IN_MEMORY = Path("/dev/shm")
NUM_LAYERS = 20  # 1.0 GB with AdamW's states in float32
NUM_ROUNDS = 5
LEAST_SPEEDUP = 3.0  # of local-first over fetching everything
WAYS = {
    "checkpoint": "everything from the store",
    "replicas": "rows from the nodes that have them",
}


# Which nodes are there after one is lost, by rank.
CLUSTERS = {"a new node in its place": (0, 1, 4, 3), "three go on": (0, 1, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """One time that the state came back."""

    cluster: str
    way: str
    seconds: float
    came_from: str


def restorations(
    num_layers: int, num_rounds: int, memory: Path, disk: Path
) -> list[Restoration]:
    """All ways by turns; raises if any brings other rows back."""
    found = []
    digests: dict[str, set[str]] = {}
    for _ in range(num_rounds):
        for (name, nodes), way in product(CLUSTERS.items(), WAYS):
            clock = FORKED.Value("d", 0.0)  # type: ignore[attr-defined]
            args = (num_layers, list(nodes), way, memory, disk, clock)
            rows: list[Restored] = run_ranks(restore, len(nodes), *args, context=FORKED)
            shutil.rmtree(memory / "node4", ignore_errors=True)
            digests.setdefault(name, set()).add(" ".join(row.digest for row in rows))
            seconds = round(max(row.seconds for row in rows), 3)
            told = rows[0].came_from
            found.append(Restoration(cluster=name, way=way, seconds=seconds, came_from=told))
            print(found[-1], flush=True)
    if any(len(each) > 1 for each in digests.values()):
        raise RuntimeError(f"not the same rows came back: {digests}")
    return found


def report(costs: Sequence[Cost], found: Sequence[Restoration], page: Page) -> None:
    """The tables and the bar."""
    names = {
        "step_s": "a step",
        "replica_s": "a replica: the step waits",
        "replica_complete_s": "a replica: the copies are there",
        "checkpoint_s": "a checkpoint",
        "async_s": "a checkpoint in the background: the step waits",
        "async_complete_s": "a checkpoint in the background: it is complete",
    }
    rows = [
        [label, Spread.of([getattr(cost, name) for cost in costs]).cell(2)]
        for name, label in names.items()
    ]
    page.table("keeping it", ["what", "s"], rows)
    rows = []
    speedups = []
    for cluster in CLUSTERS:
        seconds = {
            way: [e.seconds for e in found if (e.cluster, e.way) == (cluster, way)]
            for way in WAYS
        }
        pairs = zip(seconds["checkpoint"], seconds["replicas"], strict=True)
        speedups.append(Spread.of([stored / local for stored, local in pairs]).median)
        for way, label in WAYS.items():
            told = next(e.came_from for e in found if (e.cluster, e.way) == (cluster, way))
            cells = [label, Spread.of(seconds[way]).cell(2), told.removeprefix("replicas: ")]
            rows.append([cluster, *cells])
    page.table("getting it back", ["after a node is lost", "from", "s", "of it"], rows)
    page.bars(
        [
            Bar(
                claim="times as fast as fetching everything, the least of the clusters",
                measured=min(speedups),
                at_least=LEAST_SPEEDUP,
            )
        ]
    )


def main() -> None:
    """Run what the command line says."""
    options = parser_of(__doc__, "a tenth of the state, once; keeps nothing").parse_args()
    page = Page(HERE, is_kept=not options.quick)
    num_layers, num_rounds = (2, 1) if options.quick else (NUM_LAYERS, NUM_ROUNDS)
    root = IN_MEMORY if IN_MEMORY.is_dir() else None
    with TemporaryDirectory(dir=root) as memory, TemporaryDirectory() as disk:
        args = (num_layers, num_rounds, Path(memory), Path(disk))
        costs = run_ranks(keep, 4, *args, context=FORKED)[0]
        shutil.rmtree(Path(memory) / "node2")  # it stays lost
        found = restorations(num_layers, num_rounds, Path(memory), Path(disk))
    page.tell(
        f"{num_layers * 16.8 * 3 / 1000:.2f} GB of parameters and states on four nodes of one "
        f"rank each; a store of {STORE_BYTES_PER_S / 1e6:.0f} MB/s for all ranks together."
    )
    report(costs, found, page)
    page.keep({"costs.csv": costs, "restorations.csv": found})


if __name__ == "__main__":
    main()
