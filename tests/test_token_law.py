"""What may be computed by pieces of its tokens is found by trying it, whatever it is called."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardhet.fsdp.tokens.law import NotByTokensError, by_tokens
from shardhet.models.decoder import Head
from tests.small_models import small_decoder

WIDTH, NUM_TOKENS = 16, 40


class Mixing(nn.Module):
    """A sequence is mixed in the way of its name, and then each token is computed alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.cross = nn.Parameter(torch.zeros(1, 7, WIDTH))
        self.num_calls, self.dropout = 0, nn.Dropout()
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Any:
        num_tokens = x.shape[1]
        match self.how:
            case "attention":
                x = x + self.attention(x, x, x, need_weights=False)[0]
            case "causal attention":
                x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
            case "weights of attention":
                x = x + self.attention(x, x, x)[0]
            case "attention to differences":  # of which causal queries do not see each part
                x = x + F.scaled_dot_product_attention(x, x - x[:, -1:], x, is_causal=True)
            case "window":
                row = torch.arange(num_tokens)
                is_near = (row - row[:, None]).abs() < 4
                x = x + F.scaled_dot_product_attention(x, x, x, attn_mask=is_near)
            case "cross attention":
                x = x + F.scaled_dot_product_attention(
                    x, *(self.cross.expand(len(x), -1, -1),) * 2
                )
            case "counted positions":
                x = x + torch.arange(num_tokens)[:, None]
            case "convolution":
                x = self.conv(x.transpose(1, 2)).transpose(1, 2)
            case "recurrence":
                x = x + x.cumsum(1)
            case "linear attention":
                x = x + torch.einsum(
                    "btd,btde->bte", x, (x[..., None] * x[..., None, :]).cumsum(1)
                )
            case "mean over tokens":
                x = x + x.mean(1, keepdim=True)
            case "batch norm":
                x = self.norm(x.transpose(1, 2)).transpose(1, 2)
            case "mean of squares":
                return self.out(x).square().mean()
            case "sum of squares":
                return self.out(x).square().sum()
            case "counts its calls":
                self.num_calls += 1
            case "its gradients are clipped":
                x = _Clipped.apply(x)
            case "dropout":
                x = self.dropout(x)
            case "noise":
                x = x + torch.randn_like(x)
        return self.out(x)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


APART = {"dropout", "noise", "nothing", "sum of squares", "cross attention"}
TOGETHER = APART - {"cross attention"} | {"attention", "causal attention"}
WHY = {
    "attention to differences": "depends on other tokens",
    "window": "mask or bias of its own",
    "cross attention": "not among a sample's tokens",
    "mean of squares": "no sum over tokens",
    "convolution": "net.conv: its result",
    "its gradients are clipped": "its gradients are no sums",
    "counts its calls": "changes what it holds",
    "batch norm": "net.norm: its result",
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    "how", sorted({*TOGETHER, *APART, *WHY, "weights of attention", "counted positions",
                   "recurrence", "linear attention", "mean over tokens"})
)  # fmt: skip
def test_what_mixes_tokens_is_refused_by_name(how: str, together: bool) -> None:
    torch.manual_seed(0)
    module = Mixing(how)
    x = torch.zeros(2, NUM_TOKENS, WIDTH)  # of an argument only the shape and dtype count
    before = [each.clone() for each in module.state_dict().values()], torch.get_rng_state()

    def tried(order: list[int] | None = None) -> Any:
        return by_tokens(
            "net", module, module.forward, ((x,), {}), together=together, order=order
        )

    if how in (TOGETHER if together else APART):
        mirrored = [*range(7), *range(17, 23), *range(7, 17)]
        assert tried().draws == tried(mirrored).draws == (how in ("dropout", "noise"))
    else:
        with pytest.raises(NotByTokensError, match=WHY.get(how, "net") if together else "net"):
            tried()
    after = [*module.state_dict().values()], torch.get_rng_state()
    assert module.num_calls == 0
    assert all(map(torch.equal, before[0], after[0]))
    assert torch.equal(before[1], after[1])


def test_a_head_with_its_loss_is_a_sum_over_tokens() -> None:
    """Which counts only some of them; and its graph holds the logits, many times its input."""
    head = Head(small_decoder()).to(torch.bfloat16)
    x = torch.zeros(2, NUM_TOKENS, 16, dtype=torch.bfloat16)
    targets = torch.full((2, NUM_TOKENS), -100)
    targets[:, -3:] = 5
    found = by_tokens("head", head, head.forward, ((x, targets), {}))
    assert [each.name for each in found.rules.outputs] == ["SUM", "SUM"]
    assert found.kept_ratio > 5
    assert (
        by_tokens("out", head.projection, head.projection.forward, ((x,), {})).kept_ratio == 0
    )


def test_nothing_is_tried_on_objects_that_keep_what_they_are_given() -> None:
    class Cache:
        def update(self, x: Tensor) -> None:
            raise AssertionError

    module = nn.Linear(WIDTH, WIDTH)
    call: Any = (torch.zeros(2, NUM_TOKENS, WIDTH), Cache()), {}
    with pytest.raises(NotByTokensError, match="net: it is passed a Cache"):
        by_tokens("net", module, lambda x, cache: cache.update(x), call)


def test_transformers_that_share_samples() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
             "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 50}  # fmt: skip
    ids = torch.randint(0, 50, (2, NUM_TOKENS))
    places = torch.arange(NUM_TOKENS).expand(2, -1)
    for name, given, why in (
        ("Llama", {"position_ids": places}, None),
        ("Llama", {}, "model.rotary_emb"),
        ("Mistral", {"position_ids": places}, "mask or bias of its own"),
        ("Bloom", {}, "transformer.h.0.self_attention"),
    ):
        config = getattr(transformers, f"{name}Config")(
            **shape, **({"sliding_window": 8} if name == "Mistral" else {})
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        call = (ids,), {**given, "use_cache": False}
        if why is None:
            by_tokens(name, model, model.forward, call, together=True)
            continue
        with pytest.raises(NotByTokensError, match=why):
            by_tokens(name, model, model.forward, call, together=True)
