"""Tiles: a long sample takes little memory, and its gradients stay those of one process."""

import copy
import gc
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.fsdp.tokens.law import NotByTokensError, by_tokens
from shardhet.models.decoder import Decoder
from tests.beside import Beside, squared
from tests.small_models import WIDTH, kind, small_decoder
from tests.worlds import on_ranks

LONG = 64


def decoder() -> Decoder:
    return Decoder(small_decoder(seq_len=LONG)).double()


def words(num_samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 256, (num_samples, LONG))
    return tokens, tokens.roll(-1, 1).masked_fill(tokens < 40, -1)


def summed(model: nn.Module, *batch: Tensor) -> Any:
    return model(*batch)


@pytest.mark.parametrize("tiles", [[True, False], [["*.mlp", "head"], ["blocks.1"]]])
@pytest.mark.parametrize("recompute", [False, [["blocks.*"], True]], ids=["kept", "again"])
@on_ranks(2)
def test_a_step_in_tiles_is_that_of_one_process(rank: int, tiles: Any, recompute: Any) -> None:
    torch.manual_seed(0)
    plan = Plan.by_hand(
        microbatch_sizes=[2, 1],
        num_microbatches=[1, 2],
        recompute=recompute,
        tiles=tiles,
        tokens_per_tile=7,
    )
    both = Beside(decoder(), plan, loss=summed)
    for _ in range(2):
        both.step(*words(4))
    assert Plan.from_json(plan.to_json()) == plan


