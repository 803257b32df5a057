"""What does shardhet predict for the steps that Sailor's authors have measured?

    python -m experiments.pipelines.printed.run

No clock is read, and nothing was fitted to these figures.  steps.csv, layers.csv and links.csv
hold what was published; README.md says where.

Tensor parallelism is not expressible, and every one of these runs has it: the cards of a host
that share tensors are taken as one device, whose layers take the seconds that the authors timed
for such a group.  What is predicted is the rest: the order of a pipeline, messages between
stages, and the reduction of gradients over replicas.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from experiments.common.machine import Environment
from experiments.common.results import Page
from shardhet.pricing.derive import derive_collectives
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node
from shardhet.simulator.pipeline import Hop, StageTimes, pipeline_s

HERE = Path(__file__).parent
FOLDER = "sailor/Planner/simulations/validation"  # of github.com/saha18uiuc/sailor, a fork
NETWORKS = {"clariden": "GH200", "fast": "RTX, fast links", "sockets": "RTX, 1 Gbit/s"}
SEQ_LEN, ITEMSIZE = 2048, 4  # run_opt.slurm; activations are counted in float32
LATENCY_S = 5e-5  # between hosts: that of cluster/described, for none is published


class Model(NamedTuple):
    """What of a model its steps depend on; bytes of parameters over all cards of a group."""

    num_layers: int  # the embedding and the head count as layers
    width: int
    embedding_bytes: int
    block_bytes: int
    head_bytes: int


MODELS = {  # Metis/profiles/*/mbs2_tmp2.json and mbs4_tmp4.json, times the cards
    "OPT-350": Model(26, 1024, 223_346_688, 50_409_472, 206_585_856),
    "GPT-Neo-2.7": Model(34, 2560, 602_931_200, 314_890_240, 81_920),
}


class Layers(NamedTuple):
    """Seconds of each layer of a model on a group of cards: forward and backward."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float  # of the optimizer, per layer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A step as it was measured and as it is predicted."""

    cluster: str
    model: str
    hosts: int
    tensor_parallel: int
    stages: int
    replicas: int
    microbatch: int
    batch: int
    measured_s: float
    measured_again_s: float | None  # in a later commit of the same file
    other_program_s: float | None  # by Aceso's runtime, with its own layers per stage
    predicted_stages_s: float
    predicted_reduction_s: float
    predicted_s: float
    error: float  # predicted over measured, less one
    blocking_error: float  # nothing is computed while messages are sent
    full_bandwidth_error: float  # of rings
    source: str
    commit: str


class Published:
    """A configuration of steps.csv, and what its authors have timed alone."""

    def __init__(
        self,
        row: dict[str, str],
        layers: dict[tuple[str, ...], Layers],
        links: dict[tuple[str, ...], Link],
    ) -> None:
        self.row, self.model, self._layers, self._links = row, row["model"], layers, links
        self.layers = tuple(map(int, row["layers"].split()))  # of each stage
        self.replicas, self.microbatch = int(row["replicas"]), int(row["microbatch"])
        self.num_rounds = int(row["batch"]) // (self.microbatch * self.replicas)
        kinds = tuple(tuple(each.split("/")) for each in row["kinds"].split())
        if len(kinds) == 1 and len(kinds[0]) == 1:
            kinds = (kinds[0] * self.replicas,) * len(self.layers)
        self.kinds = kinds  # of each stage's replicas

    def stages_s(self, *, is_blocking: bool) -> float:
        """Seconds until the last stage has computed, in the slowest replica.

        Replicas are pipelines of their own with equal batches.
        """
        held = [min(self.num_rounds, len(self.layers) - i) for i in range(len(self.layers))]
        # Each card of a group sends its part of the tensor, all of them together all of it.
        nbytes = self.microbatch * SEQ_LEN * MODELS[self.model].width * ITEMSIZE
        seconds = []
        for replica in range(self.replicas):
            times = [self._times(stage, replica) for stage in range(len(self.layers))]
            pairs = pairwise(stage[replica] for stage in self.kinds)
            hops = [Hop(link=self._link(*e), nbytes=nbytes, back_bytes=nbytes) for e in pairs]
            hops_s = [hop.seconds for hop in hops]
            if is_blocking:  # stages wait for every message that they send or get
                waits = [before + after for before, after in pairwise([0.0, *hops_s, 0.0])]
                times = [
                    replace(t, forward_s=t.forward_s + wait, backward_s=t.backward_s + wait)
                    for t, wait in zip(times, waits, strict=True)
                ]
                hops_s = [0.0] * len(hops_s)
            seconds.append(
                pipeline_s(times, (hops_s, hops_s), in_flight=held, num_rounds=self.num_rounds)
            )
        return max(seconds)

    def reduction_s(self, part: float | None) -> float:
        """Seconds of the slowest ring over the replicas of a stage, there and back.

        It gets this part of the links' bandwidth; None: as much as ``shardhet plan`` takes.
        """
        if self.replicas == 1:
            return 0.0
        model, last = MODELS[self.model], len(self.layers) - 1
        found = []
        for stage, (number, kinds) in enumerate(zip(self.layers, self.kinds, strict=True)):
            links = [self._link(*pair) for pair in pairwise(kinds)]
            slowest = min(links, key=lambda link: link.bandwidth_bytes_per_s)
            nodes = tuple(Node(host=str(i), devices=(DeviceSpec(),)) for i in range(len(kinds)))
            ring = derive_collectives(Cluster(nodes=nodes, between_nodes=slowest), part)
            assert ring.gather_s is not None
            assert ring.reduce_s is not None
            nbytes = (number - (stage == 0) - (stage == last)) * model.block_bytes
            nbytes += (stage == 0) * model.embedding_bytes + (stage == last) * model.head_bytes
            found.append(ring.gather_s.at(nbytes) + ring.reduce_s.at(nbytes))
        return max(found)

    def _times(self, stage: int, replica: int) -> StageTimes:
        kind, cards = self.kinds[stage][replica], self.row["tensor_parallel"]
        layers = self._layers[self.model, kind, cards, self.row["microbatch"]]
        first = sum(self.layers[:stage])
        own = slice(first, first + self.layers[stage])
        return StageTimes(
            forward_s=sum(layers.forward_s[own]),
            backward_s=sum(layers.backward_s[own]),
            once_s=self.layers[stage] * layers.update_s,
        )

    def _link(self, one: str, other: str) -> Link:
        pair = min(one, other), max(one, other)
        return self._links[self.row["network"], self.row["tensor_parallel"], *pair]


