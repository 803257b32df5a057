"""A device that slows down is noticed, named with figures, and given less to do."""

import re
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import (
    Cluster,
    DeviceSpec,
    HetFSDP,
    Hook,
    Hooks,
    Plan,
    Predicted,
    Profile,
    Rebalancer,
    Scenario,
    describe,
)
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.apps.run.model_to_measure import random_batch
from shardhet.apps.run.prediction import Prediction
from shardhet.apps.run.run_log import RunLog
from shardhet.apps.run.task import make_module
from shardhet.comm.channel import progress
from shardhet.config.checks import ConfigError
from shardhet.planner.problem.constraints import Constraints
from shardhet.planner.stages.again import planned_again
from shardhet.profiler.batch import ExampleBatch
from shardhet.records.cluster import Link, Node
from shardhet.records.profiles import Collectives, DeviceProfile, Source
from shardhet.records.schedule import StepForm
from shardhet.records.stages import Stage
from shardhet.training.rebalancing import NUM_WARM_UP_STEPS, WINDOW, Imbalance
from shardhet.training.slow_devices import (
    SLOW,
    at_speeds,
    compute_seconds,
    places_of,
    rounded,
    slownesses,
    step_seconds,
)
from tests.made_up import device_profile
from tests.selection import one_in
from tests.small_models import Chain
from tests.test_worker import configure
from tests.worlds import on_ranks, run_ranks

WIDTH = 6
SAMPLE_S = 0.004  # that a layer sleeps for each sample
BLOCK_S = 0.05  # that a decoder's only block does
BATCH = 12
SLOWS_AFTER = 8
NUM_STEPS = 24
SAME = 1e-12
FAST = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)


class Sleeper(nn.Module):
    """A layer that takes a time that no busy machine changes much."""

    seconds_per_sample = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(Sleeper.seconds_per_sample * len(x))
        return x + self.linear(x).tanh()


def make() -> nn.Module:
    return Chain(*(Sleeper() for _ in range(3))).double()


def scenario_of(world_size: int, **changes: Any) -> Scenario:
    """Equal devices of ample memory; communication is not counted."""
    Sleeper.seconds_per_sample = 0.0
    workload = describe(make(), ExampleBatch(args=(torch.ones(2, WIDTH).double(),)))
    device = DeviceSpec(host="here", kind="cpu", memory_capacity_bytes=2**32)
    profile = device_profile(
        "cpu",
        lambda m: (SAMPLE_S * m, SAMPLE_S * m / 1000),
        sizes=range(1, BATCH + 1),
        unit_kinds=[kind.name for kind in workload.kinds],
    )
    return Scenario(
        Cluster(nodes=(Node(host="here", devices=(device,) * world_size, link=FAST),)),
        workload,
        Profile(devices=(profile,), collectives=Collectives(source=Source.MEASURED, points=())),
    )


class Course(Hook):
    """Makes rank 1 slower after some steps, and keeps what a rank saw of a run."""

    plan: Plan  # in the end

    def __init__(self, rank: int, slowness: float, rebalancer: Rebalancer) -> None:
        self._slowness = slowness if rank == 1 else 1.0
        self.rebalancer: Rebalancer | None = rebalancer
        self.losses: list[float | None] = []
        self.found: list[tuple[int, Imbalance]] = []
        self.told: list[str] = []

    def say(self, text: str, level: int = 0) -> None:
        self.told.append(text)

    def before_step(self, step: int) -> None:
        slowness = self._slowness if step > SLOWS_AFTER else 1.0
        Sleeper.seconds_per_sample = SAMPLE_S * slowness

    def after_step(self, step: int, loss: float | None) -> None:
        self.losses.append(loss)
        assert self.rebalancer is not None
        if self.rebalancer.found is not None:
            self.found.append((step, self.rebalancer.found))


