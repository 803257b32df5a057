"""What is measured, how ranks' figures become one profile, and the command that does it."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shardhet import Cluster, DeviceSpec, Profile, Workload, find_plan
from shardhet.models.decoder import Decoder
from shardhet.pricing.scenario import Scenario
from shardhet.profiler.assemble import (
    RankReport,
    TrafficReport,
    make_cluster,
    make_profile,
    positions_by_rank,
    with_unevenness,
)
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.compute import ComputeMeasurement, UnitSamples, candidate_sizes
from shardhet.profiler.here import HostPartReport, room_of
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.profiler.stopwatch import Stopwatch, timing_of, typical_mean
from shardhet.profiler.traffic import (
    CollectiveSamples,
    PairSamples,
    sizes_to_measure,
    uneven_shares,
)
from shardhet.profiler.unit_runner import Started
from shardhet.records.profiles import Source
from shardhet.records.workload import Unit
from shardhet.training.emulation import EmulatedDevice
from tests.programs import SHARDHET, SMALL_MODEL, run
from tests.small_models import small_decoder
from tests.worlds import run_ranks, run_ranks_expecting_failure

SHAPE = small_decoder(vocab_size=64, width=32, hidden_width=64, seq_len=16)
QUICK = MeasuringEffort(max_microbatch_size=3, num_repeats=3, time_limit_s=300.0)
WORKLOAD = Workload.transformer(
    **{name: size for name, size in asdict(SHAPE).items() if name != "dropout"}
)


def trained(module: nn.Module | None = None) -> TrainedModel:
    tokens_BT = torch.randint(64, (4, 16))
    if module is None:
        with torch.device("meta"):
            module = Decoder(SHAPE)
    return TrainedModel(module=module, batch=ExampleBatch(args=(tokens_BT, tokens_BT)))


# Pure #


def test_sizes_are_powers_of_two_and_the_largest() -> None:
    assert candidate_sizes(1) == [1]
    assert candidate_sizes(12) == [1, 2, 4, 8, 12]
    assert candidate_sizes(16) == [1, 2, 4, 8, 16]


def test_a_timing_keeps_its_deciles_in_order() -> None:
    timing = timing_of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.mean_s, timing.median_s, timing.num_samples) == (3.0, 3.0, 5)
    assert timing.p10_s == pytest.approx(1.4)
    assert timing.p90_s == pytest.approx(4.6)
    same = timing_of([0.1] * 7)
    assert same.p10_s == same.median_s == same.p90_s == 0.1


def test_a_rare_event_counts_no_more_than_what_is_usual() -> None:
    usual = [1.0, 1.1, 1.2, 1.3] * 5
    assert typical_mean(usual) == pytest.approx(1.15)  # skewed as it is
    assert typical_mean([*usual, 50.0]) < 1.2
    assert typical_mean([2.0]) == 2.0


def test_collectives_are_measured_at_the_sizes_of_the_units() -> None:
    sizes = sizes_to_measure(WORKLOAD)
    assert sizes == sorted(set(sizes))
    assert {kind.numel * 4 for kind in WORKLOAD.kinds} <= set(sizes)
    alike = replace(WORKLOAD.kind_by_name["block"], param_shapes=((256, 64),))
    of_one_size = Workload(kinds=(alike,), units=(Unit(fqn="blocks.0", kind="block"),))
    assert sizes_to_measure(of_one_size) == [2**14, 2**16]  # one point has no latency


def samples(block_s: float) -> dict[str, UnitSamples]:
    by_size = {size: [(size * block_s, 2 * size * block_s)] * 3 for size in (1, 2)}
    return {kind: UnitSamples(seconds=by_size) for kind in ("embedding", "block", "head")}


def report(block_s: float, *, host: str = "a", kind: str = "x") -> RankReport:
    return RankReport(
        device=DeviceSpec(host=host, kind=kind, memory_capacity_bytes=2**30),
        samples=samples(2 * block_s),
        optimizer_s_per_element=[block_s, 2 * block_s, 3 * block_s],
        unit_overhead_s=block_s / 100,
        reserved_bytes=7,
        note="now",
    )


NO_LINKS = TrafficReport(
    collectives=[], two_levels=[], pairs=[], overlap_slowdowns=[0.0] * 3, note=""
)


def test_the_slowest_rank_of_a_kind_stands_for_it() -> None:
    reports = [report(1.0), report(1.5), report(0.5, kind="y")]
    cluster = make_cluster([each.device for each in reports], [])
    profile = make_profile(reports, NO_LINKS, cluster, WORKLOAD)
    assert [device.device_kind for device in profile.devices] == ["x", "y"]
    assert profile.unit("x", "block").forward_s.at(2) == 6.0
    assert profile.device("x").optimizer_seconds_per_element == 3.0
    assert profile.unit_overhead_s == 1.5 / 100
    assert "the slowest of 2 ranks, 1.50 times the fastest" in profile.device("x").note
    assert {each.source for each in profile.devices} == {Source.MEASURED}


def test_devices_stand_by_host_with_its_slowest_link() -> None:
    specs = [
        DeviceSpec(host=host, kind="x", memory_capacity_bytes=1) for host in ("a", "b", "a")
    ]
    pairs = [
        PairSamples(sender=0, receiver=1, latency_s=3e-3, bandwidth_bytes_per_s=1e8),
        PairSamples(sender=0, receiver=2, latency_s=1e-3, bandwidth_bytes_per_s=1e9),
        PairSamples(sender=1, receiver=2, latency_s=2e-3, bandwidth_bytes_per_s=2e8),
    ]
    cluster = make_cluster(specs, pairs)
    assert [node.host for node in cluster.nodes] == ["a", "b"]
    assert [len(node.devices) for node in cluster.nodes] == [2, 1]
    within, between = cluster.nodes[0].link, cluster.between_nodes
    assert within is not None
    assert between is not None
    assert cluster.nodes[1].link is None
    assert (within.latency_s, within.bandwidth_bytes_per_s) == (1e-3, 1e9)
    assert (between.latency_s, between.bandwidth_bytes_per_s) == (3e-3, 1e8)
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_pairs_of_ranks_stand_where_the_cluster_puts_them() -> None:
    reports = [report(1.0, host=host) for host in ("a", "b", "a")]
    specs = [each.device for each in reports]
    assert positions_by_rank(specs) == {0: 0, 2: 1, 1: 2}
    whole = CollectiveSamples(1000, [1e-3], [2e-3], [1e-3], [2e-3])
    traffic = TrafficReport(
        collectives=[whole, replace(whole, nbytes=4000)],
        two_levels=[replace(whole, gather_s=[5e-4])],
        pairs=[PairSamples(sender=0, receiver=2, latency_s=1e-5, bandwidth_bytes_per_s=1e9)],
        overlap_slowdowns=[0.0] * 3,
        note="now",
    )
    cluster = make_cluster(specs, traffic.pairs)
    profile = make_profile(reports, traffic, cluster, WORKLOAD)
    [pair] = profile.pairs
    assert profile.two_levels is not None
    assert profile.two_levels.points[0].gather.mean_s == 5e-4
    assert profile.two_levels.gather_unevenness_weight > 0  # uneven shares took twice as long
    assert (pair.sender, pair.receiver) == (0, 1)
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.3, 0.6)])
def test_unevenness_weights_are_found_again(weights: tuple[float, float]) -> None:
    reports = [report(1.0)] * 4
    cluster = make_cluster([each.device for each in reports], [])
    unevenness = max(uneven_shares(4)) * 4  # its owner sends it to the three others

    def seconds(nbytes: float) -> float:
        return 1e-4 + 1e-9 * nbytes

    collectives = [
        CollectiveSamples(
            nbytes=nbytes,
            gather_s=[seconds(nbytes)] * 3,
            reduce_s=[2 * seconds(nbytes)] * 3,
            uneven_gather_s=[seconds(nbytes * (1 - weights[0] + weights[0] * unevenness))] * 3,
            uneven_reduce_s=[2 * seconds(nbytes * (1 - weights[1] + weights[1] * unevenness))]
            * 3,
        )
        for nbytes in (2**16, 2**20, 2**24)
    ]
    excesses = [0.1, 0.2, 0.3, 0.2]
    traffic = TrafficReport(
        collectives=collectives,
        two_levels=[],
        pairs=[],
        overlap_slowdowns=excesses,
        note="now",
    )
    profile = make_profile(reports, traffic, cluster, WORKLOAD)
    assert profile.devices[0].overlap_slowdown == pytest.approx(0.2)  # they are of one kind
    assert profile.two_levels is None
    kept = profile.collectives
    found = (kept.gather_unevenness_weight, kept.reduce_unevenness_weight)
    assert found == pytest.approx(weights, abs=0.06)  # beyond the last size it is drawn
    assert with_unevenness(kept, collectives, profile, cluster, WORKLOAD) == kept


def test_an_emulated_device_is_timed_as_slow_as_it_is() -> None:
    full, half = (
        Stopwatch(torch.device("cpu")),
        Stopwatch(torch.device("cpu"), EmulatedDevice(speed=0.5)),
    )
    for watch in (full, half):
        with watch.running():
            start_s = time.thread_time()
            while time.thread_time() < start_s + 0.05:
                pass
    assert full.seconds >= 0.05
    assert half.seconds >= 0.1
    with half.running():  # what waits does not compute: nothing is stretched
        time.sleep(0.4)
    assert 0.4 <= half.seconds < 0.7


class FakeRunner:
    """Counts samples between their forward and their backward."""

    def __init__(self) -> None:
        self.waiting = self.most_waiting = self.num_forward = 0

    def num_microbatches(self, num_samples: int) -> int:
        return 1

    def forward(self, num_samples: int, num_microbatches: int) -> Started:
        self.num_forward += 1
        self.waiting += num_samples
        self.most_waiting = max(self.most_waiting, self.waiting)
        return Started((num_samples,) * num_microbatches)

    def backward(self, started: Started) -> tuple[float, float]:
        self.waiting -= sum(started.microbatch_sizes)
        return 1.0, 2.0


def test_as_much_waits_for_its_backward_as_a_step_keeps() -> None:
    block = WORKLOAD.kind_by_name["block"]
    measurement = object.__new__(ComputeMeasurement)
    measurement._workload = WORKLOAD
    measurement._sizes = {"block": [1, 2]}
    for most_bytes, most_samples in ((2**40, 8), (5 * block.activation_bytes, 5)):
        fake = FakeRunner()
        measurement._runners = {"block": fake}  # type: ignore[dict-item]
        measurement._most_waiting_bytes = most_bytes
        samples = measurement.run_rounds(0.0, min_rounds=4)["block"].seconds
        # Two blocks, two microbatches of two samples each.
        assert (fake.most_waiting, fake.waiting) == (most_samples, 0)
        assert samples == {1: [(1.0, 2.0)] * 4, 2: [(1.0, 2.0)] * 4}
        before = fake.num_forward
        samples = measurement.run_rounds(1e-2, min_rounds=1)["block"].seconds
        assert fake.most_waiting == most_samples
        assert len(samples[1]) + len(samples[2]) < fake.num_forward - before  # it was filled


# Hosts #


def test_a_host_has_what_its_devices_leave_and_the_pace_of_all_its_ranks() -> None:
    def part(free: int | None, device: int | None) -> HostPartReport:
        return HostPartReport(bytes_per_s=2e9, free_bytes=free, device_bytes=device)

    assert room_of([part(1000, 0), part(900, 0)]) == 810  # a tenth stays free
    assert room_of([part(1000, 300), part(1000, 200)]) == 450  # emulated on the host
    assert room_of([part(1000, 900), part(1000, 900)]) == 1  # none: 0 would be no limit
    assert room_of([part(1000, None)]) is None  # the device is the host
    assert room_of([part(None, 0)]) is None
    assert room_of([]) is None
    specs = [DeviceSpec(host=host, kind="x", memory_capacity_bytes=1) for host in "aba"]
    parts = [part(1000, 0), part(500, 0), part(1000, 0)]
    nodes = make_cluster(specs, [], parts).nodes
    assert [node.host_memory_bytes for node in nodes] == [900, 450]
    assert [node.host_bytes_per_s for node in nodes] == [4e9, 2e9]
    assert make_cluster(specs, []).nodes[0].host_bytes_per_s is None


# Ranks #


def measure_three(rank: int) -> str:
    kind = ("fast", "fast", "slow")[rank]
    spec = DeviceSpec(host="here", kind=kind, memory_capacity_bytes=2**33)
    return measure(trained(), device_spec=spec, effort=QUICK).scenario.profile.to_json()


def test_all_ranks_have_the_same_profile() -> None:
    results = run_ranks(measure_three, 3)
    assert len(set(results)) == 1
    assert len(Profile.from_json(results[0]).pairs) == 3


class Breaks(nn.Module):
    """Fails where it computes for real, on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def fail_to_measure(rank: int) -> None:
    model = TrainedModel(
        module=Breaks(rank), batch=ExampleBatch(args=(torch.zeros(2, 4 + rank),))
    )
    measure(model, effort=QUICK)


