"""What the runtime launches, and when: the schedule's list and nothing else, on every rank.

Recorded at the two collectives that flat tensors call, by the unit that calls them.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.comm import collectives
from shardhet.extras.shared_host.arena import PeerArena
from shardhet.fsdp.probing.prober import Prober
from shardhet.fsdp.sharding import flat as flat_module
from shardhet.fsdp.sharding import flat_grad
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.records.ops import ops_of
from shardhet.records.schedule import LaunchKind, Segment, StepForm, make_schedule
from tests.drawn_cases import Case, draw_case
from tests.parity import Batch, Course, Problem, check_parity, part_of, take_rounds
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
                # The flat tensor calls, or its unit has its gradient call.
                depth, name = (1, "self") if kind == "gather" else (2, "flat")
                launch(kind, sys._getframe(depth).f_locals[name])
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


# Bytes of a step


def count_bytes(rank: int, plan: Plan) -> tuple[int, int]:
    """Bytes that arrive in a step through memory, and what launches allow for this rank."""
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
        mock.patch.object(PeerArena, "view", count_read),
        mock.patch.object(PeerArena, "copy_to", count_copied),
    ):
        model.backward(*model(x))
    return arrived, allowed


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_step_moves_what_ranks_lack_and_no_byte_more(world_size: int) -> None:
    """What goes by messages is in test_bytes_of_links."""
    counts = run_ranks(count_bytes, world_size, plan(world_size, num_microbatches=3))
    assert all(arrived == allowed for arrived, allowed in counts)
    if world_size == 2:  # the rank that only stores has all and gets gradients once
        numel = 4 * (WIDTH * WIDTH + WIDTH) + WIDTH
        assert counts[1][0] == numel * 8


# Schedules under random delays


def run_trials(rank: int, world_size: int, seeds: Sequence[int]) -> None:
    """Drawn steps with delays of its own on each rank; before some, a forward is forgotten."""
    for seed in seeds:
        case = draw_case(seed, world_size=world_size)
        check_parity_late(rank, case, random.Random(f"{seed}/{rank}"), random.Random(seed))


def check_parity_late(
    rank: int, case: Case, of_rank: random.Random, of_all: random.Random
) -> None:
    def delay(*_: Any) -> None:
        if of_rank.random() < 0.3:
            time.sleep(of_rank.uniform(0.0, 0.002))

    def take(
        model: HetFSDP, problem: Problem, plan: Plan, batch: Batch, course: Course, step: int
    ) -> float | None:
        if step == 0:
            model.add_observer(delay)
        delay()
        mine = part_of(batch, course.rank_batch_sizes[step], model.position)
        action = of_all.choices(["train", "evaluate", "forget"], [6, 1, 1])[0]
        if action != "train":
            with torch.no_grad() if action == "evaluate" else nullcontext():
                problem.loss(model, mine)
        return take_rounds(model, problem, plan, batch, course, step)

    try:
        with around_collectives(delay):
            check_parity(rank, case.problem, case.plan, case.course, take=take)
    except Exception as error:
        error.add_note(str(case))
        raise


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
