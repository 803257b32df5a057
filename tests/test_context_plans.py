"""Context groups in plans: what they are predicted to take, and where they are chosen."""

from dataclasses import replace

import pytest
import torch

from shardhet import Cluster, Plan, Scenario
from shardhet.models.decoder import Decoder
from shardhet.planner import Constraints, find_plan, solve
from shardhet.pricing.cost import CostModel
from shardhet.pricing.derive import derive_profile
from shardhet.profiler.describe import describe
from shardhet.records.kinds import described_cluster
from shardhet.records.profiles import (
    CollectivePoint,
    Collectives,
    ComputePoint,
    DeviceProfile,
    Profile,
    Source,
    Timing,
    UnitProfile,
)
from shardhet.records.workload import Unit, UnitKind, Workload
from shardhet.simulator.simulation import simulate
from shardhet.training.slow_devices import of_any_device
from tests.context_cases import VOCAB_SIZE, Case
from tests.small_models import small_decoder
from tests.worlds import on_ranks

KIND = UnitKind(
    name="block",
    param_shapes=((8, 8),),
    forward_flops=1000,
    backward_flops=2000,
    input_bytes=100,
    activation_bytes=400,
    transient_bytes=60,
    kv_bytes=4000,
)


SMALL = Workload(
    kinds=(KIND,),
    units=tuple(Unit(fqn=f"blocks.{i}", kind="block") for i in range(2)),
    tokens_per_sample=100,
)


def made_up(workload: Workload = SMALL, *, link_s: float = 1e-4) -> Scenario:
    """Two equal devices: a sample takes 1 s in forward and 2 s in backward of a unit; gathers
    take ``link_s`` per byte and reductions twice that.
    """
    cluster = Cluster.named(described_cluster("3090x2"))

    def unit(kind: str) -> UnitProfile:
        points = tuple(
            ComputePoint(
                microbatch_size=size,
                forward=Timing.single(1.0 * size),
                backward=Timing.single(2.0 * size),
            )
            for size in (1, 2)
        )
        return UnitProfile(unit_kind=kind, points=points)

    links = tuple(
        CollectivePoint(
            nbytes=n, gather=Timing.single(link_s * n), reduce=Timing.single(2 * link_s * n)
        )
        for n in (10, 10_000)
    )
    device = DeviceProfile(
        device_kind=str(cluster.devices[0].kind),
        source=Source.MEASURED,
        units=tuple(unit(kind.name) for kind in workload.kinds),
    )
    collectives = Collectives(source=Source.MEASURED, points=links)
    return Scenario(cluster, workload, Profile(devices=(device,), collectives=collectives))


def test_what_is_not_known_is_refused() -> None:
    scenario = made_up()
    kinds = (replace(KIND, kv_bytes=0),)
    scenario = replace(scenario, workload=replace(scenario.workload, kinds=kinds))
    plan = Plan.by_hand(
        microbatch_sizes=[1, 1], devices=scenario.cluster.devices, context_groups=[[0, 1]]
    )
    with pytest.raises(ValueError, match="how large keys and values are"):
        CostModel(scenario).predict(plan)


def test_the_keys_and_values_of_a_model_are_counted() -> None:
    config = small_decoder(seq_len=64, num_layers=1)
    with torch.device("meta"):
        model = Decoder(config)
    example = torch.zeros(1, 64, dtype=torch.int64)
    found = describe(model, (example, example), param_dtype=torch.bfloat16)
    kv_width = config.width * (config.num_kv_heads or config.num_heads) // config.num_heads
    assert {k.name: k.kv_bytes for k in found.kinds if k.kv_bytes} == {
        found.kinds[1].name: 2 * 2 * 64 * kv_width
    }


def of_decoder(num_tokens: int) -> Workload:
    config = small_decoder(vocab_size=VOCAB_SIZE, num_heads=4, num_kv_heads=2)
    with torch.device("meta"):
        model = Decoder(config)
    example = torch.zeros(1, num_tokens, dtype=torch.int64)
    return describe(model, (example, example))


ONE = made_up(of_decoder(24), link_s=1e-9)
SHARED = solve(ONE, global_batch_size=1, constraints=Constraints(may_share_samples=True))


def test_one_sample_is_shared_where_it_is_asked_for() -> None:
    """On devices that are alike, each has half of it, and the step takes half as long."""
    alone = solve(ONE, global_batch_size=1)
    assert alone.plan.context_groups is None
    plan = SHARED.plan
    assert plan.context_groups == ((0, 1),)
    assert [rank.token_share for rank in plan.ranks] == pytest.approx([0.5, 0.5])
    assert SHARED.predicted.step_time_s < 0.6 * alone.predicted.step_time_s
    assert simulate(plan, ONE).step_time_s == pytest.approx(SHARED.predicted.step_time_s)
    assert Plan.from_json(plan.to_json()) == plan
    # Many samples are dealt out as a whole, which exchanges nothing.
    many = find_plan(ONE, global_batch_size=8, constraints=Constraints(may_share_samples=True))
    assert many.context_groups is None


@on_ranks(2)
def test_a_plan_that_was_found_trains_as_one_process(rank: int) -> None:
    Case(plan=of_any_device(SHARED.plan), model="decoder", num_tokens=24).run()


def test_a_sample_that_is_too_long_for_a_card_is_shared() -> None:
    """By speed, and with tiles; both cards of a kind do the same."""
    cluster = Cluster.named(described_cluster("4090+3090x2"))
    workload = Workload.transformer(
        num_layers=22,
        width=2048,
        num_heads=32,
        num_kv_heads=4,
        hidden_width=5632,
        vocab_size=32_000,
        seq_len=131_072,
        fuses_norms=True,
        param_dtype="bfloat16",
    )
    scenario = Scenario(cluster, workload, derive_profile(cluster, workload))
    found = solve(
        scenario,
        global_batch_size=1,
        constraints=Constraints(may_share_samples=True),
        is_bounded=False,
    )
    assert found.plan.context_groups == ((0, 1, 2),)
    first, *others = [rank.token_share for rank in found.plan.ranks]
    assert first > 1.5 * others[0] == 1.5 * others[1]
    assert found.fits
    assert "tokens" in str(found.plan)