def test_a_failure_on_one_rank_is_told_on_all() -> None:
    outcomes = run_ranks_expecting_failure(fail_to_measure, 2, within_s=30.0)
    assert all("rank 1" in outcome.message for outcome in outcomes if outcome.rank == 0)
    assert outcomes[0].exception_name == "RuntimeError"
    assert all(outcome.exception_name in ("RuntimeError", "ValueError") for outcome in outcomes)


# The command #

TINY = (*SMALL_MODEL, "max_microbatch_size=2", "num_repeats=3", "time_limit_s=300")
COMMAND = (*SHARDHET, "measure")


def test_the_command_writes_what_a_plan_needs_and_says_what_comes_next(tmp_path: Path) -> None:
    kinds = "cluster.kinds=[big,small]"
    done = run([*COMMAND, *TINY, kinds, "out=here"], tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "here"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"cluster.json", "workload.json", "profile.json"} <= names
    assert {"config.yaml", "run.json", "logs/rank1.log"} <= names
    cluster, workload = (
        Cluster.load(folder / "cluster.json"),
        Workload.load(folder / "workload.json"),
    )
    profile = Profile.load(folder / "profile.json")
    plan = find_plan(Scenario(cluster, workload, profile), global_batch_size=4)
    assert [rank.device.kind for rank in plan.ranks] == ["big", "small"]
    assert (
        json.loads((folder / "profile.json").read_text())["version"] == Profile.document_version
    )
    assert "all ranks computing at once" in done.stdout
    assert f"shardhet plan measured={folder}" in done.stdout
    again = run([*COMMAND, *TINY, "out=here"], tmp_path)
    assert again.returncode == 1
    assert "holds a profile already" in again.stderr


