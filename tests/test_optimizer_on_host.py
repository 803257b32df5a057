"""Plans whose optimizer steps on the host: exact, in order, and the same state by name."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardhet import Cluster, DeviceSpec, HetFSDP, Plan, Profile, redistribute
from shardhet.checkpoint import load, save
from shardhet.comm.copy_streams import CopyStream
from shardhet.fsdp.params import host_step
from shardhet.fsdp.params.row_group import ShardGroup
from shardhet.fsdp.sharding import comm
from shardhet.models.decoder import Decoder, DecoderConfig
from shardhet.planner import Constraints, solve
from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
from shardhet.profiler.batch import ExampleBatch
from shardhet.profiler.describe import describe
from shardhet.records.cluster import Node
from shardhet.records.profiles import DeviceProfile
from shardhet.records.schedule import StepForm
from shardhet.records.workload import Workload
from tests.emulated.accelerator import Accelerator
from tests.made_up import collectives, device_profile
from tests.selection import one_in, only
from tests.test_places import moved
from tests.worlds import on_ranks, run_ranks, run_ranks_expecting_failure

# Waits


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.second(self.first(x)).square().sum(), x.numel()


def _writes_after_forward(rank: int, waits: bool) -> None:
    with Accelerator().installed() as accelerator:
        plan = Plan.by_hand(microbatch_sizes=[2, 2], optimizer_on_host=[True, False])
        model = HetFSDP(Linear(), plan, units=[nn.Linear], device=accelerator.device)
        patch = nullcontext() if waits else mock.patch.object(CopyStream, "wait_all")
        with torch.no_grad(), patch:
            for _ in range(2):  # in the first the host waits for a probe
                model(torch.randn(2, 8).to(accelerator.device))
            for param in model.parameters():
                param.mul_(2.0)


def test_rows_are_not_written_while_they_are_copied() -> None:
    run_ranks(_writes_after_forward, 2, True)
    outcomes = run_ranks_expecting_failure(_writes_after_forward, 2, False)
    assert outcomes[0].exception_name == "RaceError"


# Places


@on_ranks(2)
def test_parameters_stay_the_same_objects_where_they_are_moved(rank: int) -> None:
    torch.manual_seed(0)
    plan = Plan.by_hand(microbatch_sizes=[2, 1], optimizer_on_host=[False, True])
    with Accelerator().installed() as accelerator:
        module = Linear()
        model = HetFSDP(module, plan, units=[nn.Linear], device=accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters())
        before = list(model.parameters())
        for on_host in ([False, True], [True, False], [True, True], [False, False]):
            if on_host != [False, True]:
                redistribute(model, optimizer, moved(plan, on_host))
            model.backward(*model(torch.randn(2 - rank, 8).to(accelerator.device)))
            assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
            for param in before:
                assert param.grad is not None
                assert (accelerator.held(param) is None) == on_host[rank]
                assert (accelerator.held(param.grad) is None) == on_host[rank]
            optimizer.step()
            for state in optimizer.state.values():
                assert (accelerator.held(state["exp_avg"]) is None) == on_host[rank]
            optimizer.zero_grad()


class Counting(torch.optim.SGD):
    """Notes how many threads its steps have."""

    def step(self, *args: Any) -> None:
        self.num_threads = torch.get_num_threads()
        super().step(*args)


@on_ranks(3, fresh_world=True)
def test_a_step_on_the_host_has_its_ranks_share_of_the_processors(rank: int) -> None:
    torch.set_num_threads(3)
    plan = Plan.by_hand(microbatch_sizes=[1, 1, 1], optimizer_on_host=[True, False, True])
    processors = mock.patch.object(comm, "processors", return_value=[0, 1, 2, 3])
    with Accelerator().installed() as accelerator, processors:
        model = HetFSDP(Linear(), plan, units=[nn.Linear], device=accelerator.device)
        optimizer = Counting(model.parameters(), lr=0.1)
        model.backward(*model(torch.randn(1, 8).to(accelerator.device)))
        optimizer.step()
        assert optimizer.num_threads == (3 if rank == 1 else 2)
        assert torch.get_num_threads() == 3


def test_an_optimizer_that_is_fused_in_part_is_told_what_it_costs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [params[0]], "fused": True}, {"params": [params[1]], "fused": False}]
    optimizer = torch.optim.AdamW(groups)
    host_step._advise(optimizer, mock.Mock(is_first_on_host=True))
    assert "where AdamW(..., fused=True) takes about a" in caplog.text
    caplog.clear()
    optimizer.param_groups[1]["fused"] = True
    host_step._advise(optimizer, mock.Mock(is_first_on_host=True))
    assert not caplog.text


def trained(
    model: HetFSDP, optimizer: torch.optim.Optimizer, steps: range, *, clips: bool = True
) -> None:
    plan, position = model.plan, model.position
    is_half = model._flats[0].param_dtype is torch.float16
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, enabled=is_half)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = 5 * torch.randn(plan.global_batch_size, 8, generator=generator)
        mine = x[plan.sample_indices(position)].to(model.device)
        model.forward_backward(mine, scaler=scaler if is_half else None)
        scaler.unscale_(optimizer)
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _unscales_on_the_host(rank: int, waits: bool) -> None:
    """The scale comes from the device, in a copy that GradScaler does not wait for."""
    patch = nullcontext() if waits else mock.patch.object(ShardGroup, "wait_for_device")
    with Accelerator().installed() as accelerator, patch:
        torch.manual_seed(0)
        plan = Plan.by_hand(microbatch_sizes=[2, 2], optimizer_on_host=[True, False])
        model = HetFSDP(
            Linear(),
            plan,
            units=[nn.Linear],
            device=accelerator.device,
            param_dtype=torch.float16,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trained(model, optimizer, range(3), clips=False)


def test_the_host_waits_for_the_scale_of_gradients() -> None:
    run_ranks(_unscales_on_the_host, 2, True)
    outcomes = run_ranks_expecting_failure(
        _unscales_on_the_host, 2, False, leaves_on_failure=True
    )
    assert outcomes[0].exception_name == "RaceError"


PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"param_dtype": torch.bfloat16},
    "reduced in bfloat16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "float16": {"param_dtype": torch.float16},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def make(
    on_host: list[bool], optimizer: str = "AdamW", *, num_rounds: int = 1, **options: Any
) -> tuple[HetFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    plan = Plan.by_hand(
        microbatch_sizes=[2, 1],
        num_microbatches=[1, 2],
        num_rounds=num_rounds,
        state_shares=[0.6, 0.4],
        optimizer_on_host=on_host,
    )
    model = HetFSDP(Linear(), plan, units=[nn.Linear], **options)
    return model, OPTIMIZERS[optimizer](model.parameters())


def bits(model: HetFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every row of every parameter and every state."""
    found = {fqn: box.tensor.clone() for fqn, box in model.sharded_state_dict().items()}
    for fqn, param in model.named_parameters():
        for name, value in optimizer.state[param].items():
            found[f"{fqn} {name}"] = torch.as_tensor(value).clone()
    return found


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    "precision, optimizer",
    one_in(
        3,
        [("float32", "momentum"), ("float16", "fused")]
        + [(precision, "AdamW") for precision in PRECISIONS],
    ),
)
@on_ranks(2)
def test_a_step_has_the_same_bits_wherever_optimizers_are(
    rank: int, precision: str, optimizer: str
) -> None:
    options = PRECISIONS[precision]
    for num_rounds, clips in ((1, True), (2, False)):
        results = []
        for on_host in ([False, False], [True, False], [True, True]):
            model, optim = make(on_host, optimizer, num_rounds=num_rounds, **options)
            trained(model, optim, range(4), clips=clips)
            whole = {f"whole {fqn}": each for fqn, each in model.state_dict().items()}
            results.append(bits(model, optim) | whole)
        for result in results[1:]:
            check_equal(result, results[0])


