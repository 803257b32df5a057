"""Bytes from each rank to each other one in a step: those that the schedule's launches need.

Plans are random, with zero shares and with ranks that only store.
"""

import random
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardhet import HetFSDP, Plan
from shardhet.fsdp.sharding.flat import FlatTensor
from tests.hosts import on_different_hosts
from tests.selection import one_in
from tests.test_order import around_collectives
from tests.worlds import run_ranks

WIDTH, WORLD_SIZE, CASES_OF_A_WORLD, ITEMSIZE = 6, 4, 4, 8

Bytes = Counter[int]  # by the position that they go to
Launches = list[tuple[str, FlatTensor]]


def drawn_plan(rng: random.Random) -> Plan:
    """Some devices only compute, some only store, some do nothing."""
    sizes = [rng.choice([0, 1, 1, 2]) for _ in range(WORLD_SIZE)]
    sizes[rng.randrange(WORLD_SIZE)] = 2
    weights = [rng.choice([0.0, 0.0, rng.random()]) for _ in range(WORLD_SIZE)]
    weights[rng.randrange(WORLD_SIZE)] = 1.0
    return Plan.by_hand(
        microbatch_sizes=sizes,
        state_shares=[each / sum(weights) for each in weights],
        reshard_after_forward=rng.random() < 0.7,
    )


def wrapped(plan: Plan, device: torch.device) -> HetFSDP:
    """A model that has taken its first step, in which it was probed."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)))
    model = HetFSDP(module, plan, units=[nn.Linear], device=device)
    train(model)
    return model


Make = Callable[[Plan, torch.device], HetFSDP]


def kinds_of(launches: Launches) -> set[bool]:
    """Whether they are of what is trained."""
    return {flat.is_trainable for _, flat in launches}


def train(model: HetFSDP) -> Launches:
    """The launches of one step."""
    launches: Launches = []
    own = model.plan.ranks[model.position].rank_batch_size
    for param in model.parameters():
        param.grad = None
    x = torch.randn(own, WIDTH, dtype=torch.float64).to(model.device)
    with around_collectives(lambda kind, flat: launches.append((kind, flat))):
        model.backward(model(x).sum(), own)
    return launches


def computing(plan: Plan) -> list[int]:
    return [i for i, each in enumerate(plan.ranks) if each.rank_batch_size]


# Over messages


def over_messages(
    rank: int, seed: int, make: Make = wrapped
) -> list[tuple[Bytes, Bytes, set[bool]]]:
    """Of each plan what was sent, what had to be sent, and whether of what is trained."""
    rng, cpu, found = random.Random(seed), torch.device("cpu"), []
    post = dist.batch_isend_irecv
    for _ in range(CASES_OF_A_WORLD):
        plan, sent = drawn_plan(rng), Bytes()

        def count(ops: list[dist.P2POp], sent: Bytes = sent) -> list[dist.Work]:
            for op in ops:
                if op.op is dist.isend:
                    sent[op.group_peer] += op.tensor.numel() * ITEMSIZE
            return post(ops)

        with on_different_hosts():
            model = make(plan, cpu)
            with mock.patch.object(dist, "batch_isend_irecv", count):
                launches = train(model)
        assert model.position == rank
        found.append((sent, needed_messages(plan, rank, launches), kinds_of(launches)))
    return found


def needed_messages(plan: Plan, rank: int, launches: Launches) -> Bytes:
    """The rows of this rank to all that compute, and what it adds to sums of others."""
    needed = Bytes()
    for kind, flat in launches:
        numels = flat.layout.shard_numels
        if kind == "gather":
            others = set(computing(plan)) - {rank}
            needed += Bytes(dict.fromkeys(others, numels[rank] * ITEMSIZE))
        elif rank in computing(plan):
            others = set(range(WORLD_SIZE)) - {rank}
            needed += Bytes({i: numels[i] * ITEMSIZE for i in others})
    return needed


@pytest.mark.parametrize("seed", one_in(50, range(50)))
def test_messages_are_those_of_the_launches(seed: int) -> None:
    for cases in run_ranks(over_messages, WORLD_SIZE, seed):
        assert [sent for sent, *_ in cases] == [+needed for _, needed, _ in cases]
