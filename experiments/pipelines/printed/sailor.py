"""Steps that Sailor's authors measured, and what shardhet predicts for them.

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
from typing import NamedTuple

from shardhet.pricing.derive import derive_collectives
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node
from shardhet.simulator.pipeline import StageTimes, hop_over, pipeline_s

HERE = Path(__file__).parent
FOLDER = "sailor/Planner/simulations/validation"  # of github.com/saha18uiuc/sailor, a fork
SEQ_LEN, ITEMSIZE = 2048, 4  # run_opt.slurm; activations are counted in float32
LATENCY_S = 5e-5  # between hosts: that of cluster/described, for none is published


class Model(NamedTuple):
    """What of a model its steps depend on; bytes of parameters over all cards of a group."""

    width: int
    embedding_bytes: int
    block_bytes: int
    head_bytes: int


MODELS = {  # Metis/profiles/*/mbs2_tmp2.json and mbs4_tmp4.json, times the cards
    "OPT-350": Model(1024, 223_346_688, 50_409_472, 206_585_856),
    "GPT-Neo-2.7": Model(2560, 602_931_200, 314_890_240, 81_920),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One configuration, as it was published, and the seconds that it took."""

    network: str
    model: str
    hosts: int
    tensor_parallel: int
    replicas: int
    microbatch: int
    batch: int
    layers: tuple[int, ...]  # of each stage; the embedding and the head count as layers
    kinds: tuple[tuple[str, ...], ...]  # of each stage's replicas
    measured_s: float
    again_s: float | None  # in a later commit of the same file
    other_program_s: float | None  # by Aceso's runtime, with its own layers per stage
    source: str
    commit: str

    @property
    def num_rounds(self) -> int:
        """Microbatches of one replica."""
        return self.batch // (self.microbatch * self.replicas)


class Layers(NamedTuple):
    """Seconds of each layer of a model on a group of cards: forward and backward."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float  # of the optimizer, per layer


LayersOf = dict[tuple[str, str, int, int], Layers]  # by model, kind, cards and microbatch
LinkOf = dict[tuple[str, int, str, str], Link]  # by network, cards and two kinds in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Seconds of a step."""

    stages_s: float  # until the last stage has computed
    reduction_s: float
    full_reduction_s: float  # if a ring reached all of the links' bandwidth
    blocking_s: float  # of the stages, if nothing is computed while messages are sent

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.stages_s + self.reduction_s

    @property
    def blocking_step_s(self) -> float:
        """All of it, without overlap."""
        return self.blocking_s + self.reduction_s

    @property
    def full_step_s(self) -> float:
        """All of it, with rings at full bandwidth."""
        return self.stages_s + self.full_reduction_s


def read_steps() -> list[Step]:
    """steps.csv."""
    return [_step(row) for row in _rows("steps.csv")]


def _step(row: dict[str, str]) -> Step:
    layers = tuple(map(int, row["layers"].split()))
    replicas = int(row["replicas"])
    kinds = tuple(tuple(each.split("/")) for each in row["kinds"].split())
    if len(kinds) == 1 and len(kinds[0]) == 1:
        kinds = (kinds[0] * replicas,) * len(layers)
    return Step(
        network=row["network"],
        model=row["model"],
        hosts=int(row["hosts"]),
        tensor_parallel=int(row["tensor_parallel"]),
        replicas=replicas,
        microbatch=int(row["microbatch"]),
        batch=int(row["batch"]),
        layers=layers,
        kinds=kinds,
        measured_s=float(row["measured_s"]),
        again_s=float(row["again_s"]) if row["again_s"] else None,
        other_program_s=float(row["other_program_s"]) if row["other_program_s"] else None,
        source=f"{FOLDER}/{row['source']}",
        commit=row["commit"],
    )


def read_layers() -> LayersOf:
    """layers.csv."""
    number_of = {"OPT-350": 26, "GPT-Neo-2.7": 34}
    found = {}
    for row in _rows("layers.csv"):
        blocks = number_of[row["model"]] - 3
        seconds = [
            (
                float(row[f"embedding_{phase}_s"]),
                float(row[f"first_{phase}_s"]),
                *[float(row[f"block_{phase}_s"])] * blocks,
                float(row[f"head_{phase}_s"]),
            )
            for phase in ("forward", "backward")
        ]
        cards, size = int(row["tensor_parallel"]), int(row["microbatch"])
        found[row["model"], row["kind"], cards, size] = Layers(
            *seconds, update_s=float(row["update_s"])
        )
    return found


