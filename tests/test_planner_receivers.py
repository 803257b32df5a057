"""Plans where the time of collectives depends on who computes and on who stores how much."""

from collections.abc import Iterator
from itertools import product
from math import inf

import numpy as np
import pytest

from shardhet.planner import Constraints, DeviceLimits, PlanError, find_plan, solve
from shardhet.planner.candidates.recompute import recompute_choices
from shardhet.pricing.cost import CostModel
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster, DeviceSpec, Node
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.profiles import Profile
from shardhet.records.workload import Workload
from tests.made_up import collectives, device_profile
from tests.selection import one_in

WORKLOAD = Workload.transformer(
    num_layers=1, width=64, num_heads=4, seq_len=32, vocab_size=128, hidden_width=160
)
STATE_BYTES = 16 * WORKLOAD.numel
SIZES = (1, 2, 3, 4)
EQUAL = Constraints(equal=((0, 1),))
DEMANDS = (
    Constraints(),
    EQUAL,
    Constraints(limits={0: DeviceLimits(state_share=0.3)}),
    Constraints(has_even_state=True),
)
IDLE = Constraints(limits={1: DeviceLimits(rank_batch_size=0)})


def drawn(seed: int) -> tuple[Scenario, int, Constraints]:
    """Two devices, a batch of up to four, and demands; curves have noise, and a fall."""
    rng = np.random.default_rng(seed % 1000)
    demands = DEMANDS[seed % len(DEMANDS)] if seed < 1000 else IDLE
    kinds = "AA" if demands == EQUAL or rng.uniform() < 0.3 else "AB"
    profiles = []
    for kind in dict.fromkeys(kinds):
        forward_s = float(np.exp(rng.normal(0, 0.7))) * rng.uniform(0.8, 1.2, len(SIZES))
        forward_s *= np.array([1, 2, 1.6, 4])  # three take less than two
        profiles.append(
            device_profile(
                kind,
                lambda size, forward_s=forward_s: (
                    forward_s[size - 1],
                    2 * forward_s[size - 1],
                ),
                sizes=SIZES,
                optimizer_seconds_per_element=float(rng.choice([0.0, 1e-6, 3e-5])),
                overlap_slowdown=float(rng.choice([0.0, 0.4, 1.7])),
            )
        )
    pace = float(np.exp(rng.normal(-12, 2)))
    links = collectives(
        (10**4, 10**5),
        gather_s_per_byte=pace,
        reduce_s_per_byte=2 * pace,
        gather_unevenness_weight=1.0,
        reduce_unevenness_weight=0.5,
    )
    roomy = float(rng.uniform(0.8, 4))
    devices = tuple(
        DeviceSpec(
            kind=kind, memory_capacity_bytes=int(roomy * STATE_BYTES * rng.uniform(0.5, 1))
        )
        for kind in kinds
    )
    cluster = Cluster(nodes=(Node(host="a", devices=devices),))
    scenario = Scenario(cluster, WORKLOAD, Profile(devices=tuple(profiles), collectives=links))
    return scenario, int(rng.integers(2, 5)), demands


def all_plans(scenario: Scenario, batch: int, demands: Constraints) -> Iterator[Plan]:
    """In one round; microbatches are alike but the last, shares tenths and what is asked."""
    shares = {each / 10 for each in range(11)}
    asked = demands.limits.get(0)
    if asked is not None and asked.state_share is not None:
        shares = {asked.state_share}
    if demands.has_even_state or demands == EQUAL:
        shares = {0.5}
    for reshards in (True, False):
        choices = recompute_choices(CostModel(scenario, reshards), 1)
        ways = [
            (
                number,
                (size,) * (number // size) + (number % size,) * (number % size > 0),
                choice,
            )
            for number in range(batch + 1)
            for size in range(1, max(2, number + 1))
            for choice in (choices if number else [()])
        ]
        for one, other in product(ways, repeat=2):
            if one[0] + other[0] != batch or (demands == EQUAL and one != other):
                continue
            if other[0] and demands == IDLE:
                continue
            for share in shares:
                ranks = tuple(
                    RankPlan(
                        device=device,
                        microbatch_sizes=sizes,
                        state_share=stored,
                        recomputed_units=recomputed,
                    )
                    for device, (_, sizes, recomputed), stored in zip(
                        scenario.cluster.devices, (one, other), (share, 1 - share), strict=True
                    )
                )
                yield Plan(ranks=ranks, reshard_after_forward=reshards)


@pytest.mark.sampled(2)
# Whatever shares, equal devices, even state, an exact share; one of two computes or both.
# At last one that computes, beside one that stores nothing either.
@pytest.mark.parametrize(
    "seed", [*one_in(3, [0, 36, 52, 9, 41, 3, 7, 23, 10, 34, 46]), 1003, 1013]
)
def test_no_plan_of_many_is_faster_and_the_bound_is_close(seed: int) -> None:
    scenario, batch, demands = drawn(seed)
    budgets = [demands.budget_bytes(scenario.cluster, i) for i in range(2)]
    plans = all_plans(scenario, batch, demands)
    priced = (CostModel(scenario).predict(plan).within(budgets) for plan in plans)
    fitting = (each for each in priced if all(rank.fits for rank in each.ranks))
    best_s = min((each.step_time_s for each in fitting), default=inf)
    solution = solve(scenario, global_batch_size=batch, constraints=demands)
    planned_s = solution.predicted.step_time_s
    assert planned_s <= best_s * 1.001
    assert 0.96 * planned_s <= solution.lower_bound_s <= min(planned_s, best_s) * (1 + 1e-9)
    find_plan(scenario, global_batch_size=batch, constraints=demands)


def test_optimizers_on_hosts_leave_room_for_shares() -> None:
    """Without that room, the best would be as two devices of which one computes: 36.2 s."""
    seconds = {1: (1.109, 1.669), 2: (1.836, 4.262), 3: (1.282, 2.944), 4: (3.291, 6.476)}
    profile = device_profile(
        "A",
        seconds.__getitem__,
        sizes=SIZES,
        optimizer_seconds_per_element=1e-6,
        overlap_slowdown=0.4,
    )
    links = collectives(
        (10**4, 10**5),
        gather_s_per_byte=7.586e-6,
        reduce_s_per_byte=1.517e-5,
        reduce_unevenness_weight=0.5,
    )
    devices = tuple(
        DeviceSpec(kind="A", memory_capacity_bytes=nbytes) for nbytes in (1_510_785, 1_559_937)
    )
    cluster = Cluster(nodes=(Node(host="a", devices=devices),), usable_memory_fraction=0.72)
    found = solve(
        Scenario(cluster, WORKLOAD, Profile(devices=(profile,), collectives=links)),
        global_batch_size=4,
        constraints=Constraints(may_keep_optimizer_on_host=True),
    )
    assert found.predicted.step_time_s == pytest.approx(19.517, rel=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", one_in(3, range(12)))
def test_a_plan_to_prefer_is_found_where_links_depend_on_shares(seed: int) -> None:
    scenario, batch, demands = drawn(seed)
    try:
        fastest = solve(scenario, global_batch_size=batch, constraints=demands)
    except PlanError:
        return
    chosen = solve(scenario, global_batch_size=batch, constraints=demands, tolerance=5e-3)
    assert chosen.predicted.step_time_s <= 1.006 * fastest.predicted.step_time_s