def _adds_to_kept_gradients(rank: int, precision: str) -> list[int]:
    """In how many copies of gradients the host has waited, by step."""
    with Accelerator().installed() as accelerator:
        options = {**PRECISIONS[precision], "device": accelerator.device}
        model, _ = make([True, False], num_rounds=2, **options)
        found = []
        for _ in range(4):  # without zero_grad
            x = torch.randn(4, 8).to(accelerator.device)  # two samples in each of two rounds
            before = len(accelerator.syncs)
            model.forward_backward(x)
            found.append(sum("persistence.py make" in e for e in accelerator.syncs[before:]))
        return found


@pytest.mark.parametrize("precision", ["float32", "reduced in bfloat16"])
def test_the_host_waits_for_no_copy_of_a_gradient(precision: str) -> None:
    on_host, on_device = run_ranks(_adds_to_kept_gradients, 2, precision)
    # What is kept is float32: once there is no other place that is pinned.
    assert [bool(each) for each in on_host] == [False, precision == "float32", False, False]
    assert on_device == [0, 0, 0, 0]


@on_ranks(2)
def test_each_rank_goes_on_in_its_own_way_of_computing_a_step(
    rank: int, tmp_path: Path
) -> None:
    model, optimizer = make([False, False], "AdamW")
    trained(model, optimizer, range(2))
    save(model, optimizer, tmp_path / "saved")
    # The writer's way of computing a step is not that of a rank whose rows are elsewhere.
    loaded, its_optimizer = make([True, False], "AdamW" if rank else "fused")
    load(loaded, its_optimizer, tmp_path / "saved")
    assert its_optimizer.param_groups[0]["fused"] is (None if rank else True)
    check_equal(bits(loaded, its_optimizer), bits(model, optimizer))
    trained(loaded, its_optimizer, range(2, 3))


