"""Tiles in plans: where they are chosen, and what they are predicted to need."""

from dataclasses import replace

import pytest
import torch

from shardhet import Cluster, Scenario
from shardhet.models.decoder import Decoder
from shardhet.planner import PlanError, find_plan
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.profiler.describe import describe
from shardhet.records.kinds import described_cluster
from shardhet.records.workload import Workload
from shardhet.simulator.simulation import simulate
from tests.small_models import small_decoder


def long_samples(seq_len: int) -> Workload:
    return Workload.transformer(
        num_layers=4,
        width=512,
        num_heads=8,
        vocab_size=32_000,
        seq_len=seq_len,
        fuses_norms=True,
        param_dtype="bfloat16",
    )


def test_a_plan_has_tiles_where_no_sample_fits_without() -> None:
    cluster = Cluster.named(described_cluster("3090x2"))

    def scenario(workload: Workload) -> Scenario:
        return Scenario(cluster, workload, derive_profile(cluster, workload))

    of_long = scenario(long_samples(65_536))
    plan = find_plan(of_long, global_batch_size=2)
    assert all(rank.tiled_units == ("*",) for rank in plan.ranks if rank.microbatch_sizes)
    assert "in tiles of 2,048 tokens" in str(plan)
    model = CostModel(of_long).for_plan(plan)
    cost = model.predict(plan)
    without = replace(plan, ranks=tuple(replace(r, tiled_units=()) for r in plan.ranks))
    of_without = model.predict(without)
    assert cost.step_time_s > of_without.step_time_s  # tiles are recomputed
    timeline = simulate(plan, of_long)
    assert timeline.step_time_s == pytest.approx(cost.step_time_s)
    for mine, other in zip(cost.ranks, of_without.ranks, strict=True):
        assert mine.memory.total_bytes < mine.memory_budget_bytes < other.memory.total_bytes
    kinds = tuple(replace(kind, token_wise=None) for kind in of_long.workload.kinds)
    with pytest.raises(PlanError, match="no single sample"):
        find_plan(scenario(replace(of_long.workload, kinds=kinds)), global_batch_size=2)
    short = find_plan(scenario(long_samples(2048)), global_batch_size=2)
    assert not any(rank.tiled_units for rank in short.ranks)


def test_a_model_is_described_in_tiles() -> None:
    """Its kinds say what a decoder of that shape does."""
    seq_len = 16_384
    config = small_decoder(seq_len=seq_len, num_layers=1)
    with torch.device("meta"):
        model = Decoder(config)
    example = torch.zeros(1, seq_len, dtype=torch.int64)
    found = describe(model, (example, example), param_dtype=torch.bfloat16)
    expected = Workload.transformer(
        num_layers=1,
        width=config.width,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        hidden_width=config.hidden_width,
        vocab_size=config.vocab_size,
        seq_len=seq_len,
        param_dtype="bfloat16",
    )
    for kinds in list(zip(found.kinds, expected.kinds, strict=True))[1:]:  # block and head
        mine, other = (kind.token_wise for kind in kinds)
        assert mine is not None
        assert other is not None
        assert mine.forward_flops == other.forward_flops
        assert mine.activation_bytes == pytest.approx(other.activation_bytes, rel=0.05)
