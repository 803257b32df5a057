"""The decoder: what it computes, how it is built, and the numbers told about it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardhet.models.decoder import (
    Decoder,
    DecoderConfig,
    next_token_loss,
    rotate_by_position,
)
from tests.small_models import small_decoder

CONFIG = small_decoder(vocab_size=32, num_heads=4, num_kv_heads=2, seq_len=12)


def built(config: DecoderConfig = CONFIG, *, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(config).double()


def tokens_of(num_samples: int, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, CONFIG.seq_len)
    return torch.randint(CONFIG.vocab_size, shape, generator=generator)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_no_token_sees_a_later_one(num_kv_heads: int) -> None:
    model = built(replace(CONFIG, num_kv_heads=num_kv_heads))
    tokens_BT = tokens_of(3)
    logits_BTV = model(tokens_BT)
    for changed in range(CONFIG.seq_len):
        other_BT = tokens_BT.clone()
        other_BT[:, changed] = (other_BT[:, changed] + 1) % CONFIG.vocab_size
        has_moved_BT = (model(other_BT) - logits_BTV).abs().amax(dim=-1) > 1e-9
        assert not has_moved_BT[:, :changed].any()
        assert has_moved_BT[:, changed].all()


def test_every_token_sees_all_earlier_ones() -> None:
    model = built()
    embedded_BTD = model.embedding(tokens_of(1)).detach().requires_grad_()
    x_BTD = embedded_BTD
    for block in model.blocks:
        x_BTD = block(x_BTD)
    x_BTD[:, -1].sum().backward()
    assert embedded_BTD.grad is not None
    assert embedded_BTD.grad.abs().sum(dim=-1).gt(0).all()


def test_grouped_queries_equal_repeated_keys_and_values() -> None:
    grouped = built(replace(CONFIG, num_kv_heads=2))
    full = built(replace(CONFIG, num_kv_heads=4))
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("qkv.weight")]:
        q, k, v = state[name].unflatten(0, (-1, CONFIG.head_width)).split([4, 2, 2])
        repeated = [part.repeat_interleave(2, dim=0) for part in (k, v)]
        state[name] = torch.cat([q, *repeated]).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(full(tokens_of(3)), grouped(tokens_of(3)))


def test_rotated_products_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    q_C, k_C = torch.randn(2, 8, dtype=torch.float64)
    q_TC = rotate_by_position(q_C.expand(1, 10, 1, 8)).squeeze()
    k_TC = rotate_by_position(k_C.expand(1, 10, 1, 8)).squeeze()
    products_TT = q_TC @ k_TC.T
    for distance in range(1, 9):
        diagonal = products_TT.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(q_TC.norm(dim=-1), q_C.norm().expand(10))


def test_loss_is_the_sum_over_targets_that_are_not_negative() -> None:
    model = built()
    tokens_BT, targets_BT = tokens_of(3), tokens_of(3, seed=2)
    is_left_out_BT = torch.rand(targets_BT.shape, generator=torch.Generator()) < 0.4
    targets_BT = targets_BT.masked_fill(is_left_out_BT, -100)
    loss_sum, num_tokens = model(tokens_BT, targets_BT)
    log_probs_BTV = model(tokens_BT).log_softmax(dim=-1)
    picked_BT = log_probs_BTV.gather(-1, targets_BT.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(loss_sum, -picked_BT[~is_left_out_BT].sum())
    assert num_tokens.dtype == torch.int64
    assert num_tokens.item() == (~is_left_out_BT).sum().item()


def test_a_microbatch_without_targets_counts_nothing_and_has_zero_gradients() -> None:
    model = built()
    loss_sum, num_tokens = model(tokens_of(2), torch.full((2, CONFIG.seq_len), -1))
    loss_sum.backward()
    assert (loss_sum.item(), num_tokens.item()) == (0.0, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    "dtype, loss_dtype",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_loss_is_never_summed_in_low_precision(
    dtype: torch.dtype, loss_dtype: torch.dtype
) -> None:
    logits_BTV = torch.randn(2, 3, 5).to(dtype)
    assert (
        next_token_loss(logits_BTV, torch.zeros(2, 3, dtype=torch.long))[0].dtype == loss_dtype
    )


def reset_unit_by_unit(model: nn.Module, *, seed: int) -> None:
    torch.manual_seed(seed)
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters()  # type: ignore[operator]


def test_a_model_from_the_meta_device_is_the_model_built_in_place() -> None:
    with torch.device("meta"):
        model = Decoder(CONFIG)
    assert not list(model.buffers())  # nothing that to_empty would leave as garbage
    model.to_empty(device="cpu")
    reset_unit_by_unit(model, seed=3)
    in_place = Decoder(CONFIG)
    reset_unit_by_unit(in_place, seed=3)
    for name, param in in_place.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), param, rtol=0, atol=0)
    tokens_BT = tokens_of(2)
    torch.testing.assert_close(model(tokens_BT), in_place(tokens_BT), rtol=0, atol=0)


def test_dropout_acts_in_training_alone() -> None:
    model = built(replace(CONFIG, dropout=0.5))
    tokens_BT = tokens_of(2)
    assert not torch.equal(model(tokens_BT), model(tokens_BT))
    model.eval()
    assert torch.equal(model(tokens_BT), model(tokens_BT))


def test_shapes_that_cannot_be_built_are_refused() -> None:
    with pytest.raises(ValueError, match="width: 20 but rotary positions"):
        replace(CONFIG, width=20)
    with pytest.raises(ValueError, match="num_kv_heads: 3 but it must divide num_heads 4"):
        replace(CONFIG, num_kv_heads=3)
