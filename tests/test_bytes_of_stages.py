"""Messages of a step of a pipeline, one by one: those that the schedule and the plan need."""

import random
from collections import Counter
from itertools import pairwise
from unittest import mock

import pytest
import torch.distributed as dist

from shardhet import HetFSDP, Plan
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.records.ops import messages_between
from tests.hosts import on_different_hosts
from tests.selection import only
from tests.test_order import around_collectives
from tests.test_pipelines import SEQ_LEN, UNITS, WIDTH, Leaky, batch_of, staged
from tests.worlds import run_ranks

ITEMSIZE, CASES_OF_A_WORLD = 8, 5
# By the position that it goes to, and its bytes.
Messages = Counter[tuple[int, int]]
Launches = list[tuple[str, FlatTensor]]


def drawn_plan(rng: random.Random, world_size: int) -> Plan:
    """Stages of unlike numbers of ranks; some of them only compute, some only store."""
    num_stages = rng.choice([2, 3][: world_size - 1])
    numbers = [1] * num_stages
    for _ in range(world_size - num_stages):
        numbers[rng.randrange(num_stages)] += 1
    together, sizes, shares = rng.randint(1, 4), [], []
    for number in numbers:
        cuts = sorted(rng.randint(0, together) for _ in range(number - 1))
        sizes += [b - a for a, b in pairwise([0, *cuts, together])]
        weights = [rng.choice([0.0, rng.random()]) for _ in range(number)]
        weights[rng.randrange(number)] = 1.0
        shares += [each / sum(weights) for each in weights]
    return staged(sizes, numbers, rng.randint(1, 4), state_shares=shares)


def train(model: HetFSDP, num_samples: int) -> Launches:
    """The launches of one step."""
    launches: Launches = []
    inputs, targets = batch_of(num_samples)
    mine = model.plan.sample_indices(model.position, num_samples)
    with around_collectives(lambda kind, flat: launches.append((kind, flat))):
        model.forward_backward(inputs[mine], targets[mine])
    return launches


def of_units(model: HetFSDP, launches: Launches) -> Messages:
    """Rows of this rank to all that compute with them, and what it adds to sums of others."""
    plan, rank, found = model.plan, model.position, Messages()
    for kind, flat in launches:
        is_of_all = any(flat is each for each in model._runtime.root.flats)
        ranks = range(plan.world_size) if is_of_all else plan.group_of(rank)
        at_work = [i for i in ranks if plan.ranks[i].rank_batch_size]
        numels = flat.layout.shard_numels
        if kind == "gather":
            found.update((i, numels[rank] * ITEMSIZE) for i in at_work if numels[rank])
        elif rank in at_work:
            found.update((i, n * ITEMSIZE) for i, n in enumerate(numels) if n)
    return Messages({each: n for each, n in found.items() if each[0] != rank})


def across_cuts(plan: Plan, rank: int, num_samples: int, num_values: int) -> Messages:
    """Samples to the next stage; gradients, and which there are, to the one before."""
    found = Messages()
    for number in range(plan.num_rounds):
        sizes = [
            len(plan.round_samples(i, number, num_samples)) for i in range(plan.world_size)
        ]
        for one, other in pairwise(plan.groups):
            pair = ([sizes[i] for i in group] for group in (one, other))
            for sender, receiver, samples in messages_between(*pair):
                nbytes = samples.numel * SEQ_LEN * WIDTH * ITEMSIZE
                if one[sender] == rank:
                    found[other[receiver], nbytes] += num_values
                if other[receiver] == rank:
                    found[one[sender], nbytes] += num_values
                    found[one[sender], num_values] += 1
    return found


def _run(rank: int, world_size: int, seed: int) -> list[tuple[Messages, Messages]]:
    """Of each plan what was sent, and what had to be."""
    rng, post, found = random.Random(f"{world_size}/{seed}"), dist.batch_isend_irecv, []
    for _ in range(CASES_OF_A_WORLD):
        plan, way, sent = drawn_plan(rng, world_size), rng.choice(["", "late"]), Messages()
        num_samples = rng.randint(1, plan.global_batch_size)

        def count(ops: list[dist.P2POp], sent: Messages = sent) -> list[dist.Work]:
            for op in ops:
                if op.op is dist.isend:
                    sent[op.group_peer, op.tensor.numel() * op.tensor.itemsize] += 1
            return post(ops)

        with on_different_hosts():
            model = HetFSDP(Leaky(way).double(), plan, units=UNITS)
            train(model, num_samples)  # which probes it
            with mock.patch.object(dist, "batch_isend_irecv", count):
                launches = train(model, num_samples)
        assert model.position == rank
        num_values = 2 if way else 1
        handed = across_cuts(plan, rank, num_samples, num_values)
        found.append((sent, of_units(model, launches) + handed))
    return found


@pytest.mark.parametrize(
    "world_size, seed",
    only([(2, 0)], [(n, i) for n in (2, 3, 4, 5) for i in range(12)][:40]),
)
def test_messages_are_those_of_the_schedule(world_size: int, seed: int) -> None:
    for cases in run_ranks(_run, world_size, world_size, seed, timeout_s=200.0):
        for sent, needed in cases:
            assert sent == needed