class Sizes:
    """The most elements of a tensor of a module's calls, by the module's name."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        self.most = dict.fromkeys(names, 0)
        for name in names:
            model.get_submodule(name).register_forward_hook(self._note(name))

    def _note(self, name: str) -> Any:
        def note(_module: nn.Module, _args: Any, output: Tensor) -> None:
            self.most[name] = max(self.most[name], output.numel())

        return note


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(1)
def test_no_more_logits_than_of_a_tile_are_there(
    rank: int, param_dtype: torch.dtype | None
) -> None:
    """From the first call on, whose samples are tried in tiles too."""
    module = decoder().float()
    sizes = Sizes(module, "head.projection", "blocks.0.mlp.gate_up")
    plan = Plan.by_hand(microbatch_sizes=[1], tiles=True, tokens_per_tile=8)
    model = HetFSDP(module, plan, param_dtype=param_dtype)
    model.forward_backward(*words(1))
    tile = 23  # tokens of a try, and of a tile of up to three samples
    assert sizes.most["head.projection"] <= 3 * tile * 256
    assert sizes.most["blocks.0.mlp.gate_up"] <= 3 * tile * 2 * 24


@on_ranks(1)
def test_what_cannot_be_cut_into_tiles_keeps_no_arguments(rank: int) -> None:
    """Of which it is found once."""
    module, seen = decoder(), list[Any]()
    module.get_submodule("blocks.0").register_forward_pre_hook(
        lambda _, args: seen.append(ref(args[0]))
    )
    model = HetFSDP(module, Plan.by_hand(microbatch_sizes=[1], tiles=True, tokens_per_tile=8))
    gc.collect()
    gc.disable()
    try:
        model.forward_backward(*words(1))
        assert seen
        assert all(each() is None for each in seen)
    finally:
        gc.enable()


def test_a_try_that_fails_keeps_nothing() -> None:
    """Its graph holds a hook, which holds no graph."""

    def mixed(x: Tensor) -> Tensor:
        return linear(x).softmax(1)

    linear, x = nn.Linear(3, 3), torch.randn(1, 8, 3)
    alive = ref(x.untyped_storage())
    with pytest.raises(NotByTokensError, match="depends for one token"):
        by_tokens("mixed", linear, mixed, ((x,), {}))
    del x
    gc.collect()
    assert alive() is None


@on_ranks(1)
def test_a_loss_of_the_head_s_output_is_computed_in_its_tiles(rank: int) -> None:
    """If it is a sum over tokens; not if it compares neighbours, which stays as it is."""

    def of_each(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(logits.shape[1])
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss_sum, torch.tensor(targets.numel())

    def of_next(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return of_each(logits[:, :-1], targets[:, 1:])

    seen: list[int] = []
    for loss_fn, is_tiled in ((of_each, True), (of_next, False)):
        seen.clear()
        torch.manual_seed(0)
        plain = decoder()
        x, targets = words(2)[0], words(2)[0]

        def noted(
            logits: Tensor, *rest: Tensor, loss_fn: Any = loss_fn, seen: Any = seen
        ) -> Any:
            seen.append(logits.shape[1])
            return loss_fn(logits, *rest)

        plan = Plan.by_hand(microbatch_sizes=[2], tiles=True, tokens_per_tile=8)
        model = HetFSDP(copy.deepcopy(plain), plan, loss_fn=loss_fn)
        mean = model.forward_backward(x, loss_inputs=targets)
        is_whole = max(seen) >= LONG - 1
        loss_sum, number = loss_fn(plain(x), targets)
        assert abs(mean - float(loss_sum.detach() / number)) < 1e-12 * abs(mean)
        assert is_whole != is_tiled


@on_ranks(1)
def test_a_module_that_is_named_and_mixes_tokens_is_refused(rank: int) -> None:
    plan = Plan.by_hand(microbatch_sizes=[1], tiles=[["*.attention"]], tokens_per_tile=8)
    with pytest.raises(ValueError, match=r"blocks.0.attention.* in tiles. Leave it out"):
        HetFSDP(decoder(), plan).forward_backward(*words(1))
    plan = Plan.by_hand(microbatch_sizes=[1], tiles=[["*.mpl"]])
    with pytest.warns(UserWarning, match=r"tiled_units has \['\*.mpl'\] but no unit"):
        HetFSDP(decoder(), plan)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.tanh(), self.linear(x).flatten(0, 1).sigmoid()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        y, factors = self.gate(x)
        return y * factors.view_as(y)


@on_ranks(1)
def test_rows_of_samples_and_tokens_are_found_for_each_number_of_samples(rank: int) -> None:
    plan = Plan.by_hand(
        microbatch_sizes=[2], rank_batch_sizes=[3], tiles=[["*.gate"]], tokens_per_tile=7
    )
    net = kind(lambda self, x: self.units[1](self.units[0](x)))(Routed)
    both = Beside(net, plan, loss=squared, units=["units.0", "units.1"])
    for _ in range(2):
        both.step(torch.randn(3, LONG, WIDTH, dtype=torch.float64))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).square()


@on_ranks(1)
def test_what_draws_random_numbers_is_drawn_once_for_all_tokens(rank: int) -> None:
    """As in one process: in no tiles, or refused if it is named."""
    plan = Plan.by_hand(microbatch_sizes=[2], tiles=True, tokens_per_tile=5)
    net = kind(lambda self, x: self.units[1](self.units[0](x)))(Dropped)
    result = []
    for tiles in (plan, Plan.by_hand(microbatch_sizes=[2])):
        torch.manual_seed(0)
        model = HetFSDP(copy.deepcopy(net), tiles, units=["units.0", "units.1"])
        result.append(model(torch.randn(2, LONG, WIDTH, dtype=torch.float64)))
    assert torch.equal(*result)
    named = replace(plan.ranks[0], tiled_units=("units.0.dropout",))
    model = HetFSDP(net, replace(plan, ranks=(named,)), units=["units.0", "units.1"])
    with pytest.raises(ValueError, match=r"units.0.dropout: it draws .* in tiles"):
        model(torch.randn(2, LONG, WIDTH, dtype=torch.float64))


class Recurrent(nn.Module):
    """A unit with an LSTM, which lists parameters that it had before wrapping."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


@on_ranks(2)
def test_what_mixes_tokens_and_lists_its_parameters_is_computed_whole(rank: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Recurrent(), nn.Linear(WIDTH, WIDTH)).double()
    plan = Plan.by_hand(microbatch_sizes=[2, 1], tiles=True, tokens_per_tile=2)
    both = Beside(net, plan, loss=squared, units=["0", "1"])
    for _ in range(2):
        both.step(torch.randn(3, 5, WIDTH).double())
