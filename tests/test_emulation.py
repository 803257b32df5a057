"""Emulated devices: slower in what they compute, smaller in what they may allocate."""

import os
import time
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn

from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.config.checks import ConfigError
from shardhet.config.compose import (
    CONFIG_NAME,
    VERSION_BASE,
    conf_dir,
    register_schemas,
    to_conf,
)
from shardhet.config.training import ClusterConf, DeviceType
from shardhet.fsdp.step.around import Activity, Observed
from shardhet.training.emulation import (
    HOST_BYTES,
    MAX_CREDIT_S,
    EmulatedDevice,
    cores_for,
    memory_of_process,
    packed,
    stay_on,
)
from tests.small_models import Chain
from tests.worlds import run_ranks, run_ranks_expecting_failure

pytestmark = pytest.mark.alone

MIB = 2**20


def compute(seconds: float) -> None:
    """Use the processor for so long, whatever else the machine does."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


class Slow(nn.Module):
    """A unit whose forward takes a known time of the processor's."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compute(self.seconds)
        return x * self.weight


def slow(seconds: float) -> Chain:
    return Chain(Slow(seconds), Slow(seconds))


def test_what_is_slowed_takes_as_much_longer_as_the_device_is_slower() -> None:
    start_s = time.perf_counter()
    with EmulatedDevice(speed=0.25).slowed():
        compute(0.03)
    seconds = time.perf_counter() - start_s
    assert 0.12 <= seconds < 0.4


def test_waiting_for_a_core_is_not_stretched() -> None:
    observe = EmulatedDevice(speed=0.1).observer()
    start_s = time.perf_counter()
    # 0.01 s of the processor last 0.1 s on such a device; 0.08 s of them are over.
    observe(Observed("blocks.0", Activity.FORWARD, 0, 0.0, 0.08, 0.01))
    assert 0.02 <= time.perf_counter() - start_s < 0.06