def rows_of(name: str) -> list[dict[str, str]]:
    """Of a file in this folder."""
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def timed_layers() -> dict[tuple[str, ...], Layers]:
    """By model, kind, cards and microbatch."""
    found = {}
    for row in rows_of("layers.csv"):
        blocks = MODELS[row["model"]].num_layers - 3
        parts = ("embedding", "first", *["block"] * blocks, "head")
        seconds = [
            tuple(float(row[f"{part}_{phase}_s"]) for part in parts)
            for phase in ("forward", "backward")
        ]
        key = row["model"], row["kind"], row["tensor_parallel"], row["microbatch"]
        found[key] = Layers(*seconds, update_s=float(row["update_s"]))
    return found


def measured_links() -> dict[tuple[str, ...], Link]:
    """What all cards of a group reach together, by network, cards and two kinds in order."""
    return {
        (row["network"], row["tensor_parallel"], row["one"], row["other"]): Link(
            latency_s=LATENCY_S, bandwidth_bytes_per_s=float(row["bytes_per_s"])
        )
        for row in rows_of("links.csv")
    }


def step_rows() -> list[StepRow]:
    """All of steps.csv."""
    layers, links = timed_layers(), measured_links()
    found = []
    for row in rows_of("steps.csv"):
        step, measured_s = Published(row, layers, links), float(row["measured_s"])
        stages_s, reduction_s = step.stages_s(is_blocking=False), step.reduction_s(None)
        blocking_s = step.stages_s(is_blocking=True) + reduction_s
        full_s = stages_s + step.reduction_s(1.0)
        predicted = (stages_s + reduction_s, blocking_s, full_s)
        errors = [round(each / measured_s - 1, 4) for each in predicted]
        found.append(
            StepRow(
                cluster=NETWORKS[row["network"]],
                stages=len(step.layers),
                measured_s=measured_s,
                measured_again_s=float(row["again_s"]) if row["again_s"] else None,
                other_program_s=float(row["other_program_s"] or 0) or None,
                predicted_stages_s=round(stages_s, 4),
                predicted_reduction_s=round(reduction_s, 4),
                predicted_s=round(predicted[0], 4),
                error=errors[0],
                blocking_error=errors[1],
                full_bandwidth_error=errors[2],
                source=f"{FOLDER}/{row['source']}",
                **{name: row[name] for name in ("model", "commit")},
                **{
                    name: int(row[name])
                    for name in ("hosts", "tensor_parallel", "replicas", "microbatch", "batch")
                },
            )
        )
    return found


def _percent(error: float) -> str:
    return f"{100 * error:+.0f} %"


def _spread(errors: Sequence[float]) -> str:
    return f"{_percent(median(errors))} ({_percent(min(errors))} to {_percent(max(errors))})"


def summary(rows: Sequence[StepRow]) -> list[tuple[str, ...]]:
    """Errors of all rows, then by cluster and model, without stages and with."""
    parts = {"all": [*rows]}
    for row in rows:
        which = "in stages" if row.stages > 1 else "one stage"
        parts.setdefault(f"{row.cluster}, {row.model}, {which}", []).append(row)
    return [
        (
            part,
            str(len(some)),
            f"{100 * median(abs(row.error) for row in some):.0f} %",
            _spread([row.error for row in some]),
            _spread([row.blocking_error for row in some]),
            _spread([row.full_bandwidth_error for row in some]),
        )
        for part, some in parts.items()
    ]


def _line(row: StepRow) -> tuple[str, ...]:
    seconds = (row.measured_s, row.measured_again_s, row.other_program_s)
    seconds += (row.predicted_stages_s, row.predicted_reduction_s)
    return (
        f"{row.cluster}, {row.model}",
        f"{row.hosts} x {row.tensor_parallel}",
        *map(str, (row.stages, row.replicas, row.microbatch, row.batch)),
        *("" if each is None else f"{each:.3f}" for each in seconds),
        *map(_percent, (row.error, row.blocking_error, row.full_bandwidth_error)),
    )


def main() -> None:
    """results.csv and the block of README.md."""
    environment = Environment.here()
    heading = f"{environment.date}, commit `{environment.commit}`; no clock was read."
    page, steps = Page(HERE, is_kept=True, heading=heading), step_rows()
    errors = ("error", "nothing overlaps", "rings at full bandwidth")
    page.table(
        "Errors of predicted steps (predicted over measured, less one), median and range",
        ("Sailor's runs", "rows", "off, median", *errors),
        summary(steps),
    )
    page.table(
        "Sailor's runs, seconds of a step",
        ("cluster, model", "hosts x cards", "stages", "replicas", "microbatch", "batch")
        + ("measured", "again", "other program", "predicted: stages", "reduction", *errors),
        [_line(row) for row in steps],
    )
    page.keep({"results.csv": steps})


if __name__ == "__main__":
    main()
