"""What is predicted for: clusters and models as ``shardhet plan`` reads them, and batches."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path

from experiments.published.blocks import KIND_BY_GPU, Blocks, with_published_blocks
from shardhet.apps.plan import DOOR
from shardhet.apps.planning.inputs import Request, load
from shardhet.config.planning import Inputs, PlannerConf, register_planning_schemas
from shardhet.planner.advice.fewer import node_type
from shardhet.records.cluster import Node
from shardhet.records.profiles import Collectives, Source

DERIVED = "derived"
MEASURED = "measured blocks, derived links"
NO_LINKS = "measured blocks, links not counted"
PARTS = (MEASURED, NO_LINKS, DERIVED)

PUBLISHED_CLUSTER = "l4_a6000_p40_p100"
CLUSTERS = (
    "rtx4090_2x3090",
    PUBLISHED_CLUSTER,
    "h100_a100_20",
    "a10g_v100_t4_64",
    "a100_a10g_v100_t4_64",
    "two_regions_128",
)
MODELS = (
    "bert_large",
    "vit_g",
    "llama_1b",
    "gpt_1_3b",
    "gpt_2_7b",
    "llama_3b",
    "gpt_6_7b",
    "llama_7b",
    "llama_13b",
)
BATCHES = (128, 256)
FEWER_BATCH = 256  # at which leaving nodes out is tried
MANY_DEVICES, LARGE_BATCHES = 64, (512, 2048)  # 2048 x 2048 tokens: what large models take

# Shapes of the published blocks, as changes to a model of conf/.  Text is 512 tokens and
# 49152 words, images are 384 pixels in patches of 16: so say the parameters that the tables
# count (model_memory.json), and no other size explains them.
TEXT = ("seq_len=512", "vocab_size=49152")
IMAGES = ("model.usual_image_side=384", "model.patch_side=16")
PUBLISHED_MODELS: dict[str, tuple[str, ...]] = {
    "bert_large": ("model=bert_large", *TEXT),
    "bert_xlarge": (
        "model=bert_large",
        "model.width=1536",
        "model.num_layers=36",
        "model.num_heads=24",
        "model.hidden_width=6144",
        *TEXT,
    ),
    "vit_g": ("model=vit_g", *IMAGES),
    "vit_e": (
        "model=vit_g",
        "model.width=1792",
        "model.num_layers=56",
        "model.hidden_width=15360",
        *IMAGES,
    ),
    "llama_tiny": ("model=llama_1b", "model.num_kv_heads=32", *TEXT),
    "gpt_1.3b": ("model=gpt_1_3b", *TEXT),
    "gpt_2.7b": ("model=gpt_2_7b", *TEXT),
    "llama_3b": ("model=llama_3b", *TEXT),
    "gpt_6.7b": ("model=gpt_6_7b", *TEXT),
    "llama_7b": ("model=llama_7b", *TEXT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cluster, model and batch; ``part`` says where the seconds come from."""

    part: str
    cluster: str
    model: str
    global_batch_size: int


def cases() -> Iterator[Case]:
    """All of them, in the order of the tables."""
    for part in (MEASURED, NO_LINKS):
        for model in PUBLISHED_MODELS:
            for batch in BATCHES:
                yield Case(
                    part=part, cluster=PUBLISHED_CLUSTER, model=model, global_batch_size=batch
                )
    for cluster in CLUSTERS:
        for model in MODELS:
            for batch in batches(
                described(cluster, f"model={model}").setting.cluster.world_size
            ):
                yield Case(part=DERIVED, cluster=cluster, model=model, global_batch_size=batch)


def batches(world_size: int) -> tuple[int, ...]:
    """Global batches that are planned for on so many devices."""
    return (*BATCHES, *LARGE_BATCHES) if world_size >= MANY_DEVICES else BATCHES


def inputs_of(case: Case, folder: Path) -> Inputs:
    """Cluster, workload and profile; published tables are read from ``folder``."""
    if case.part == DERIVED:
        return described(case.cluster, f"model={case.model}")
    inputs = derived_beside(case)
    profile = with_published_blocks(
        inputs.setting.profile, published_blocks(case.model, folder)
    )
    if case.part == NO_LINKS:
        nothing = Collectives(source=Source.IMPORTED, points=(), note="not counted")
        profile = replace(profile, collectives=nothing)
    return replace(inputs, setting=replace(inputs.setting, profile=profile))


def derived_beside(case: Case) -> Inputs:
    """The same published model with every second derived from specifications."""
    return described(case.cluster, "precision=FP32", *PUBLISHED_MODELS[case.model])


def described(cluster: str, *overrides: str) -> Inputs:
    """What ``shardhet plan cluster=... ...`` plans for."""
    return loaded(cluster, *overrides)[1]


def on_fewer_nodes(case: Case) -> Iterator[tuple[str, Inputs]]:
    """The same on some of the cluster's nodes: every choice of types of node but all.

    The dtype follows the devices that are left, as it does on the command line.
    """
    conf, inputs = loaded(case.cluster, f"model={case.model}")
    nodes_by_type: dict[str, list[Node]] = {}
    for node in inputs.setting.cluster.nodes:
        nodes_by_type.setdefault(node_type(node), []).append(node)
    for number in range(1, len(nodes_by_type)):
        for types in combinations(nodes_by_type, number):
            nodes = tuple(node for each in types for node in nodes_by_type[each])
            left = replace(inputs.setting.cluster, nodes=nodes)
            yield " + ".join(types), conf.derived(left, case.model)


@cache
def loaded(cluster: str, *overrides: str) -> tuple[PlannerConf, Inputs]:
    """The configuration and the inputs of ``shardhet plan`` for a described cluster."""
    register_planning_schemas()
    request = Request((f"cluster=described/{cluster}", *overrides), (), None)
    return load(DOOR, request, PlannerConf)


def published_blocks(model: str, folder: Path) -> Blocks:
    """Milliseconds of one block by GPU: the table's entries for 512 tokens in float32."""
    table = _json(folder / "model_latencies.json")[f"deepspeed{model}"]
    return {gpu: table[gpu]["512"]["float32"] for gpu in KIND_BY_GPU}


def published_numel(model: str, folder: Path) -> int:
    """Parameters of the whole model, as the published statistics count them."""
    return int(_json(folder / "model_stats.json")[f"deepspeed{model}"]["total_parameters"])


@cache
def _json(path: Path) -> dict:
    return json.loads(path.read_text())


def published_memory_gib(model: str, folder: Path) -> list[float]:
    """GiB of compute at batch 1, 2, ...: of the published cluster where it was measured."""
    table = _json(folder / "model_memory.json")
    for cluster in ("paper", "paper_4gpu", "aws-16gpu"):
        curves = table[cluster].get(f"deepspeed{model}", {}).get("profiled_compute_memory", {})
        if "float32" in curves:
            return curves["float32"]
    raise ValueError(f"inputs: no published memory of {model!r} in float32. Leave it out.")