def test_a_device_of_full_speed_is_left_alone() -> None:
    model = HetFSDP(slow(0.0), Plan.even(1, microbatch_size=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    EmulatedDevice().slow_down(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model._runtime.observers._observers


@pytest.mark.parametrize("recompute", [False, True])
def test_later_observers_see_stretched_computations(recompute: bool) -> None:
    seconds = 0.02
    plan = Plan.by_hand(
        microbatch_sizes=[1], num_microbatches=[2], state_shares=[1], recompute=[recompute]
    )
    model = HetFSDP(slow(seconds), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    EmulatedDevice(speed=0.5).slow_down(model, optimizer)
    events: list[Observed] = []
    model.add_observer(events.append)
    model.backward(*model(torch.ones(2, 4)))
    forwards = [e.end_s - e.start_s for e in events if e.activity is Activity.FORWARD]
    backwards = [e.end_s - e.start_s for e in events if e.activity is Activity.BACKWARD]
    assert len(forwards) == len(backwards) == 4  # two units, two microbatches
    stretched_s = 2 * 4 * seconds
    assert 0.9 * stretched_s < sum(forwards) < 3 * stretched_s  # a busy machine takes longer
    if recompute:
        assert 0.9 * stretched_s < sum(backwards) < 3 * stretched_s


def test_waits_are_not_stretched() -> None:
    observe = EmulatedDevice(speed=0.01).observer()
    start_s = time.perf_counter()
    for activity in (Activity.WAIT_GATHER, Activity.WAIT_REDUCE, Activity.AGREE):
        observe(Observed("blocks.0", activity, None, 0.0, 10.0))
    assert time.perf_counter() - start_s < 1


def test_only_a_little_of_a_long_delay_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    observe = EmulatedDevice(speed=0.5).observer()
    observe(Observed("blocks.0", Activity.FORWARD, 0, 0.0, 9.0, 1.0))
    observe(Observed("blocks.0", Activity.FORWARD, 1, 0.0, 1.0, 1.0))
    assert slept_s == [pytest.approx(1.0 - MAX_CREDIT_S)]


def test_a_sleep_that_was_too_long_counts_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, slept_s = [0.0], []

    def oversleep(seconds: float) -> None:
        slept_s.append(seconds)
        now_s[0] += seconds + 0.01

    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", oversleep)
    observe = EmulatedDevice(speed=0.5).observer()
    for _ in range(3):
        observe(Observed("blocks.0", Activity.FORWARD, 0, 0.0, 1.0))
    assert slept_s == pytest.approx([1.0, 0.99, 0.99])


def test_the_optimizer_step_is_stretched() -> None:
    class Sleeper(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            compute(0.03)

    model = HetFSDP(slow(0.0), Plan.even(1, microbatch_size=2))
    optimizer = Sleeper(model.parameters(), lr=0.1)
    EmulatedDevice(speed=0.25).slow_down(model, optimizer)
    start_s = time.perf_counter()
    optimizer.step()
    assert 0.12 <= time.perf_counter() - start_s < 0.4


def test_peers_wait_for_the_slow_device() -> None:
    shares = run_ranks(_shares_of_a_step, 2)
    (fast_busy, fast_waiting), (slow_busy, slow_waiting) = shares
    assert slow_busy > 2 * fast_busy  # five times, but for a busy machine
    assert fast_waiting > 2 * slow_waiting


def _shares_of_a_step(rank: int) -> tuple[float, float]:
    model = HetFSDP(slow(0.02), Plan.even(2, microbatch_size=1, recompute=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    EmulatedDevice(speed=(1.0, 0.2)[rank]).slow_down(model, optimizer)
    model.backward(*model(torch.ones(1, 4)))  # finds the order
    seconds = dict.fromkeys(Activity, 0.0)

    def add(event: Observed) -> None:
        seconds[event.activity] += event.end_s - event.start_s

    model.add_observer(add)
    start_s = time.perf_counter()
    model.backward(*model(torch.ones(1, 4)))
    step_s = time.perf_counter() - start_s
    busy_s = seconds[Activity.FORWARD] + seconds[Activity.BACKWARD]
    return busy_s / step_s, (sum(seconds.values()) - busy_s) / step_s


def test_an_allocation_beyond_the_cap_ends_all_ranks_with_rank_and_budget() -> None:
    outcomes = run_ranks_expecting_failure(_outgrow_rank_one, 2)
    assert "can't allocate memory" in outcomes[1].message
    for outcome in outcomes:
        assert "rank 1 (small 48 MiB) failed in model(...)" in outcome.traceback


class Hungry(nn.Module):
    """Allocates 64 MiB for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        room = torch.empty(x.shape[0] * 16 * MIB)
        return (x * self.weight).sum() + room[0] * 0, x.shape[0]


def _outgrow_rank_one(rank: int) -> None:
    device = EmulatedDevice(memory_bytes=(None, 48 * MIB)[rank])
    spec = DeviceSpec(kind="small", memory_capacity_bytes=device.memory_bytes)
    plan = Plan.even(2, microbatch_size=1)
    model = HetFSDP(Hungry(), plan, device_spec=spec)
    device.cap_memory()
    model.backward(*model(torch.ones(1, 4)))


def test_the_cap_counts_from_what_the_process_has() -> None:
    assert run_ranks(_allocate_up_to_the_cap, 1, fresh_world=True)[0] == (True, True, False)


def _allocate_up_to_the_cap(rank: int) -> tuple[bool, bool, bool]:
    peak = EmulatedDevice(memory_bytes=100 * MIB).cap_memory()
    room_bytes = HOST_BYTES + 80 * MIB
    fits = torch.empty(room_bytes, dtype=torch.uint8)
    time.sleep(0.1)  # until it is counted
    assert fits.numel() == room_bytes
    try:
        torch.empty(40 * MIB, dtype=torch.uint8)
    except RuntimeError:
        has_room = False
    else:
        has_room = True
    del fits
    counts = room_bytes <= peak.read() < room_bytes + 10 * MIB
    return counts, memory_of_process("VmData") > 80 * MIB, has_room


@pytest.mark.parametrize(
    ("device", "field"),
    [({"speed": 0}, "speed"), ({"speed": 1.5}, "speed"), ({"memory_bytes": 0}, "memory")],
)
def test_impossible_devices_are_refused(device: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        EmulatedDevice(**device)


def test_a_cluster_says_what_each_rank_is_like() -> None:
    conf = ClusterConf(
        num_ranks=2, device=DeviceType.CPU, speeds=[1.0, 0.5], memory_mib=[64, 32]
    )
    assert conf.emulated_device(1) == EmulatedDevice(speed=0.5, memory_bytes=32 * MIB)
    assert ClusterConf(num_ranks=2).emulated_device(1) is None


@pytest.mark.parametrize(
    ("stated", "key"),
    [
        ({"speeds": [1.0, 2.0]}, r"cluster\.speeds\[1\]"),
        ({"speeds": [1.0, 0.0]}, r"cluster\.speeds\[1\]"),
        ({"speeds": [1.0]}, r"cluster\.speeds: 1 entries"),
        ({"memory_mib": [0, 8]}, r"cluster\.memory_mib\[0\]"),
        ({"speeds": [1.0, 0.5], "device": DeviceType.AUTO}, r"cluster\.device"),
    ],
)
def test_impossible_clusters_are_refused(stated: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        ClusterConf(**{"num_ranks": 2, "device": DeviceType.CPU, **stated})


def test_emulated_clusters_fit_two_cores_and_are_named_as_emulated() -> None:
    register_schemas()
    with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
        for name, num_ranks in (("emulated_2", 2), ("emulated_4", 4), ("emulated_unlike", 4)):
            cluster = to_conf(compose(CONFIG_NAME, [f"cluster={name}", "run_dir=x"])).cluster
            assert cluster.num_ranks == len(cluster.speeds) == num_ranks
            assert sum(cluster.speeds) <= 2
            assert all(kind.startswith("emulated") for kind in cluster.kinds)
        fastest = max(range(4), key=cluster.speeds.__getitem__)
        assert cluster.memory_mib[fastest] == min(cluster.memory_mib)


@pytest.mark.parametrize(
    ("cores", "num_cores", "expected"),
    [
        ([0.9, 0.45, 0.225, 0.225], 2, [0, 1, 1, 1]),
        ([0.6, 0.6, 0.3, 0.3], 2, [0, 1, 0, 1]),
        ([1.0, 0.1], 2, [0, 1]),
        ([0.7, 0.7, 0.7], 2, [None, None, None]),  # a core would be promised twice
        ([0.5, 0.5], 1, [0, 0]),
    ],
)
def test_no_core_is_promised_more_than_once(
    cores: list[float],
    num_cores: int,
    expected: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    assert packed(cores) == expected
    if num_cores < len(cores):
        assert cores_for(cores) == expected
    else:
        assert cores_for(cores) == [None] * len(cores)


def test_a_process_stays_on_its_core() -> None:
    [seen] = run_ranks(_stay_on_core, 1, fresh_world=True)
    assert seen[0] == seen[1]


def _stay_on_core(rank: int) -> tuple[set[int], set[int]]:
    core = max(os.sched_getaffinity(0))
    stay_on(core)
    return os.sched_getaffinity(0), {core}