def train(rank: int, plan: Plan, *, slowness: float, replans: bool, num_steps: int) -> Course:
    """In a loop of its own."""
    scenario = scenario_of(plan.world_size)
    torch.manual_seed(0)
    model = HetFSDP(make(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rebalancer = Rebalancer(scenario, replans=replans)
    course = Course(rank, slowness, rebalancer)
    x = torch.randn(num_steps, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    hooks = Hooks(model, optimizer, [Predicted(scenario), rebalancer, course], say=course.say)
    with hooks:
        for batch in hooks.steps(x):
            optimizer.zero_grad()
            mine = batch[model.plan.sample_indices(model.position)].double()
            model.forward_backward(mine)
            optimizer.step()
            with torch.no_grad():  # does not count
                model.eval()(mine)
                model.train()
    course.plan, course.rebalancer = model.plan, None
    *said, beside = course.told
    assert len(said) == len(course.found)
    assert re.fullmatch(
        r"a step was predicted to take \d+ ms and took .* ms \(.*\): .*%", beside
    )
    return course


def slow_down(rank: int, plan: Plan, replans: bool) -> Course:
    return train(rank, plan, slowness=2.5, replans=replans, num_steps=NUM_STEPS)


def stay_as_fast(rank: int, plan: Plan) -> Course:
    return train(rank, plan, slowness=1.0, replans=True, num_steps=NUM_STEPS)


EVEN = Plan.even(2, microbatch_size=BATCH // 2)
ONE_STORES = Plan.by_hand(
    microbatch_sizes=[6, 6, 0], rank_batch_sizes=[6, 6, 0], state_shares=[0.3, 0.2, 0.5]
)


IN_ROUNDS = Plan.by_hand(
    microbatch_sizes=[3, 3],
    num_rounds=2,
    reshard_after_forward=False,
    reshard_after_backward=False,
    reduce_each_round=False,
)
IN_STAGES = Plan.by_hand(
    microbatch_sizes=[3, 3, 6],
    num_rounds=2,
    stages=[
        Stage(units=("layers.[01]",), num_ranks=2),
        Stage(units=("layers.2",), num_ranks=1),
    ],
)
PLANS = [EVEN, ONE_STORES, IN_ROUNDS, IN_STAGES]
ids = ["two", "one only stores", "in rounds", "in stages"]


@pytest.mark.parametrize("plan", one_in(6, PLANS), ids=ids)
def test_a_slowed_rank_is_given_less_within_ten_steps_and_results_stay(plan: Plan) -> None:
    courses = run_ranks(slow_down, plan.world_size, plan, True)
    undisturbed = run_ranks(stay_as_fast, plan.world_size, plan)
    for course, reference in zip(courses, undisturbed, strict=True):
        step, imbalance = course.found[0]
        assert SLOWS_AFTER < step <= SLOWS_AFTER + 10
        assert 1 in imbalance.slow
        assert imbalance.new_plan is not None
        assert imbalance.new_plan.predicted_s < imbalance.new_plan.predicted_before_s
        assert StepForm.of(imbalance.new_plan.plan).num_rounds == plan.num_rounds
        assert imbalance.new_plan.plan.reduce_each_round == plan.reduce_each_round
        batches = [rank.rank_batch_size for rank in imbalance.new_plan.plan.ranks]
        assert imbalance.new_plan.plan.global_batch_size == BATCH
        assert imbalance.new_plan.plan.stages == plan.stages
        assert batches[1] < plan.ranks[1].rank_batch_size
        assert course.losses == pytest.approx(reference.losses, rel=SAME)
        text = imbalance.text(["cpu"] * plan.world_size)
        assert "device 1 (cpu) computes" in text
        assert f"batches of {batches[0]}, {batches[1]}" in text
    assert len({course.found[0][1].new_plan.plan.digest for course in courses}) == 1  # type: ignore[union-attr]


def test_a_profile_that_is_off_for_all_alike_is_no_alarm() -> None:
    assert slownesses([3.0, 6.0, 1.5], [1.0, 2.0, 0.5]) == (1.0, 1.0, 1.0)
    assert slownesses([1.0, 4.0], [1.0, 2.0]) == (1.0, 2.0)
    assert slownesses([1.0, 1.0, 0.0, 4.0], [1.0, 1.0, 0.0, 2.0]) == (1.0, 1.0, None, 2.0)
    assert slownesses([0.0], [0.0]) == (None,)


def test_noise_makes_no_kinds_of_devices() -> None:
    assert rounded(1.02) == rounded(0.98) == 1.0
    assert rounded(2.0) == pytest.approx(2.0, rel=0.025)


def test_a_plan_is_compared_with_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "predicted_bytes", 0)
    prediction = Prediction.in_scenario(Plan.even(3, microbatch_size=4), scenario_of(3))
    log = RunLog(prediction, 0)
    for step_time_s in (9.0, 1.0):
        log.expect(prediction)
        log.outcome.step_times_s += 8 * [step_time_s]
    assert "took 1000 ms (median of 8)" in log.outcome.beside(prediction)


def test_a_scenario_at_other_speeds_predicts_by_them() -> None:
    scenario = scenario_of(3)
    plan = Plan.even(3, microbatch_size=4)
    before = compute_seconds(plan, scenario)
    slower = at_speeds(scenario, {1: 2.0, 2: 2.0})
    assert compute_seconds(plan, slower) == pytest.approx(
        (before[0], 2 * before[1], 2 * before[2])
    )
    assert step_seconds(plan, slower) == pytest.approx(2 * step_seconds(plan, scenario))
    assert len({device.kind for device in slower.cluster.devices}) == 2
    assert slower.profile.device("cpu") == scenario.profile.device("cpu")


def test_stages_take_the_devices_of_a_cluster_in_any_order() -> None:
    scenario = scenario_of(3)
    [node], [device] = scenario.cluster.nodes, scenario.profile.devices
    last = replace(node.devices[2], kind="gpu")
    scenario = replace(
        scenario,
        cluster=Cluster(nodes=(replace(node, devices=(*node.devices[:2], last)),)),
        profile=replace(scenario.profile, devices=(device, replace(device, device_kind="gpu"))),
    )
    plan = Plan.by_hand(
        microbatch_sizes=[6, 3, 3],
        num_rounds=2,
        devices=[DeviceSpec(kind=kind) for kind in ("gpu", "cpu", "cpu")],
        stages=[
            Stage(units=("layers.0",), num_ranks=1),
            Stage(units=("layers.[12]",), num_ranks=2),
        ],
    )
    places = places_of(plan, scenario)
    assert places == (2, 0, 1)
    slower = at_speeds(scenario, {places[1]: 2.0})
    seconds = compute_seconds(plan, slower, places)
    assert seconds[1] == pytest.approx(2 * seconds[2])
    assert seconds[0] == pytest.approx(compute_seconds(plan, scenario, places)[0])
    anew = planned_again(plan, slower, places, stages=[1], constraints=Constraints())
    assert anew.ranks[0] == plan.ranks[0]
    batches = [rank.rank_batch_size for rank in anew.ranks]
    assert batches == [6, 2, 4]
    assert step_seconds(anew, slower, places) < step_seconds(plan, slower, places)


def test_a_slow_down_is_found_within_ten_steps_whenever_it_begins() -> None:
    looks = [NUM_WARM_UP_STEPS + WINDOW * i for i in range(1, 20)]
    for begins in range(1, 60):  # the first step that is slow
        found = next(
            look
            for look in looks
            if sum(step >= begins for step in range(look - 4, look + 1)) > 2
        )
        assert found - begins + 1 <= 10 or begins <= NUM_WARM_UP_STEPS
    assert SLOW < 2


@on_ranks(1)
def test_a_scenario_of_another_model_is_refused(rank: int) -> None:
    model = HetFSDP(nn.Sequential(nn.Linear(2, 2)), Plan.even(1, microbatch_size=1))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="Measure this model on this cluster"):
        Hooks(model, optimizer, [Rebalancer(scenario_of(1))]).__enter__()


def measured_decoder(folder: Path, keys: tuple[str, ...]) -> Scenario:
    """A scenario of the run's model, in which only blocks take time."""
    conf = RunFolder(Path(configure(folder / "described", *keys))).load_config()
    module = make_module(conf.model, conf.data, conf.precision)
    workload = describe(module, random_batch(module, conf.data, seed=0))
    slow = max(
        workload.kinds, key=lambda kind: kind.forward_flops * (len(kind.param_shapes) > 3)
    )
    device = DeviceSpec(memory_capacity_bytes=2**32)
    [block], others = [
        device_profile(
            "any",
            lambda m, each=each: (each * m, each * m / 1000),
            sizes=range(1, 9),
            unit_kinds=names,
        ).units
        for each, names in (
            (BLOCK_S, [slow.name]),
            (1e-6, [kind.name for kind in workload.kinds if kind is not slow]),
        )
    ]
    profile = DeviceProfile(device_kind="any", source=Source.MEASURED, units=(block, *others))
    named = replace(device, kind="any")
    return Scenario(
        Cluster(nodes=(Node(host=socket.gethostname(), devices=(named, named)),)),
        workload,
        Profile(devices=(profile,), collectives=Collectives(source=Source.MEASURED, points=())),
    )


def test_rebalancing_requires_a_measured_profile() -> None:
    from shardhet.config.train import TrainConf
    from shardhet.config.training import EvenPlanConf

    conf = TrainConf(rebalance=True, plan=EvenPlanConf())
    with pytest.raises(ConfigError, match=r"plan\.measured"):
        conf.check_rebalance()
