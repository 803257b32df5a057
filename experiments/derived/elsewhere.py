"""Small microbatches and whole steps that were timed elsewhere, beside what is derived.

Blocks are timed by the clock of the host, from launching the first kernel until the last has
run, and not by adding kernels.  None of these figures was fitted, but the two of NVIDIA's T4
and V100 and the one of ours say how long a launch takes (``shardhet.pricing.derive``).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from experiments.derived.blocks import VOCAB_SIZE
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.efficiency import efficiency_of
from shardhet.pricing.roofline import Roofline
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Link, Node
from shardhet.records.kinds import built_in_kinds, link_named
from shardhet.records.plan import Plan
from shardhet.records.workload import Workload
from shardhet.simulator.simulation import simulate

GPT_2 = {
    "num_layers": 24,
    "width": 1024,
    "num_heads": 16,
    "vocab_size": VOCAB_SIZE,
    "seq_len": 1024,
    "is_gated": False,
    "has_biases": True,
}
OURS = {  # experiments/gpu
    "num_layers": 24,
    "width": 2048,
    "num_heads": 32,
    "hidden_width": 5120,
    "vocab_size": 32768,
    "seq_len": 2048,
}
LLAMA_8B = {
    "num_layers": 32,
    "width": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "hidden_width": 14336,
    "vocab_size": 128256,
    "seq_len": 2048,
}
QWEN_1_7B = {
    "num_layers": 28,
    "width": 2048,
    "num_heads": 16,
    "num_kv_heads": 8,
    "hidden_width": 6144,
    "vocab_size": 151936,
    "seq_len": 2048,
}
AMP = "github.com/DachengLi1/AMP, src/known_cost, mean of 24 blocks, 72eeea4"
V100, T4, H200 = "Tesla V100-SXM2-16GB", "Tesla T4", "NVIDIA H200"
FORWARD, BOTH = "forward", "forward and backward"
BLOCKS = (  # kind, shape, dtype, samples, what was timed, milliseconds, source
    (V100, GPT_2, "float16", 1, FORWARD, 3.919, f"{AMP} (gpt2_P3_1; 4.5 on each of four)"),
    (T4, GPT_2, "float16", 1, FORWARD, 5.470, f"{AMP} (gpt2_G4_1; 5.6 on each of four)"),
    (H200, OURS, "bfloat16", 2, BOTH, 3.729, "experiments/gpu, 358 ms for 96"),
)
ROUNDPIPE = "github.com/ITcarrot/RoundPipe-artifact, exp/raw-data.csv and fsdp/run.sh, e44270a"
GEFORCE, A800 = "NVIDIA GeForce RTX 4090", "NVIDIA A800-SXM4-80GB"
STEPS = (  # kind, link, model, shape, samples, microbatches, tokens/s of eight cards
    (GEFORCE, "PCIe 4 x16", "Llama 3.1 8B", LLAMA_8B, 2, 1, 1923.77),
    (GEFORCE, "PCIe 4 x16", "Qwen3 1.7B", QWEN_1_7B, 2, 32, 13277.07),
    (A800, "200 GB/s", "Llama 3.1 8B", LLAMA_8B, 8, 4, 29148.46),
    (A800, "200 GB/s", "Qwen3 1.7B", QWEN_1_7B, 16, 4, 85829.26),
)
NUM_CARDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A transformer block in a small microbatch, in milliseconds."""

    kind: str
    samples: int
    timed: str
    source: str
    printed: float
    of_kernels: float  # by the roofline alone
    derived: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of FSDP on eight cards, blocks recomputed and everything reduced in float16."""

    kind: str
    model: str
    samples: int
    microbatches: int
    printed: float  # tokens/s
    derived: float

    @property
    def part(self) -> float:
        """Of what was printed."""
        return self.derived / self.printed


def _cluster(name: str, number: int, link: str = "PCIe 3 x16") -> Cluster:
    """So many cards in one host, with room for anything."""
    device = DeviceSpec(kind=name, memory_capacity_bytes=2**40)
    joined = Link(**link_named(link, "link"))
    node = Node(host="a", devices=(device,) * number, link=joined)
    return Cluster(nodes=(node,), kinds=(built_in_kinds()[name],))


def blocks() -> Iterator[Block]:
    """What a block takes, with and without the launches of its kernels."""
    for name, shape, dtype, samples, timed, printed, source in BLOCKS:
        workload = Workload.transformer(**shape, fuses_norms=True, param_dtype=dtype)
        cluster, unit = _cluster(name, 1), workload.kind_by_name["block"]
        kind = cluster.kind(name)
        efficiency, roofline = efficiency_of(kind, dtype), Roofline.of(kind, dtype)
        profile = derive_profile(cluster, workload).unit(name, "block")
        seconds = [roofline.forward_s(unit, samples, efficiency), profile.forward_s.at(samples)]
        if timed == BOTH:
            seconds[0] += roofline.backward_s(unit, samples, efficiency)
            seconds[1] += profile.backward_s.at(samples)
        yield Block(
            kind=name,
            samples=samples,
            timed=timed,
            source=source,
            printed=printed,
            of_kernels=1000 * seconds[0],
            derived=1000 * seconds[1],
        )


def steps() -> Iterator[Step]:
    """What the step of a plan by hand is predicted to take, in tokens/s."""
    for name, link, model, shape, samples, microbatches, printed in STEPS:
        workload = Workload.transformer(
            **shape, fuses_norms=True, param_dtype="float16", reduce_dtype="float16"
        )
        cluster = _cluster(name, NUM_CARDS, link)
        plan = Plan.by_hand(
            microbatch_sizes=[samples] * NUM_CARDS,
            num_rounds=microbatches,
            reduce_each_round=False,
            recompute=[["blocks.*"]] * NUM_CARDS,
            devices=cluster.devices,
        )
        profile = derive_profile(cluster, workload, fp16_accumulation=True)
        step_s = simulate(plan, Scenario(cluster, workload, profile)).step_time_s
        tokens = NUM_CARDS * samples * microbatches * shape["seq_len"]
        yield Step(
            kind=name,
            model=model,
            samples=samples,
            microbatches=microbatches,
            printed=printed,
            derived=tokens / step_s,
        )
