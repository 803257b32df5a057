"""Recorded comings and goings of spot instances, played to two ways of going on.

python -m experiments.recovery.spot.run TRACES            about a minute
python -m experiments.recovery.spot.run TRACES --quick    two hours of the traces; keeps nothing

TRACES is a folder with p3-trace.csv and g4dn-trace.csv of github.com/uclasystem/bamboo.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from experiments.common.results import Bar, Page, parser_of, read_csv
from experiments.recovery.elastic.run import LOST, Recovery
from experiments.recovery.spot.replay import (
    Event,
    Pace,
    Policy,
    Restart,
    events_of,
    ideal,
    merged,
    replay,
)
from shardhet import Cluster, PlanError, Setting, Workload
from shardhet.planner import solve
from shardhet.pricing.derive import derive_profile

HERE = Path(__file__).parent
TRACES = {"p3": "Tesla V100-SXM2-16GB", "g4dn": "Tesla T4"}  # one card a node
HOURS = 10.75  # both traces
GLOBAL_BATCH_SIZE = 512
LINK_BYTES_PER_S = 1.25e9  # 10 Gbit/s, as instance pages of AWS say of p3.2xlarge
STORE_BYTES_PER_S = 1.25e9  # for all nodes together, an assumption
GRADIENT_BYTES = 4  # of an element; no replica and no checkpoint has gradients
CHECKPOINT_MINUTES = (5, 15, 30)
HEADER = [
    "way of going on",
    "steps that count",
    "useful work",
    "steps lost",
    "without a step, h",
    "restarts",
    "of them from the store",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one policy made of the traces."""

    policy: str
    useful: float  # of the steps that the nodes could have taken
    work: float
    lost: float
    down_h: float
    restarts: int
    from_store: int


def workload() -> Workload:
    """GPT-2 medium, in float16 with float32 copies."""
    return Workload.transformer(
        num_layers=24,
        width=1024,
        num_heads=16,
        vocab_size=50_257,
        seq_len=1024,
        is_gated=False,
        has_biases=True,
        param_dtype="float16",
    )


