"""Configurations that others have run: would a plan be refused on their cards?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.derived.blocks import IMAGE_TOKENS, VIT, VOCAB_SIZE, Timed, kinds_by_name
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import RESERVED_BYTES, derive_profile
from shardhet.pricing.setting import Setting
from shardhet.records.cluster import USABLE_MEMORY_FRACTION, Cluster, DeviceSpec, Link, Node
from shardhet.records.plan import EVERY_UNIT, Plan
from shardhet.records.workload import Workload

GIB = 2**30
WEIGHT_AND_GRADIENT = 8  # bytes of a parameter that no optimizer is stepped for
LINK = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e10)  # no figure here depends on it
TINY_LLAMA = {
    "num_layers": 22,
    "width": 2048,
    "num_heads": 32,
    "num_kv_heads": 4,
    "hidden_width": 5632,
    "vocab_size": 32000,
    "seq_len": 2048,
}
GPT_124M = {
    "num_layers": 12,
    "width": 768,
    "num_heads": 12,
    "vocab_size": 50304,
    "seq_len": 1024,
    "is_gated": False,
    "has_biases": True,
}
GPT_2_7B = {
    "num_layers": 32,
    "width": 2560,
    "num_heads": 80,
    "vocab_size": VOCAB_SIZE,
    "seq_len": 512,
    "is_gated": False,
    "has_biases": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one device needs, beside what a plan may use of it."""

    configuration: str
    device: str
    recomputes: bool
    needs_gib: float
    budget_gib: float

    @property
    def part(self) -> float:
        """Of the budget; a plan that needs more than 1 is refused."""
        return self.needs_gib / self.budget_gib


def demands(blocks: Sequence[Timed]) -> Iterator[Demand]:
    """Whole trainings, then every block at the largest size that was timed."""
    a100 = "NVIDIA A100-SXM4-40GB"
    tiny = Workload.transformer(**TINY_LLAMA, param_dtype="bfloat16", fuses_norms=True)
    yield from _of_plan(
        "TinyLlama 1.1B, 16 GPUs, 8 x 2048 tokens each", tiny, [a100] * 16, [8] * 16
    )
    small = Workload.transformer(**GPT_124M, param_dtype="bfloat16")
    yield from _of_plan(
        "GPT-2 124M (nanoGPT), 8 GPUs, 12 x 1024 tokens each", small, [a100] * 8, [12] * 8
    )
    yield from _of_plan(
        "GPT 2.7B, Cephalo's published plan, batches 13, 12, 34, 5",
        Workload.transformer(**GPT_2_7B, param_dtype="float16"),
        ["NVIDIA L4", "NVIDIA L4", "NVIDIA RTX A6000", "Tesla P40"],
        [13, 6, 34, 5],
        num_microbatches=[1, 2, 1, 1],
        recompute=[EVERY_UNIT] * 4,
    )
    for block in blocks:
        yield _of_block(block)


def _of_plan(
    name: str,
    workload: Workload,
    kinds: Sequence[str],
    sizes: Sequence[int],
    *,
    num_microbatches: Sequence[int] | None = None,
    recompute: bool | Sequence[Sequence[str]] = False,
) -> Iterator[Demand]:
    """One demand per kind of device, with even shares of the state."""
    known = [kinds_by_name()[kind] for kind in kinds]
    devices = tuple(
        DeviceSpec(kind=kind.kind, memory_capacity_bytes=kind.memory_capacity_bytes)
        for kind in known
    )
    cluster = Cluster(
        nodes=(Node(host="a", devices=devices, link=LINK),), kinds=tuple(dict.fromkeys(known))
    )
    plan = Plan.by_hand(
        microbatch_sizes=sizes,
        num_microbatches=num_microbatches,
        state_shares=[1 / len(kinds)] * len(kinds),
        recompute=recompute,
        devices=devices,
    )
    setting = Setting(cluster, workload, derive_profile(cluster, workload))
    found = {}
    for kind, rank in zip(kinds, CostModel(setting).predict(plan).ranks, strict=True):
        found.setdefault(kind, rank)
    for kind, rank in found.items():
        yield Demand(
            configuration=name,
            device=kind,
            recomputes=bool(recompute),
            needs_gib=_short(rank.memory.total_bytes / GIB),
            budget_gib=_short(rank.memory_budget_bytes / GIB),
        )


def _of_block(block: Timed) -> Demand:
    """The block and its embedding with weights and gradients, as the authors timed it."""
    size, workload = max(block.seconds_by_size), block.own_workload
    kind, unit = kinds_by_name()[block.group[0]], workload.kind_by_name["block"]
    rows = IMAGE_TOKENS if block.shape.family == VIT else VOCAB_SIZE  # of the embedding
    copies = workload.param_itemsize * (block.dtype != "float32")
    numel = unit.numel + rows * block.shape.width
    of_samples = 3 * unit.input_bytes + unit.activation_bytes + unit.transient_bytes
    nbytes = RESERVED_BYTES + numel * (WEIGHT_AND_GRADIENT + copies) + size * of_samples
    what = f"{block.seq_len} tokens, {block.dtype}, microbatch {size}"
    return Demand(
        configuration=f"one block of {block.model}, {what}",
        device=kind.kind,
        recomputes=False,
        needs_gib=_short(nbytes / GIB),
        budget_gib=_short(USABLE_MEMORY_FRACTION * kind.memory_capacity_bytes / GIB),
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")