# The host


def _too_small(rank: int, has_bytes: int, when: str) -> None:
    with mock.patch.object(comm, "available_bytes", return_value=has_bytes):
        model, optimizer = make([True, True])
    trained(model, optimizer, range(1))


@pytest.mark.parametrize("has_bytes, when", [(1000, "wrapping"), (1500, "step")])
def test_a_host_that_is_too_small_is_one_error_on_every_rank(has_bytes: int, when: str) -> None:
    outcomes = run_ranks_expecting_failure(_too_small, 2, has_bytes, when)
    for outcome in outcomes:
        assert outcome.exception_name == "ValueError", outcome
        assert "plan: optimizer_on_host: rows, gradients" in outcome.message
        assert "positions [0, 1] need 0 MiB of their host's memory" in outcome.message


# Prices

DECODER = DecoderConfig(
    vocab_size=64,
    width=128,
    num_layers=6,
    num_heads=2,
    num_kv_heads=2,
    hidden_width=256,
    seq_len=8,
)


def _peak_bytes(rank: int, plan: Plan, options: dict[str, Any]) -> int:
    with Accelerator().installed() as accelerator:
        model = HetFSDP(Decoder(DECODER), plan, device=accelerator.device, **options)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        mine = plan.num_rounds * plan.ranks[rank].rank_batch_size
        tokens = torch.arange(8 * mine).remainder(16).view(mine, 8).to(accelerator.device)
        for _ in range(2):  # its first call is examined
            accelerator.module().synchronize()
            accelerator.memory.peak_bytes = accelerator.memory.allocated_bytes
            model.forward_backward(tokens, tokens)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.memory.peak_bytes


def prices_of(plan: Plan, node: dict[str, Any], **options: Any) -> CostModel:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    workload = describe(Decoder(DECODER), ExampleBatch(args=(tokens, tokens)), **options)
    device = DeviceSpec(kind="x", memory_capacity_bytes=2**34)
    cluster = Cluster(nodes=(Node(host="a", devices=(device,) * plan.world_size, **node),))
    names = [kind.name for kind in workload.kinds]
    profile = Profile(
        devices=(device_profile("x", lambda m: (1e-4, 2e-4), sizes=[1, 2], unit_kinds=names),),
        collectives=collectives((1, 2), gather_s_per_byte=1e-9, reduce_s_per_byte=1e-9),
    )
    return CostModel(Scenario(cluster, workload, profile)).in_form(StepForm.of(plan))


@pytest.mark.parametrize(
    "precision, num_rounds, sizes",
    only(
        [("bfloat16", 2, [1, 0])],
        [
            (precision, *pair)
            for precision in ("float32", "bfloat16", "reduced in bfloat16")
            for pair in ((1, [1, 1]), (1, [2, 0]), (2, [1, 0]))
        ],
    ),
)
def test_a_device_holds_what_is_predicted_without_its_optimizer(
    precision: str, num_rounds: int, sizes: list[int]
) -> None:
    options = PRECISIONS[precision]
    plan = Plan.by_hand(
        microbatch_sizes=sizes,
        state_shares=[0.7, 0.3],
        num_rounds=num_rounds,
        recompute=True,
        optimizer_on_host=True,
    )
    peaks = run_ranks(_peak_bytes, 2, plan, options)
    ranks = prices_of(plan, {}, **options).predict(plan).ranks
    ratios = [rank.memory.total_bytes / peak for rank, peak in zip(ranks, peaks, strict=True)]
    assert min(ratios) > 0.98, ratios
    assert sum(ratios) / len(ratios) < 1.05, ratios


