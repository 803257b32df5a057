"""A model whose activations take memory, and whose blocks take a device's time.

A block computes at once and then waits until its time is over, as in
``experiments.pipelines.over_links.model``; a block that is recomputed waits once more.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.pipelines.over_links.model import BACKWARD_TO_FORWARD, Clock, enter, leave

WIDTH, NUM_TOKENS, NUM_WORDS, NUM_BLOCKS = 128, 16, 64, 8
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


class Model(nn.Module):
    """Words [B, T] and targets [B] to the loss's sum and the number of samples."""

    def __init__(self, samples_per_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        sample_s = 1 / samples_per_s / NUM_BLOCKS / (1 + BACKWARD_TO_FORWARD)
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(sample_s) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over samples, and their number."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        loss_sum = F.cross_entropy(self.head(x.mean(1)), targets, reduction="sum")
        return loss_sum, torch.tensor(float(len(words)))


def batch_of(num_samples: int) -> tuple[Tensor, Tensor]:
    """Random words [B, T] and targets [B], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, NUM_WORDS, (num_samples, NUM_TOKENS), generator=generator)
    return words, torch.randint(0, NUM_WORDS, (num_samples,), generator=generator)
