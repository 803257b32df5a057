"""Samples of 131,072 tokens on three clusters: context groups as planned, beside tensor groups.

python -m experiments.long_samples.tensor_groups.run            # writes results.csv, README
python -m experiments.long_samples.tensor_groups.run --quick    # one cluster; keeps nothing
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.common.results import Bar, Page, parser_of
from shardhet import Cluster, Plan, Setting
from shardhet.planner import Demands, PlanError, solve
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.records.workload import Workload

HERE = Path(__file__).parent
GIB = 2**30
NUM_TOKENS, NUM_SAMPLES, WIDTH = 131_072, 2, 2048
# Seconds of a step in the page of the first try (context groups with tiles, nothing on hosts).
FIRST_TRY_S = {"4090 + 2 x 3090": 99.0, "2 A100-40 + 2 T4": 45.8, "8 cards": 18.9}
FILES = dict(zip(FIRST_TRY_S, ("c1", "c2", "c3"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cluster."""

    cluster: str
    alone_s: float  # without groups; 0: nothing fits
    groups: str
    context_s: float
    exchanged_s: float  # of that, keys and values
    tensor_s: float  # the same plan, but for what is sent and that all is computed once
    fullest: float  # of a budget


def exchanged_s(model: CostModel, plan: Plan) -> tuple[float, float]:
    """Seconds of the slowest group in which keys and values are exchanged; and of all-reduces.

    A tensor group sums up what attention and the MLP return, twice in forward and twice in
    backward of a block, and twice more where it is recomputed.  An all-reduce is a reduction
    and a gather of the activations of the whole sample.
    """
    found = [(0.0, 0.0)]
    itemsize, workload = model.workload.param_itemsize, model.workload
    blocks = [unit for unit in workload.units if workload.kind_of(unit).kv_bytes]
    for group in plan.context_groups or ():
        member, rank = model.member_at(plan, group[0]), plan.ranks[group[0]]
        assert member is not None
        again = sum(rank.recomputes(unit.fqn) for unit in blocks)
        number = rank.num_microbatches * plan.num_rounds
        gather_s, reduce_s = member.exchange_s(workload.kind_of(blocks[0]).kv_bytes)
        context_s = (len(blocks) + again) * gather_s + len(blocks) * reduce_s
        all_reduce_s = sum(member.exchange_s(NUM_TOKENS * WIDTH * itemsize))
        tensor_s = (4 * len(blocks) + 2 * again) * all_reduce_s
        found.append((number * context_s, number * tensor_s))
    return max(found)


def planned(name: str) -> Row:
    """Both, of one cluster."""
    cluster = Cluster.load(HERE / "clusters" / f"{FILES[name]}.yaml")
    workload = Workload.transformer(
        num_layers=22,
        width=WIDTH,
        num_heads=32,
        num_kv_heads=4,
        hidden_width=5632,
        vocab_size=32_000,
        seq_len=NUM_TOKENS,
        fuses_norms=True,
        param_dtype="float16" if name == "2 A100-40 + 2 T4" else "bfloat16",
    )
    setting = Setting(cluster, workload, derive_profile(cluster, workload))
    try:
        alone = solve(setting, global_batch_size=NUM_SAMPLES, is_bounded=False)
        alone_s = alone.predicted.step_time_s
    except PlanError:
        alone_s = 0.0
    found = solve(
        setting,
        global_batch_size=NUM_SAMPLES,
        demands=Demands(may_share_samples=True),
        is_bounded=False,
    )
    plan, step_s = found.plan, found.predicted.step_time_s
    sent_s, reduced_s = exchanged_s(CostModel(setting).for_plan(plan), plan)
    return Row(
        cluster=name,
        alone_s=alone_s,
        groups=" ".join(
            "-".join(f"{plan.ranks[i].token_share or 1:.0%}" for i in group)
            for group in plan.context_groups or ()
        ),
        context_s=step_s,
        exchanged_s=sent_s,
        tensor_s=step_s - sent_s + reduced_s,
        fullest=max(
            each.memory.total_bytes / each.memory_budget_bytes for each in found.predicted.ranks
        ),
    )


def main() -> None:
    """Run what the command line says."""
    options = parser_of(__doc__, "one cluster; keeps nothing").parse_args()
    page = Page(HERE, is_kept=not options.quick)
    rows = [planned(name) for name in list(FILES)[: 1 if options.quick else None]]
    page.table(
        f"llama_1b, {NUM_SAMPLES} samples of {NUM_TOKENS:,} tokens a step, predicted seconds",
        [
            "",
            "whole samples",
            "context groups",
            "exchanged",
            "tensor groups",
            "tokens",
            "fullest",
        ],
        [
            [
                row.cluster,
                f"{row.alone_s:.1f}" if row.alone_s else "none fits",
                f"{row.context_s:.1f}",
                f"{row.exchanged_s:.2f}",
                f"{row.tensor_s:.1f}",
                row.groups,
                f"{row.fullest:.0%}",
            ]
            for row in rows
        ],
    )
    bars = [
        Bar(
            claim=f"{row.cluster}: seconds over those of the first try",
            measured=row.context_s / FIRST_TRY_S[row.cluster],
            at_most=1.05,
        )
        for row in rows
    ]
    bars += [
        Bar(
            claim=f"{row.cluster}: seconds of tensor groups over those of context groups",
            measured=row.tensor_s / row.context_s,
            at_least=0.97,  # below, they would be worth it
        )
        for row in rows
    ]
    page.bars(bars)
    page.keep({"results.csv": rows})


if __name__ == "__main__":
    main()