@pytest.mark.parametrize("num_moments", [0, 1, 2])
def test_optimizers_of_a_node_share_its_memory_and_its_speed(num_moments: int) -> None:
    plan = Plan.by_hand(
        microbatch_sizes=[1, 1, 1], optimizer_on_host=[True, False, True], recompute=True
    )
    prices = partial(prices_of, plan, num_moments=num_moments)
    on_device = prices({}).predict(moved(plan, [False] * 3))
    # An element is read and written, as is each of its moments; its gradient is read.
    speed = 4e6 * (3 + 2 * num_moments)
    node = {"host_bytes_per_s": speed, "host_memory_bytes": 2**30}
    found = prices(node).predict(plan)
    numel = sum(found.ranks[i].stored_numel for i in (0, 2))
    for i, rank in enumerate(found.ranks):
        before = on_device.ranks[i].memory
        if i == 1:
            assert rank == on_device.ranks[1]
            continue
        assert rank.optimizer_s == pytest.approx(numel / 1e6, rel=1e-2)
        assert rank.memory.host_bytes == before.state_bytes
        assert rank.memory.total_bytes < before.total_bytes
        assert rank.fits
    needed = sum(rank.memory.host_bytes for rank in found.ranks)
    for memory in (needed, None):  # to the last byte, or not stated
        enough = prices({**node, "host_memory_bytes": memory}).predict(plan)
        assert all(rank.fits for rank in enough.ranks)
    small = {**node, "host_memory_bytes": found.ranks[0].memory.host_bytes}
    assert [each.fits for each in prices(small).predict(plan).ranks] == [
        False,
        True,
        False,
    ]


COPIED = Workload.transformer(
    num_layers=4, width=64, num_heads=2, seq_len=32, vocab_size=128, hidden_width=128
)
ON_HOST = Constraints(may_keep_optimizer_on_host=True, max_rounds=1)


def scenario_of(nodes: tuple[Node, ...], profiles: Sequence[DeviceProfile]) -> Scenario:
    """Of ``COPIED``, over links that take nearly no time."""
    links = collectives((10**4, 10**6), gather_s_per_byte=1e-13, reduce_s_per_byte=1e-13)
    return Scenario(
        Cluster(nodes=nodes), COPIED, Profile(devices=tuple(profiles), collectives=links)
    )


@pytest.mark.parametrize("bytes_per_s, step_time_s", [(3e6, 0.223), (10e6, 0.1325)])
def test_compute_hides_no_more_copies_than_it_lasts(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, step_time_s: float
) -> None:
    """Of a plan that counts on more, the step takes longer than its bound says.

    If a plan is priced as if compute hid none, though it hides a part, a slower one is taken.
    """
    monkeypatch.setattr("shardhet.pricing.hosts.DEVICE_LINK_BYTES_PER_S", bytes_per_s)
    devices, profiles = [], []
    for kind, capacity, pace in (("full", 8 * COPIED.numel, 1e-10), ("roomy", 2**34, 1e-6)):
        devices.append(DeviceSpec(kind=kind, memory_capacity_bytes=capacity))
        profile = device_profile(kind, lambda m: (1e-3 * m, 2e-3 * m), sizes=[1, 2, 4])
        profiles.append(replace(profile, optimizer_seconds_per_element=pace))
    node = Node(host="a", devices=tuple(devices), host_bytes_per_s=1e9)
    scenario = scenario_of((node,), profiles)
    found = solve(scenario, global_batch_size=8, constraints=ON_HOST)
    assert found.plan.ranks[0].optimizer_on_host
    assert found.predicted.step_time_s <= 1.01 * found.lower_bound_s
    assert found.predicted.step_time_s == pytest.approx(step_time_s, rel=5e-3)