def read_links() -> LinkOf:
    """links.csv: what all cards of a group reach together."""
    return {
        (row["network"], int(row["tensor_parallel"]), row["one"], row["other"]): Link(
            latency_s=LATENCY_S, bandwidth_bytes_per_s=float(row["bytes_per_s"])
        )
        for row in _rows("links.csv")
    }


def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def predicted(step: Step, layers_of: LayersOf, links: LinkOf) -> Predicted:
    """A step of the published configuration.

    Replicas are pipelines of their own with equal batches, whose gradients are reduced and
    whose parameters are gathered once, when the slowest has ended.
    """
    times = [
        [_stage_times(step, layers_of, stage, replica) for stage in range(len(step.layers))]
        for replica in range(step.replicas)
    ]
    hops_s = [
        [
            hop_over((_link(step, links, *kinds), 1), _message_bytes(step)).seconds
            for kinds in pairwise(stage[replica] for stage in step.kinds)
        ]
        for replica in range(step.replicas)
    ]
    held = [min(step.num_rounds, len(step.layers) - i) for i in range(len(step.layers))]
    both = []
    for is_blocking in (False, True):
        seconds = []
        for stages, sent_s in zip(times, hops_s, strict=True):
            priced = _with_messages(stages, sent_s) if is_blocking else stages
            free = [0.0] * len(sent_s) if is_blocking else sent_s
            seconds.append(pipeline_s(priced, free, in_flight=held, num_rounds=step.num_rounds))
        both.append(max(seconds))
    return Predicted(
        stages_s=both[0],
        blocking_s=both[1],
        reduction_s=_slowest_reduction_s(step, links, None),
        full_reduction_s=_slowest_reduction_s(step, links, 1.0),
    )


def _stage_times(step: Step, layers_of: LayersOf, stage: int, replica: int) -> StageTimes:
    key = (step.model, step.kinds[stage][replica], step.tensor_parallel, step.microbatch)
    layers, first = layers_of[key], sum(step.layers[:stage])
    own = slice(first, first + step.layers[stage])
    return StageTimes(
        forward_s=sum(layers.forward_s[own]),
        backward_s=sum(layers.backward_s[own]),
        once_s=step.layers[stage] * layers.update_s,
    )


def _with_messages(stages: Sequence[StageTimes], hops_s: Sequence[float]) -> list[StageTimes]:
    """Stages that wait for every message that they send or get."""
    around = [0.0, *hops_s, 0.0]
    waits = [before + after for before, after in pairwise(around)]
    return [
        replace(each, forward_s=each.forward_s + wait_s, backward_s=each.backward_s + wait_s)
        for each, wait_s in zip(stages, waits, strict=True)
    ]


def _message_bytes(step: Step) -> int:
    """Each card of a group sends its part of the tensor, all of them together all of it."""
    return step.microbatch * SEQ_LEN * MODELS[step.model].width * ITEMSIZE


def _link(step: Step, links: LinkOf, one: str, other: str) -> Link:
    return links[step.network, step.tensor_parallel, min(one, other), max(one, other)]


def _slowest_reduction_s(step: Step, links: LinkOf, part: float | None) -> float:
    return max(_reduction_s(step, links, i, part) for i in range(len(step.layers)))


def _reduction_s(step: Step, links: LinkOf, stage: int, part: float | None) -> float:
    """Seconds of a ring over the replicas of a stage, there and back.

    It gets this part of the links' bandwidth; None: as much as ``shardhet plan`` takes.
    """
    kinds = step.kinds[stage]
    if len(kinds) == 1:
        return 0.0
    slowest = min(
        (_link(step, links, *pair) for pair in pairwise(kinds)),
        key=lambda link: link.bandwidth_bytes_per_s,
    )
    nodes = tuple(Node(host=str(i), devices=(DeviceSpec(),)) for i in range(len(kinds)))
    ring = derive_collectives(Cluster(nodes=nodes, between_nodes=slowest), part)
    assert ring.gather_s is not None
    assert ring.reduce_s is not None
    nbytes = _param_bytes(step, stage)
    return ring.gather_s.at(nbytes) + ring.reduce_s.at(nbytes)


def _param_bytes(step: Step, stage: int) -> int:
    model, number = MODELS[step.model], step.layers[stage]
    is_first, is_last = stage == 0, stage == len(step.layers) - 1
    nbytes = (number - is_first - is_last) * model.block_bytes
    return nbytes + is_first * model.embedding_bytes + is_last * model.head_bytes
