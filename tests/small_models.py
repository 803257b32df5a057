"""Small models that take no time: for tests that do not mind which, and to make odd ones of."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardhet.models.decoder import DecoderConfig

# The same for every kind of transformers' models.
TRANSFORMERS_SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
}
_DECODER = DecoderConfig(
    vocab_size=256,
    width=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    hidden_width=24,
    seq_len=8,
)


def small_decoder(**changes: Any) -> DecoderConfig:
    """Two grouped layers over bytes."""
    return replace(_DECODER, **changes)


def of_transformers(name: str, **changes: Any) -> Any:
    """A small ``LlamaForCausalLM``, say, with random weights, of 64 words and two layers."""
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 64, "num_hidden_layers": 2, **TRANSFORMERS_SHAPE, **changes}
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(**shape)
    return getattr(transformers, name)(config)


class Chain(nn.Module):
    """Layers one after the other, each followed by ``act``; returns what a loss would."""

    def __init__(
        self, *layers: nn.Module, act: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.layers, self.act = nn.ModuleList(layers), act or nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = self.act(layer(x))
        return x.square().sum(), len(x)


# Odd models: two units and a head, with a forward that a test writes in one line

WIDTH = 6
NUM_SAMPLES = 5
UNITS = ["units.0", "units.1"]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Unit(nn.Module):
    """A linear layer; and what keywords say are attributes."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class Mixer(Unit):
    """Positions are mixed by a matrix that is passed beside the samples."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x).tanh()
        return x + (y if mask is None else mask @ y)


class Net(nn.Module):
    """Units one after the other, and a head outside of them; keywords as in ``Unit``."""

    def __init__(
        self, make_unit: Callable[[], nn.Module] = linear, num_units: int = 2, **attributes: Any
    ) -> None:
        super().__init__()
        self.units = nn.ModuleList(make_unit() for _ in range(num_units))
        self.head = nn.Linear(WIDTH, 3)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.double()

    def forward(self, x: Tensor) -> Any:
        for unit in self.units:
            x = unit(x)
        return self.head(x)


def kind(forward: Callable[..., Any], base: type[nn.Module] = Net, **attributes: Any) -> Any:
    """A class of ``base`` with this forward."""
    return type(base.__name__, (base,), {"forward": forward, **attributes})


def through(net: Any, x: Any, *others: Any) -> Any:
    """What the last unit returns, each given ``others`` besides what the one before returns."""
    for unit in net.units:
        x = unit(x, *others)
    return x
