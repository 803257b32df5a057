"""What the runtime launches, and when: the schedule's list and nothing else, on every rank.

Recorded at the two collectives that flat tensors call, by the unit that calls them.
"""

import copy
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.comm import collectives
from shardhet.extras.shared_host.arena import PeerArena
from shardhet.fsdp.probing.prober import Prober
from shardhet.fsdp.sharding import flat as flat_module
from shardhet.fsdp.sharding import flat_grad
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.records.schedule import LaunchKind, Segment, StepForm, make_schedule, ops_of
from tests.hosts import on_different_hosts
from tests.selection import one_in
from tests.worlds import run_ranks

WIDTH = 4
ROOT = "root"
Launches = list[tuple[str, str]]


class Net(nn.Module):
    """Visits its layers in the order given; ``scale`` belongs to the root."""

    def __init__(self, visits: Sequence[int], *, frozen: Sequence[int] = ()) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(max(visits) + 1)]
        self.layers = nn.ModuleList(layers)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        self.visits = tuple(visits)
        for i in frozen:
            self.layers[i].requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for i in self.visits:
            x = x + self.layers[i](x).tanh()
        return (x * self.scale).square().sum(), len(x)


def global_batch(num_samples: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)


def deal(model: HetFSDP, batch: Tensor) -> Tensor:
    first = model.plan.first_sample(model.position)
    return batch[first : first + model.plan.ranks[model.position].rank_batch_size]


# Recording


@contextmanager
def around_collectives(launch: Callable[[str, FlatTensor], None]) -> Iterator[None]:
    """Call ``launch`` with the kind and the flat tensor of each collective that is launched.

    Those of a probe, before the first step, are left out.
    """
    num_probes = 0
    run_once = Prober.run_once

    def probing(*args: Any) -> Any:
        nonlocal num_probes
        num_probes += 1
        try:
            return run_once(*args)
        finally:
            num_probes -= 1

    def watched(kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not num_probes:
                # The flat tensor calls, or has its gradient call.
                depth = 1 if kind == "gather" else 2
                launch(kind, sys._getframe(depth).f_locals["self"])
            return collective(*args, **kwargs)

        return call

    with (
        mock.patch.object(Prober, "run_once", probing),
        mock.patch.object(
            flat_module, "all_gather_uneven", watched("gather", collectives.all_gather_uneven)
        ),
        mock.patch.object(
            flat_grad,
            "reduce_scatter_uneven",
            watched("reduce", collectives.reduce_scatter_uneven),
        ),
    ):
        yield


@contextmanager
def recorded(launches: Launches) -> Iterator[None]:
    """Append ``(kind, unit)`` for every launch."""

    def launch(kind: str, flat: FlatTensor) -> None:
        fqn = flat.slots[0].fqn
        launches.append((kind, fqn.split(".")[1] if "." in fqn else ROOT))

    with around_collectives(launch):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A model's order of visits and how its parameters are treated."""

    visits: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    num_without_backward: int = 0  # visits at the bottom whose inputs need no gradient
    reshard_after_forward: bool = True

    def model(self) -> Net:
        return Net(self.visits, frozen=self.frozen)

    def expected(self, *, with_grad: bool = True) -> Launches:
        schedule = make_schedule(
            [
                Segment(unit, with_grad and i >= self.num_without_backward)
                for i, unit in enumerate(self.visits)
            ],
            trainable_units=frozenset(self.visits) - frozenset(self.frozen),
            form=StepForm(reshard_after_forward=self.reshard_after_forward or not with_grad),
        )
        ops = ops_of(schedule)
        launches = [
            (op.kind.value, str(op.unit)) for op in ops if isinstance(op.kind, LaunchKind)
        ]
        return [("gather", ROOT), *launches, *([("reduce", ROOT)] if with_grad else [])]


def plan(world_size: int, *, num_microbatches: int = 1, reshards: bool = True) -> Plan:
    """The last of several ranks only stores, the first stores nothing."""
    if world_size == 1:
        counts, shares = [num_microbatches], [1.0]
    else:
        counts = [num_microbatches] * (world_size - 1) + [0]
        shares = [0.0] + [1 / (world_size - 1)] * (world_size - 1)
    return Plan.by_hand(
        microbatch_sizes=[2] * world_size,
        num_microbatches=counts,
        state_shares=shares,
        reshard_after_forward=reshards,
    )


def record_steps(rank: int, order: Order, plan: Plan, num_steps: int) -> list[Launches]:
    """The launches of each training step, and of an evaluation after each."""
    model = HetFSDP(order.model(), plan, units=[nn.Linear])
    x = deal(model, global_batch(plan.global_batch_size, seed=1))
    steps: list[Launches] = []
    for _ in range(num_steps):
        for with_grad in (True, False):
            steps.append([])
            with recorded(steps[-1]), nullcontext() if with_grad else torch.no_grad():
                loss_sum, num_tokens = model(x)
                if with_grad:
                    model.backward(loss_sum, num_tokens)
    return steps


ORDERS = {
    "plain": Order(visits=(0, 1, 2, 3)),
    "one unit": Order(visits=(0,)),
    "tied": Order(visits=(0, 1, 2, 0)),
    "shared": Order(visits=(0, 1, 1, 1, 2)),
    "alternating": Order(visits=(0, 1, 0, 1)),
    "frozen bottom": Order(visits=(0, 1, 2, 3), frozen=(0, 1), num_without_backward=2),
    "frozen middle": Order(visits=(0, 1, 2), frozen=(1,)),
    "kept": Order(visits=(0, 1, 2), reshard_after_forward=False),
    "kept and tied": Order(visits=(0, 1, 0), reshard_after_forward=False),
}


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ORDERS)
def test_every_rank_launches_the_schedule_from_the_first_step_on(
    name: str, world_size: int
) -> None:
    order = ORDERS[name]
    reshards = order.reshard_after_forward
    by_rank = run_ranks(record_steps, world_size, order, plan(world_size, reshards=reshards), 3)
    for steps in by_rank:
        assert steps == [order.expected(), order.expected(with_grad=False)] * 3


