"""A model whose blocks take as long as a device of a given speed takes for them.

A block computes at once and then waits until its time is over, forward and backward, as the
host of an accelerator waits.  So the devices' speeds do not depend on how busy the machine is,
as long as a block's arithmetic takes less than its time.  Everything else, links, collectives,
messages and the runtime, takes what it takes.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, NUM_TOKENS, NUM_WORDS, NUM_BLOCKS = 256, 4, 64, 8
BACKWARD_TO_FORWARD = 2.0  # two products of matrices for each one of forward


class Clock:
    """When the present forward or backward of a block began."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s
        self.began_s = 0.0

    def begin(self) -> None:
        """From now on."""
        self.began_s = time.perf_counter()

    def wait(self, num_samples: int, factor: float) -> None:
        """Until the device has computed them."""
        end_s = self.began_s + factor * num_samples * self.sample_s
        time.sleep(max(0.0, end_s - time.perf_counter()))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.begin()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.clock.wait(len(gradient), BACKWARD_TO_FORWARD)
        return gradient, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.wait(len(x), 1.0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.clock.begin()
        return gradient, None


def enter(x: Tensor, clock: Clock) -> Tensor:
    """The input of what takes the clock's time."""
    y: Tensor = _Enter.apply(x, clock)
    return y


def leave(x: Tensor, clock: Clock) -> Tensor:
    """Its output, when its time is over."""
    y: Tensor = _Leave.apply(x, clock)
    return y


class Block(nn.Module):
    """A residual MLP of 2.1 MB."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.sample_s = sample_s  # of forward
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        clock = Clock(self.sample_s)
        x = enter(x, clock)
        return leave(x + self.down(F.gelu(self.up(self.norm(x)))), clock)


class Model(nn.Module):
    """Words [B, T] and targets [B] to the loss's sum and the number of samples."""

    def __init__(
        self,
        samples_per_s: float,
        make_block: Callable[[float], nn.Module] = Block,
        width: int = WIDTH,
    ) -> None:
        """``make_block`` is given the seconds that a block's forward takes for a sample."""
        super().__init__()
        torch.manual_seed(0)
        sample_s = 1 / samples_per_s / NUM_BLOCKS / (1 + BACKWARD_TO_FORWARD)
        self.embedding = nn.Embedding(NUM_WORDS, width)
        self.blocks = nn.ModuleList(make_block(sample_s) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(width, NUM_WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over samples, and their number."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return loss_sum(self.head(x.mean(1)), targets), torch.tensor(float(len(words)))


class Stage(nn.Module):
    """Some of a model's modules in line; of the last stage, averaged logits."""

    def __init__(self, model: Model, first: int, stop: int) -> None:
        super().__init__()
        self.embedding = model.embedding if not first else nn.Identity()
        self.blocks = nn.ModuleList(list(model.blocks)[first:stop])
        self.head = model.head if stop == NUM_BLOCKS else None

    def forward(self, x: Tensor) -> Tensor:
        """Words or what the stage before has handed over, to the next one's input."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x.mean(1))


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Of logits [B, V] and words [B]."""
    return F.cross_entropy(logits, targets, reduction="sum")


def batch_of(num_samples: int, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
    """Random words [B, T] and targets [B], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, NUM_WORDS, (num_samples, num_tokens), generator=generator)
    return words, torch.randint(0, NUM_WORDS, (num_samples,), generator=generator)
