"""Long samples are tried on few of their tokens: as strictly, and in the memory of a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.fsdp.microbatch import chosen
from shardhet.fsdp.microbatch.chosen import LEAST_TOKENS, LONG, with_few_tokens
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.models.decoder import Decoder
from shardhet.profiler.counting import LiveBytes
from shardhet.records.plan import RankPlan
from tests.beside import check, refuses
from tests.edge_plans import both_ways, plan_for
from tests.small_models import (
    NUM_SAMPLES,
    UNITS,
    WIDTH,
    Unit,
    draw,
    kind,
    small_decoder,
    through,
)
from tests.worlds import on_ranks


def of_call(*args: Tensor) -> ModelCall:
    def forward(*_: Any) -> None: ...

    return ModelCall.of(forward, args, {}, (), 0, ragged={}, planned=8)


def rank_of(size: int, **tiles: Any) -> RankPlan:
    return Plan.by_hand(microbatch_sizes=[size], **tiles).ranks[0]


def test_the_few_tokens_are_spread_over_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last are among them; places of tokens are those among the few."""
    monkeypatch.setattr(chosen, "LONG", 1024)
    at = torch.arange(1024)
    ends = torch.tensor([1023, 511])
    found = with_few_tokens(
        of_call(at.expand(2, -1), ends, at.expand(2, -1) < ends[:, None], draw(2, 3)),
        rank_of(1),
    ).leaves
    assert torch.equal(found[0], torch.arange(64).expand(2, -1))
    assert found[1].tolist() == [63, 31]
    assert found[2].sum(1).tolist() == [63, 32]
    assert found[3].shape == (2, 3)


@pytest.mark.parametrize(
    "args", [(draw(2, 4096),), (draw(2, 3, 512),), (torch.ones(2, LONG - 1).long(),)]
)
def test_features_images_and_short_samples_stay_whole(args: tuple[Tensor, ...]) -> None:
    call = of_call(*args)
    assert with_few_tokens(call, rank_of(1)) is call


def test_so_do_those_of_large_microbatches() -> None:
    call = of_call(torch.ones(8, 4096).long())
    assert with_few_tokens(call, rank_of(7)) is call
    assert with_few_tokens(call, rank_of(6)).leaves[0].shape == (8, 2048)
    tiled = rank_of(6, tiles=True, tokens_per_tile=512)
    assert with_few_tokens(call, tiled).leaves[0].shape == (8, 1024)


def in_chunks(self: Any, x: Tensor) -> Tensor:
    return self.head(torch.cat([through(self, each) for each in x.split(96, 1)], 1))


def in_rows(self: Any, x: Tensor) -> Tensor:
    return self.head(through(self, x.flatten(0, 1)).unflatten(0, x.shape[:2]))


def by_order(self: Any, x: Tensor) -> Tensor:
    first = int(x.shape[1] > LEAST_TOKENS)
    return self.head(self.units[1 - first](self.units[first](x)))


def of_all(self: Any, x: Tensor) -> Tensor:
    weights: Tensor = self.weights
    return self.head(through(self, x) * weights)


MODELS: dict[str, Callable[..., Tensor]] = {
    "as they are": lambda self, x: self.head(through(self, x)),
    "chunk by chunk": in_chunks,
    "as rows of all samples": in_rows,
    "in another order": by_order,
    "with a buffer of all tokens": of_all,
}


@both_ways
@pytest.mark.parametrize("name", MODELS)
def test_however_all_tokens_are_computed(name: str, recomputes: bool) -> None:
    """What takes no fewer tokens, or computes fewer in another way, is tried on all."""
    torch.manual_seed(0)
    module = kind(MODELS[name], weights=draw(LONG, 1))(Unit)
    check(plan_for(recomputes), module, [draw(NUM_SAMPLES, LONG, WIDTH)] * 2, units=UNITS)


@on_ranks(3)
def test_a_rank_without_samples_gets_none_of_whole_length(rank: int) -> None:
    torch.manual_seed(0)
    model = check(
        plan_for(False, world_size=3),
        kind(MODELS["as they are"])(Unit),
        [draw(NUM_SAMPLES, LONG, WIDTH)],
        units=UNITS,
    )
    if model.position == 2:
        assert model(draw(0, LONG, WIDTH)).shape == (0, LONG, 3)
    else:
        model(draw(1, LONG, WIDTH))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.head(through(self, x - x.mean(0, keepdim=True))),
        lambda self, x: self.head(through(self, x)).log_softmax(0),
    ],
)
def test_mixed_samples_are_refused(forward: Callable[..., Tensor]) -> None:
    model = HetFSDP(kind(forward)(Unit), plan_for(False), units=UNITS)
    x = draw(NUM_SAMPLES, LONG, WIDTH)
    refuses(model, ValueError, rf"of shape \(3, {LONG}, \d\) depends for one sample", x)


class Padded(nn.Module):
    """Passes its units a mask, [samples, 1, tokens], where any token is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        is_there = x.any(-1)[:, None]
        for unit in self.units:
            x = unit(x, None if is_there.all() else is_there)
        return x.square().sum()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.linear(x)
        return x + torch.nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask)


def test_another_kind_of_call_is_tried_in_the_memory_of_a_step() -> None:
    torch.manual_seed(0)
    model = HetFSDP(Padded(), Plan.by_hand(microbatch_sizes=[1], rank_batch_sizes=[2]))
    whole, peaks = draw(2, LONG, WIDTH).float(), []
    padded = whole.clone()
    padded[0, -100:] = 0
    for x in (whole, padded, padded):
        model.zero_grad()
        with LiveBytes() as counter:
            model.backward(model(x), 1)
        peaks.append(counter.peak_bytes)
    assert peaks[1] <= 1.1 * peaks[2]


@pytest.mark.parametrize("sizes", [[1], [1, 1]])
@pytest.mark.parametrize("recompute", [True, False])
@on_ranks(1)
def test_the_first_step_takes_the_memory_of_others(
    rank: int, sizes: list[int], recompute: bool
) -> None:
    torch.manual_seed(0)
    plan = Plan.by_hand(
        microbatch_sizes=[1],
        rank_batch_sizes=[len(sizes)],
        recompute=recompute,
    )
    model: nn.Module = HetFSDP(Decoder(small_decoder(seq_len=2048)), plan)
    tokens, peaks = torch.randint(0, 256, (len(sizes), 2048)), []
    for _ in range(2):
        model.zero_grad()
        with LiveBytes() as counter:
            model.forward_backward(tokens, tokens.roll(-1, 1))
        peaks.append(counter.peak_bytes)
    assert peaks[0] <= 1.1 * peaks[1]