def test_alone_there_is_nobody_to_gather_from_or_to_reduce_with() -> None:
    (steps,) = run_ranks(record_steps, 1, ORDERS["tied"], plan(1), 2)
    assert steps == [[], []] * 2


@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_a_unit_costs_two_gathers_and_one_reduction_whatever_the_microbatches(
    num_microbatches: int,
) -> None:
    order = ORDERS["plain"]
    for steps in run_ranks(
        record_steps, 3, order, plan(3, num_microbatches=num_microbatches), 2
    ):
        for step in steps[::2]:
            assert Counter(step) == {
                ("gather", ROOT): 1,
                ("reduce", ROOT): 1,
                **{("gather", str(unit)): 2 for unit in range(3)},
                ("gather", "3"): 1,  # the last of forward is the first of backward
                **{("reduce", str(unit)): 1 for unit in range(4)},
            }


# Bytes of a step


def count_step_bytes(rank: int, plan: Plan, is_one_host: bool) -> tuple[int, int]:
    """Bytes that arrive in a step, and what the launches allow for this rank."""
    with nullcontext() if is_one_host else on_different_hosts():
        return count_bytes(plan)


def count_bytes(plan: Plan) -> tuple[int, int]:
    model = HetFSDP(ORDERS["plain"].model(), plan, units=[nn.Linear])
    x = deal(model, global_batch(plan.global_batch_size, seed=1))
    computing = [i for i, each in enumerate(plan.ranks) if each.rank_batch_size]
    num_others = len(set(computing) - {model.position})
    arrived = allowed = 0

    def launch(kind: str, flat: FlatTensor) -> None:
        nonlocal allowed
        own = flat.layout.shard_numels[model.position]
        if kind == "reduce":
            allowed += num_others * own * 8
        elif model.position in computing:
            allowed += (flat.layout.numel - own) * 8

    post = dist.batch_isend_irecv

    def count(ops: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal arrived
        arrived += sum(op.tensor.numel() * 8 for op in ops if op.op is dist.irecv)
        return post(ops)

    view, copy_to = PeerArena.view, PeerArena.copy_to

    def count_read(arena: PeerArena, place: int, numel: int, dtype: torch.dtype) -> Tensor:
        nonlocal arrived
        arrived += numel * 8
        return view(arena, place, numel, dtype)

    def count_copied(arena: PeerArena, tensor: torch.Tensor, place: int) -> None:
        nonlocal arrived
        arrived += tensor.numel() * 8
        copy_to(arena, tensor, place)

    model.backward(*model(x))  # after its probe
    with (
        around_collectives(launch),
        mock.patch.object(dist, "batch_isend_irecv", count),
        mock.patch.object(PeerArena, "view", count_read),
        mock.patch.object(PeerArena, "copy_to", count_copied),
    ):
        model.backward(*model(x))
    return arrived, allowed


@pytest.mark.sampled
@pytest.mark.parametrize("is_one_host", [True, False], ids=["memory", "messages"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_step_moves_what_ranks_lack_and_no_byte_more(
    world_size: int, is_one_host: bool
) -> None:
    layered = plan(world_size, num_microbatches=3)
    counts = run_ranks(count_step_bytes, world_size, layered, is_one_host)
    assert all(arrived == allowed for arrived, allowed in counts)
    if world_size == 2:  # the rank that only stores has all and gets gradients once
        numel = 4 * (WIDTH * WIDTH + WIDTH) + WIDTH
        assert counts[1][0] == numel * 8


def test_when_one_rank_has_and_does_everything_nothing_moves() -> None:
    on_one = Plan.by_hand(microbatch_sizes=[0, 2, 0], state_shares=[0.0, 1.0, 0.0])
    counts = run_ranks(count_step_bytes, 3, on_one, True)
    assert [arrived for arrived, _ in counts] == [0, 0, 0]


# Schedules under random delays


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A random model under a random plan."""

    visits: tuple[int, ...]
    plan: Plan
    host_by_rank: tuple[str, ...]
    actions: tuple[str, ...]  # what is done with the model, one after the other


def random_trial(world_size: int, seed: int) -> Trial:
    rng = random.Random(seed)
    shares = [rng.choice([0.0, rng.random()]) for _ in range(world_size)]
    shares = shares if any(shares) else [1.0] * world_size
    batches = [rng.choice([0, 1, 2, 5]) for _ in range(world_size)]
    batches[rng.randrange(world_size)] = 3
    hosts = [f"host{i}" for i in range(world_size)]
    return Trial(
        visits=tuple(rng.randrange(4) for _ in range(rng.randint(1, 6))),
        plan=Plan.by_hand(
            microbatch_sizes=[rng.randint(1, 3) for _ in range(world_size)],
            rank_batch_sizes=batches,
            state_shares=[share / sum(shares) for share in shares],
            recompute=[rng.random() < 0.5 for _ in range(world_size)],
            devices=[DeviceSpec(host=host) for host in hosts],
            reshard_after_forward=rng.random() < 0.7,
        ),
        host_by_rank=tuple(rng.sample(hosts, world_size)),
        actions=tuple(rng.choices(["train", "evaluate", "forget"], [6, 1, 1], k=3)),
    )


def run_trials(rank: int, world_size: int, seeds: Sequence[int]) -> None:
    """Each trial with delays of its own on each rank; wrong results name the seed."""
    for seed in seeds:
        delays = random.Random(f"{seed}/{rank}")

        def delay(*_: Any, delays: random.Random = delays) -> None:
            if delays.random() < 0.3:
                time.sleep(delays.uniform(0.0, 0.002))

        with around_collectives(delay):
            compare_with_one_process(rank, random_trial(world_size, seed), delay, seed)


def compare_with_one_process(
    rank: int, trial: Trial, delay: Callable[..., None], seed: int
) -> None:
    plan = trial.plan
    torch.manual_seed(seed)
    whole = Net(trial.visits)
    model = HetFSDP(
        copy.deepcopy(whole),
        plan,
        units=[nn.Linear],
        device_spec=DeviceSpec(host=trial.host_by_rank[rank]),
    )
    assert trial.host_by_rank[rank] == f"host{model.position}"
    model.add_observer(delay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    whole_optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    for i, action in enumerate(trial.actions):
        batch = global_batch(plan.global_batch_size, seed=1000 * seed + i)
        delay()
        if action == "evaluate":
            with torch.no_grad():
                model(deal(model, batch))
            continue
        loss_sum, num_tokens = model(deal(model, batch))
        if action == "forget":
            continue
        loss = model.backward(loss_sum, num_tokens)
        norm = float(model.clip_grad_norm_(1e9))
        expected_sum, expected_tokens = whole(batch)
        (expected_sum / expected_tokens).backward()
        expected_norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 1e9))
        assert loss == pytest.approx(float(expected_sum) / expected_tokens, rel=1e-12), seed
        assert norm == pytest.approx(expected_norm, rel=1e-12), seed
        for each in (optimizer, whole_optimizer):
            each.step()
            each.zero_grad()


TRIALS_BY_WORLD_SIZE = {2: 80, 3: 70, 4: 50}
TRIALS_PER_TEST = 10


@pytest.mark.parametrize(
    "world_size, first_seed",
    one_in(
        20,
        (
            (world_size, first)
            for world_size, num_trials in TRIALS_BY_WORLD_SIZE.items()
            for first in range(0, num_trials, TRIALS_PER_TEST)
        ),
    ),
)
def test_no_delay_of_any_rank_brings_a_deadlock_or_a_wrong_gradient(
    world_size: int, first_seed: int
) -> None:
    seeds = list(range(first_seed, first_seed + TRIALS_PER_TEST))
    run_ranks(run_trials, world_size, world_size, seeds)
