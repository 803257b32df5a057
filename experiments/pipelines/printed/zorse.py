"""Blocks that Zorse's authors timed, and plans whose seconds their planner printed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from experiments.common.results import read_csv
from experiments.derived.blocks import SHAPES, unit_of
from experiments.pipelines.compare import ours
from experiments.pipelines.others import Found, Others
from shardhet.apps.plan import DOOR
from shardhet.apps.planning.inputs import load, read_request
from shardhet.config.planning import Inputs, PlannedPrecision, PlannerConf
from shardhet.planner.stages.groups import Positions
from shardhet.pricing.efficiency import efficiency_of
from shardhet.pricing.roofline import Roofline
from shardhet.pricing.setting import Setting
from shardhet.records.kinds import built_in_kinds

HERE = Path(__file__).parent
REPOSITORY = "github.com/benson-guo/zorse"
SEQ_LEN, BATCH = 512, 128  # of all that the repository shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Milliseconds of one block of Llama 3B in float16, as printed."""

    kind: str
    microbatch: int
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    """The same, as derived."""

    kind: str
    microbatch: int
    printed_forward_ms: float
    printed_backward_ms: float
    derived_forward_ms: float
    derived_backward_ms: float
    error: float  # of both together


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan whose seconds Zorse's planner printed; nobody has measured them."""

    cluster: str
    overrides: tuple[str, ...]
    plan: str
    printed_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """Seconds of a step by Zorse's planner and by ours."""

    cluster: str
    plan: str
    printed_s: float
    its_formulation_s: float
    its_stages: int
    ours_s: float
    our_stages: int
    source: str


EXAMPLE = ("model=llama_1b", "model.num_kv_heads=32")
TWO_SITES = ("model=llama_3b",)
PLANNED = (
    Planned(
        cluster="l4_a6000_p40",
        overrides=EXAMPLE,
        plan="no stages",
        printed_s=7.721375,
        source="example/training_config.json, 105c41af8ee6",
    ),
    Planned(
        cluster="p100_v100",
        overrides=TWO_SITES,
        plan="2 layers on the P100, 24 on the V100",
        printed_s=10.839148,
        source="zorse_2nodes.ipynb, b02a7a023f48",
    ),
    Planned(
        cluster="p100_v100",
        overrides=TWO_SITES,
        plan="1, 12, 1 and 12 layers, by turns",
        printed_s=10.724253,
        source="zorse_2nodes.ipynb, b02a7a023f48",
    ),
)


def block_rows() -> Iterator[BlockRow]:
    """All of blocks.csv, priced with the kernels of Zorse's source."""
    unit = unit_of(
        SHAPES["llamav2_3b"], num_tokens=SEQ_LEN, dtype="float16", keeps_scores=False
    )
    for each in read_csv(HERE / "blocks.csv", Block):
        kind = built_in_kinds()[each.kind]
        roofline, efficiency = Roofline.of(kind, "float16"), efficiency_of(kind, "float16")
        forward_ms = 1e3 * roofline.forward_s(unit, each.microbatch, efficiency)
        backward_ms = 1e3 * roofline.backward_s(unit, each.microbatch, efficiency)
        printed_ms = each.forward_ms + each.backward_ms
        yield BlockRow(
            kind=each.kind,
            microbatch=each.microbatch,
            printed_forward_ms=each.forward_ms,
            printed_backward_ms=each.backward_ms,
            derived_forward_ms=round(forward_ms, 2),
            derived_backward_ms=round(backward_ms, 2),
            error=round((forward_ms + backward_ms) / printed_ms - 1, 4),
        )


def planned_rows() -> Iterator[PlannedRow]:
    """The plans that Zorse's repository shows, and ours for the same clusters."""
    for each in PLANNED:
        its, best = _both(each.cluster, each.overrides)
        yield PlannedRow(
            cluster=each.cluster,
            plan=each.plan,
            printed_s=each.printed_s,
            its_formulation_s=_seconds(its),
            its_stages=0 if its is None else len(its.stages),
            ours_s=_seconds(best),
            our_stages=0 if best is None else len(best.stages),
            source=each.source,
        )


@cache
def _both(cluster: str, overrides: tuple[str, ...]) -> tuple[Found | None, Found | None]:
    """The best of Zorse's formulation and ours, without inputs on hosts."""
    conf, inputs = _inputs(cluster, overrides)
    whole = replace(conf, precision=PlannedPrecision(inputs.setting.workload.param_dtype))

    def smaller(positions: Positions) -> Setting:
        return whole.derived(inputs.setting.cluster.only(positions), inputs.name).setting

    others = Others(inputs.setting, smaller, BATCH)
    return others.even_inside(), ours(others, on_host=False)


def _seconds(found: Found | None) -> float:
    return 0.0 if found is None else round(found.step_s, 3)


def _inputs(cluster: str, overrides: tuple[str, ...]) -> tuple[PlannerConf, Inputs]:
    """What ``shardhet plan`` reads."""
    keys = [f"cluster={HERE / cluster}.yaml", "precision=FP16", *overrides]
    keys += [f"seq_len={SEQ_LEN}", "vocab_size=49152", f"global_batch_size={BATCH}"]
    request = read_request(DOOR, keys)
    assert request is not None
    return load(DOOR, request, PlannerConf)