def cluster_of(names: Sequence[str]) -> Cluster:
    """One card on each node."""
    lines = ["version: 1", "nodes:"]
    rate = f"bandwidth_bytes_per_s: {LINK_BYTES_PER_S:.3e}"
    link = f'{{latency_s: 5.0e-5, {rate}, source: "AWS, instance pages"}}'
    for name in names:
        kind = TRACES[name.partition("-")[0]]
        lines += [f"  - host: {name}", f"    link: {link}", f"    devices: [{{kind: {kind}}}]"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("\n".join([*lines, f"between_nodes: {link}"]) + "\n")
        file.flush()
        return Cluster.load(file.name)


def paces_of(events: Sequence[Event]) -> dict[frozenset[str], Pace]:
    """The best plan for every set of nodes; sets of equal numbers are planned once."""
    nodes: frozenset[str] = frozenset()
    sets = []
    for event in events:
        nodes = (nodes | event.added) - event.removed
        sets.append(nodes)
    model = workload()
    by_numbers: dict[tuple[int, ...], tuple[float, list[int]]] = {}
    found: dict[frozenset[str], Pace] = {}
    for each in sets:
        names = sorted(each, key=lambda name: (name.partition("-")[0], name))
        numbers = tuple(sum(name.startswith(kind) for name in names) for kind in TRACES)
        if numbers not in by_numbers:
            by_numbers[numbers] = _planned(names, model)
        step_s, sizes = by_numbers[numbers]
        # Names are in the order of their kinds, as the devices of the plan are.
        found[each] = Pace(step_s, dict(zip(names, sizes, strict=True)))
    return found


def _planned(names: Sequence[str], model: Workload) -> tuple[float, list[int]]:
    nothing = (float("inf"), [0] * len(names))
    if not names:
        return nothing
    cluster = cluster_of(names)
    try:
        solution = solve(
            Setting(cluster, model, derive_profile(cluster, model)),
            global_batch_size=GLOBAL_BATCH_SIZE,
        )
    except PlanError:
        return nothing
    shares = [rank.state_share for rank in solution.plan.ranks]
    return solution.predicted.step_time_s, [int(share * state_bytes(model)) for share in shares]


def state_bytes(model: Workload) -> int:
    """Parameters, gradients left out, and states of the optimizer."""
    return model.numel * (model.state_bytes_per_element - GRADIENT_BYTES)


def measured_restart() -> Restart:
    """As the experiment with lost nodes found it on this machine."""
    rows = [
        each
        for each in read_csv(HERE.parent / "elastic" / "results.csv", Recovery)
        if each.deed == LOST
    ]
    return Restart(
        noticed_s=median(each.seconds - each.restart_s for each in rows),
        started_s=median(each.start_s + each.plan_s for each in rows),
    )


def policies() -> list[Policy]:
    """Checkpoints alone, and replicas of every step beside them."""
    return [
        Policy(
            name=f"{'replicas, ' if has_replicas else ''}checkpoints every {minutes} minutes",
            has_replicas=has_replicas,
            checkpoint_every_s=minutes * 60.0,
            link_bytes_per_s=LINK_BYTES_PER_S,
            store_bytes_per_s=STORE_BYTES_PER_S,
        )
        for has_replicas in (True, False)
        for minutes in CHECKPOINT_MINUTES
    ]


def play(events: Sequence[Event], until_s: float) -> list[Row]:
    """All policies."""
    paces = paces_of(events)
    possible = ideal(events, until_s, paces)
    rows = []
    for policy in policies():
        course = replay(
            events, until_s, paces, policy, measured_restart(), state_bytes(workload())
        )
        rows.append(
            Row(
                policy=policy.name,
                useful=round(course.work / possible, 4),
                work=round(course.work, 1),
                lost=round(course.lost, 1),
                down_h=round(course.down_s / 3600, 3),
                restarts=course.restarts,
                from_store=course.from_store,
            )
        )
    return rows


def report(rows: Sequence[Row], page: Page) -> None:
    """The table; a scenario has no bar but that ours is not worse."""
    cells = [
        [
            each.policy,
            f"{each.work:,.0f}",
            f"{each.useful:.3f}",
            f"{each.lost:,.0f}",
            f"{each.down_h:.2f}",
            str(each.restarts),
            str(each.from_store),
        ]
        for each in rows
    ]
    page.table("steps that count, of those that the nodes could have taken", HEADER, cells)
    half = len(rows) // 2
    gains = [ours.useful / usual.useful for ours, usual in zip(rows, rows[half:], strict=False)]
    page.bars(
        [
            Bar(
                claim="useful work with replicas over that without, the least",
                measured=min(gains),
                at_least=1.0,
            )
        ]
    )


def main() -> None:
    """Run what the command line says."""
    parser = parser_of(__doc__, "two hours of the traces; keeps nothing")
    parser.add_argument("traces", type=Path)
    options = parser.parse_args()
    page = Page(HERE, is_kept=not options.quick)
    until_s = 3600.0 * (2 if options.quick else HOURS)
    traces = [
        events_of((options.traces / f"{name}-trace.csv").read_text().splitlines(), f"{name}-")
        for name in TRACES
    ]
    events = merged(traces, until_s)
    restart = measured_restart()
    page.tell(
        f"{len(events)} moments at which nodes come or go in {until_s / 3600:.2f} h; "
        f"{state_bytes(workload()) / 1e9:.1f} GB of state; a loss is noticed after "
        f"{restart.noticed_s:.1f} s, processes and plan take {restart.started_s:.1f} s."
    )
    rows = play(events, until_s)
    report(rows, page)
    page.keep({"results.csv": rows})


if __name__ == "__main__":
    main()
