"""Frozen weights that stay unsharded: what they take, what they spare, and who keeps them."""

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch

from experiments.predicted_memory import run as predicted_memory
from experiments.predicted_memory.cases import MemoryCase
from experiments.resident.run import Adapted
from shardhet import Cluster, Plan, Workload, find_plan
from shardhet.apps.planning.sentences import form_lines
from shardhet.models.decoder import Block, Decoder, DecoderConfig
from shardhet.planner import Constraints, solve
from shardhet.planner.problem.constraints import DeviceLimits
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.scenario import Scenario
from shardhet.records.workload import UnitKind
from tests.selection import one_in
from tests.worlds import run_ranks

ADAPTER = ((16, 1024), (1024, 16))  # of a block, beside its frozen weights
NUM_LAYERS, GIB = 4, 2**30
SMALL = 0.72  # GiB of a device that has no room for more than its batch


def adapted(kind: UnitKind) -> UnitKind:
    """A kind with frozen weights, and in a block an adapter."""
    frozen = tuple(range(len(kind.param_shapes)))
    shapes = (*kind.param_shapes, *(ADAPTER if kind.name == "block" else ()))
    return replace(kind, param_shapes=shapes, frozen_params=frozen)


def workload(seq_len: int = 512) -> Workload:
    plain = Workload.transformer(
        num_layers=NUM_LAYERS, width=1024, num_heads=8, vocab_size=4000, seq_len=seq_len,
        param_dtype="bfloat16", state_bytes_per_element=2.5,
    )  # fmt: skip
    return replace(plain, kinds=tuple(map(adapted, plain.kinds)))


def scenario(
    memory_bytes: Sequence[float], bytes_per_s: float = 0.1e9, seq_len: int = 512
) -> Scenario:
    """One host for each device, joined by a cable."""
    nodes = [
        {
            "host": f"node{i}",
            "devices": [{"kind": "NVIDIA A10", "memory_capacity_bytes": int(nbytes)}],
        }
        for i, nbytes in enumerate(memory_bytes)
    ]
    cable = {"latency_s": 3e-5, "bandwidth_bytes_per_s": bytes_per_s}
    document = {"version": 1, "nodes": nodes, "between_nodes": cable}
    cluster = Cluster.from_document(document, source="test")
    model = workload(seq_len)
    return Scenario(cluster, model, derive_profile(cluster, model))


def frozen_bytes(scenario: Scenario, fqns: Sequence[str]) -> int:
    model = scenario.workload
    return sum(model.frozen_bytes(model.kind_of(u)) for u in model.units if u.fqn in fqns)


def test_the_planner_keeps_what_the_smallest_computing_card_has_room_for() -> None:
    whole = frozen_bytes(scenario([GIB]), [u.fqn for u in workload().units])
    found = {}
    each = {i: DeviceLimits(rank_batch_size=4) for i in range(2)}
    for part in (0.0, 0.45, 0.55, 4.0):
        here = scenario([4 * GIB, SMALL * GIB + part * whole])
        demands = Constraints(max_rounds=1, limits=each)
        solution = solve(here, global_batch_size=8, constraints=demands)
        without = solve(
            here,
            global_batch_size=8,
            constraints=replace(demands, may_keep_frozen_weights=False),
        )
        plan = solution.plan
        assert not without.plan.resident_units
        assert solution.predicted.step_time_s <= without.predicted.step_time_s
        assert solution.lower_bound_s <= solution.predicted.step_time_s
        assert all(rank.fits for rank in solution.predicted.ranks)
        frozen = [u.fqn for u in here.workload.units if here.workload.kind_of(u).frozen_params]
        found[part] = (
            NUM_LAYERS + 2 if plan.resident_units == ("*",) else len(plan.resident_units)
        )
        assert set(plan.resident_units) <= {*frozen, "*"}
    assert found[4.0] == NUM_LAYERS + 2
    assert [*found.values()] == [0, 2, 4, 6], found


def test_what_is_kept_is_said() -> None:
    here = scenario([8 * GIB] * 2)
    plan = find_plan(here, global_batch_size=8)
    [line] = [each for each in form_lines(plan, here.workload) if "Frozen" in each]
    assert "of all units stay whole on every device that computes" in line
    assert line.endswith("a step sends what is trained only.")
    part = replace(plan, resident_units=("blocks.*",))
    [line] = [each for each in form_lines(part, here.workload) if "Frozen" in each]
    assert "of 4 of 6 units" in line


# Rows that are a part of what stays


def adapted_decoder(shape: DecoderConfig) -> Decoder:
    """A decoder whose weights are frozen, in bfloat16, but for adapters of its attention."""
    model = Decoder(shape).requires_grad_(requires_grad=False).to(torch.bfloat16)
    for block in model.blocks:
        assert isinstance(block, Block)
        base = block.attention.qkv
        block.attention.qkv = Adapted(base)
    return model


def memory_case(plan: Plan) -> MemoryCase:
    shape = DecoderConfig(
        vocab_size=64, width=128, num_layers=6, num_heads=4, num_kv_heads=4, hidden_width=256,
        seq_len=8,
    )  # fmt: skip
    return MemoryCase(name="adapters", shape=shape, plan=plan, precision="bf16")


CASES = [
    memory_case(
        Plan.by_hand(
            microbatch_sizes=[2, 1, 0], state_shares=[0.3, 0.5, 0.2], resident_units=True
        )
    ),
    memory_case(Plan.by_hand(microbatch_sizes=[2])),
]


def tracked(rank: int, case: MemoryCase) -> int:
    with mock.patch.object(predicted_memory, "Decoder", adapted_decoder):
        return predicted_memory.tracked_peak(rank, case)


@pytest.mark.parametrize("case", one_in(2, CASES[::-1]))
def test_frozen_rows_take_what_is_predicted(case: MemoryCase) -> None:
    peaks = run_ranks(tracked, case.plan.world_size, case)
    with mock.patch.object(predicted_memory, "Decoder", adapted_decoder):
        parts = predicted_memory.predicted(case)
    for peak, each in zip(peaks, parts, strict=True):
        assert 0.98 < (each.total_bytes - each.reserved_bytes) / peak < 1.05
