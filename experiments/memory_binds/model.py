"""Blocks whose activations take memory, and that take a device's time.

They compute at once and then wait until their time is over, as those of
``experiments.pipelines.over_links.model``; a block that is recomputed waits once more.
"""

from functools import partial

import torch
from torch import Tensor, nn

from experiments.pipelines.over_links import model as over_links
from experiments.pipelines.over_links.model import Clock, enter, leave

WIDTH, NUM_TOKENS = 128, 16
NUM_KEPT = 16  # activations of a block


class Block(nn.Module):
    """A residual chain of element-wise functions: 0.13 MB of activations for a sample."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.sample_s = sample_s  # of forward
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        clock = Clock(self.sample_s)
        x = y = enter(x, clock)
        for _ in range(NUM_KEPT):
            y = torch.sin(y)
        return leave(x + self.linear(y), clock)


Model = partial(over_links.Model, make_block=Block, width=WIDTH)
batch_of = partial(over_links.batch_of, num_tokens=NUM_TOKENS)
