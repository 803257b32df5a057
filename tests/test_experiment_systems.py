"""What experiments that compare systems share: models, batches, sharding, steps, checks."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from experiments.common.systems import (
    check_same_losses,
    fully_sharded,
    fused_adamw,
    het_fsdp,
    slowest_rank_seconds,
    split,
    stock,
)
from experiments.decoders import decoder_config, make_decoder, random_batches, units_of
from shardhet import HetFSDP, Plan
from tests.selection import one_in
from tests.worlds import run_ranks

CONFIG = decoder_config(width=64, num_layers=2, seq_len=8, head_width=32)
WORLD_SIZE, RANK_BATCH_SIZE, NUM_STEPS = 2, 2, 3


def test_widths_of_heads_and_mlp_are_what_was_asked_for() -> None:
    assert (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.hidden_width) == (2, 2, 192)
    assert (
        decoder_config(width=512, num_layers=1, seq_len=8, mlp_ratio=2.5).hidden_width == 1280
    )


def test_every_model_has_the_same_weights_and_all_of_them_are_in_units() -> None:
    one, other = make_decoder(CONFIG), make_decoder(CONFIG)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    in_units = [param for unit in units_of(one) for param in unit.parameters()]
    assert list(map(id, in_units)) == list(map(id, one.parameters()))


def test_targets_are_the_next_tokens_and_a_seed_gives_the_same_batches() -> None:
    batches = random_batches(CONFIG, 3, seed=1, num_batches=2)
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == (3, CONFIG.seq_len)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
    [(first, _)] = random_batches(CONFIG, 3, seed=1)
    assert torch.equal(first, batches[0][0])
    assert not torch.equal(first, random_batches(CONFIG, 3, seed=2)[0][0])


@pytest.mark.campaign  # of an experiment alone
@pytest.mark.parametrize("reshards", one_in(2, [True, False]), ids=["resharded", "kept"])
def test_all_systems_train_the_same(reshards: bool) -> None:
    for kept in run_ranks(_train_all, WORLD_SIZE, reshards):
        assert kept == (["head"] if reshards else ["embedding", "blocks.0", "blocks.1", "head"])


def _train_all(rank: int, reshards: bool) -> list[str]:
    """Raises unless losses agree; names of units that FSDP2 keeps after forward."""
    [batch] = random_batches(CONFIG, WORLD_SIZE * RANK_BATCH_SIZE, seed=0)
    own = [part[rank * RANK_BATCH_SIZE :][:RANK_BATCH_SIZE] for part in batch]
    plain, theirs = make_decoder(CONFIG), make_decoder(CONFIG)
    ours = HetFSDP(make_decoder(CONFIG), Plan.even(WORLD_SIZE, microbatch_size=RANK_BATCH_SIZE))
    fully_sharded(theirs, units_of(theirs), reshards=reshards)
    optimizers = [fused_adamw(each.parameters(), 1e-2) for each in (plain, theirs, ours)]
    systems = [
        stock(plain, optimizers[0], name="plain"),
        stock(theirs, optimizers[1], name="FSDP2"),
        het_fsdp(ours, optimizers[2]),
    ]
    losses = {
        "plain": [systems[0].step(*batch) for _ in range(NUM_STEPS)],
        "HetFSDP": [systems[2].step(*own) for _ in range(NUM_STEPS)],
    }
    of_rank = [systems[1].step(*own) for _ in range(NUM_STEPS)]
    mean = torch.tensor(of_rank).double()
    dist.all_reduce(mean)
    by_system = {name: torch.tensor(each).double() for name, each in losses.items()}
    check_same_losses(by_system | {"FSDP2": mean / WORLD_SIZE})
    theirs(*own)
    return [
        name
        for name, unit in theirs.named_modules()
        if any(unit is each for each in units_of(theirs))
        and not isinstance(next(unit.parameters()), DTensor)
    ]


def test_microbatches_are_equal_but_for_the_last() -> None:
    parts = split((torch.arange(5), torch.arange(5)), 2)
    assert [len(tokens) for tokens, _ in parts] == [2, 2, 1]


def test_systems_whose_losses_differ_are_named() -> None:
    same = torch.tensor([2.0, 1.0])
    check_same_losses({})
    check_same_losses({"one": same, "two": same * (1 + 1e-5)})
    with pytest.raises(RuntimeError, match=r"three: losses .* but one has"):
        check_same_losses({"one": same, "two": same, "three": same + 0.1})


def test_a_step_lasts_as_long_as_on_the_rank_where_it_takes_longest() -> None:
    first, second = run_ranks(_time_unlike_steps, WORLD_SIZE)
    assert first == second
    assert min(first) >= 0.02


def _time_unlike_steps(rank: int) -> list[float]:
    return slowest_rank_seconds(lambda step: time.sleep(0.02 * (step == rank)), WORLD_SIZE)
