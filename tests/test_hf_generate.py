"""A sharded model writes what the plain one writes."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from tests.small_models import of_transformers
from tests.worlds import TRANSFORMERS, on_ranks, preload, run_ranks, run_ranks_expecting_failure

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
preload(*TRANSFORMERS)

FIRST_CASE_S = 110.0  # every rank imports transformers once, on a busy machine slowly
PLAN = Plan.by_hand(
    microbatch_sizes=[2, 1, 0], num_microbatches=[2, 1, 0], state_shares=[0.5, 0.2, 0.3]
)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 8, "temperature": 1.7},
    "beams": {"num_beams": 2, "do_sample": False},
}


def decoder() -> Any:
    """A small Llama that ends its texts."""
    ends = {"eos_token_id": 3, "bos_token_id": 1, "pad_token_id": 0}
    return of_transformers("LlamaForCausalLM", num_hidden_layers=3, **ends).eval()


def encoder_decoder() -> Any:
    """A small T5."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_ff=24,
        d_kv=8,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def prompts(rank: int) -> Tensor:
    """Of another length on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(4, 60, (2, 3 + 2 * rank), generator=generator)


@on_ranks(PLAN.world_size, timeout_s=FIRST_CASE_S)
def test_each_rank_writes_what_one_process_writes(rank: int) -> None:
    """Each rank its own prompts, to its own length, against the plain model."""
    from shardhet.hf import generate

    for make in (decoder, encoder_decoder):
        plain = make()
        model = HetFSDP(copy.deepcopy(plain), PLAN)
        for way, options in WAYS.items():
            length = {"max_new_tokens": 4 + 2 * rank}
            torch.manual_seed(rank)
            expected = plain.generate(prompts(rank), **length, **options)
            torch.manual_seed(rank)
            found = generate(model, prompts(rank), **length, **options)
            assert torch.equal(found, expected), f"{make.__name__}, {way}"


def write_on_one_rank(rank: int) -> bool:
    """Two ranks have nothing to say, then two keep in step by transformers' own means."""
    from shardhet.hf import generate

    plain = decoder()
    model = HetFSDP(copy.deepcopy(plain), PLAN)
    model.train()
    inputs = prompts(0) if rank == 1 else None
    options = {"max_new_tokens": 5, "do_sample": False} if rank == 1 else {}
    found = generate(model, inputs, **options)
    if rank == 1:
        assert torch.equal(found, plain.generate(prompts(0), **options))
    with model.unit_by_unit():
        length = {"max_new_tokens": 3 + rank, "do_sample": False}
        found_in_step = model.module.eval().generate(prompts(rank), synced_gpus=True, **length)
        expected = plain.generate(prompts(rank), **length)
        assert torch.equal(found_in_step[:, : expected.shape[1]], expected)
    model.train()
    return found is None


@on_ranks(PLAN.world_size, timeout_s=FIRST_CASE_S)
def test_the_models_own_method_writes_too(rank: int) -> None:
    """Of the HetFSDP, of the model that callbacks of a Trainer get, and around either."""
    from shardhet.hf import generate

    plain = decoder()
    model = HetFSDP(copy.deepcopy(plain), PLAN).eval()
    length = {"max_new_tokens": 3 + rank, "do_sample": False}
    expected = plain.generate(prompts(rank), **length)
    for write in (model.generate, model.module.generate, partial(generate, model.module)):
        assert torch.equal(write(prompts(rank), **length), expected)
    with pytest.raises(TypeError, match="given a LlamaForCausalLM, which no HetFSDP is around"):
        generate(plain, prompts(rank))


def test_ranks_without_prompts_lend_their_rows() -> None:
    without = run_ranks(write_on_one_rank, PLAN.world_size, timeout_s=FIRST_CASE_S)
    assert without == [True, False, True]


class Blocks(nn.Module):
    """Parts that are called one by one, in an order of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(2.0))  # the root's

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.scale * x


@on_ranks(3)
def test_units_may_be_called_in_any_order(rank: int) -> None:
    """Units in another order and number on each rank, then a step as ever."""
    torch.manual_seed(0)
    plain = Blocks()
    plan = Plan.by_hand(microbatch_sizes=[1] * 3)
    model = HetFSDP(copy.deepcopy(plain), plan)
    module: Any = model.module
    x = torch.randn(5, 4)
    with model.unit_by_unit():
        for i in (0, 1, 2, 1)[rank:]:
            found = module.blocks[(i + rank) % 3](x)
            assert torch.equal(found, plain.blocks[(i + rank) % 3](x))
        assert torch.equal(module.scale, plain.scale)
        if rank == 1:
            assert torch.equal(module(x), plain(x))
    assert sum(p.numel() for p in module.blocks[0].parameters()) < 20  # rows again
    output = model(x[:1])
    model.backward(output.sum(), 1)


def fail_inside(rank: int) -> None:
    plan = Plan.by_hand(microbatch_sizes=[1, 1], state_shares=[0.5, 0.5])
    model = HetFSDP(Blocks(), plan)
    with model.unit_by_unit():
        if rank:
            raise KeyError("no such prompt")
        model.module(torch.ones(1, 4))


def test_a_failure_inside_ends_all_ranks() -> None:
    outcomes = run_ranks_expecting_failure(fail_inside, 2)
    assert "no such prompt" in outcomes[0].message


def misuse(rank: int) -> None:
    """One process, so that each misuse can be tried."""
    model = HetFSDP(Blocks(), Plan.even(1, microbatch_size=2), units=[nn.Linear])
    x = torch.ones(2, 4)
    with model.unit_by_unit():
        with pytest.raises(RuntimeError, match="called inside unit_by_unit"):
            model(x)
        with pytest.raises(RuntimeError, match="entered twice"), model.unit_by_unit():
            pass
        with pytest.raises(RuntimeError, match="with gradients enabled"), torch.enable_grad():
            model.module(x)


def test_misuse_is_refused() -> None:
    misuse(0)


def test_a_step_without_its_backward_is_given_up() -> None:
    plain, x = Blocks(), torch.randn(2, 4)
    plan = Plan.even(1, microbatch_size=2)
    model = HetFSDP(copy.deepcopy(plain), plan, units=[nn.Linear])
    output = model(x).sum()
    with model.unit_by_unit():
        assert torch.equal(model.module(x), plain(x))
    with pytest.raises(RuntimeError, match="Call the model, then this once"):
        model.backward(output, 2)