def test_a_rank_that_fails_ends_the_measurement_with_a_panel(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        'if os.environ.get("RANK") == "1":\n'
        "    import shardhet.profiler.compute as compute\n"
        "    def fail(*_):\n"
        '        raise RuntimeError("no such luck")\n'
        "    compute.ComputeMeasurement.warm_up = fail\n"
    )
    done = run([*COMMAND, *TINY, "cluster.num_ranks=2", "out=here"], tmp_path)
    assert done.returncode == 1
    assert "no such luck" in done.stderr
    assert "the run failed" in done.stderr
    assert not (tmp_path / "here" / "profile.json").exists()


@pytest.mark.parametrize(
    "override, words",
    [
        ("num_repeats=2", "num_repeats: 2 but it must be at least 3"),
        ("max_microbatch=4", "Did you mean max_microbatch_size?"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    tmp_path: Path, override: str, words: str
) -> None:
    done = run([*COMMAND, override], tmp_path)
    assert done.returncode == 1
    assert words in done.stderr.replace("\n", " ")
    assert not list(tmp_path.glob("measured/*"))


def test_help_names_the_groups_and_the_keys(tmp_path: Path) -> None:
    done = run([*COMMAND, "--help"], tmp_path)
    assert done.returncode == 0
    for word in ("out=DIR", "llama_7b", "max_microbatch_size: 32", "shardhet plan measured"):
        assert word in done.stdout
