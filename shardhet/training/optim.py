"""Optimizers, and learning rates as pure functions of the step.

A schedule maps the number of finished steps to a fraction of the peak learning rate:

    Constant           1 ........ 1 ........ 1
    Linear             1 ....... 1/2 ....... 0      a straight line
    Cosine             1 ....... 1/2 ....... 0      half a cosine
    WarmupStableDecay  1 .. 1 ....... 1 .... 0      a straight line over the last steps

All of them rise in equal steps over the first ``num_warmup_steps``, the last of which is at
the peak.  They may end at a ``final_fraction`` instead of zero.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Schedule = Callable[[int], float]  # finished steps -> fraction of the peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The peak from the end of the warm-up on."""

    num_warmup_steps: int = 0

    def __call__(self, step: int) -> float:
        return _warmup(step, self.num_warmup_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A straight line from the peak to ``final_fraction`` of it at ``num_steps``."""

    num_steps: int
    num_warmup_steps: int = 0
    final_fraction: float = 0.0

    def __call__(self, step: int) -> float:
        left = 1 - _progress(step, self.num_warmup_steps, self.num_steps)
        decayed = self.final_fraction + (1 - self.final_fraction) * left
        return _warmup(step, self.num_warmup_steps) * decayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """Half a cosine from the peak to ``final_fraction`` of it at ``num_steps``."""

    num_steps: int
    num_warmup_steps: int = 0
    final_fraction: float = 0.0

    def __call__(self, step: int) -> float:
        angle = math.pi * _progress(step, self.num_warmup_steps, self.num_steps)
        left = 0.5 * (1 + math.cos(angle))
        decayed = self.final_fraction + (1 - self.final_fraction) * left
        return _warmup(step, self.num_warmup_steps) * decayed


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStableDecay:
    """The peak until the last ``num_decay_steps``, then a straight line down."""

    num_steps: int
    num_decay_steps: int
    num_warmup_steps: int = 0
    final_fraction: float = 0.0

    def __call__(self, step: int) -> float:
        left = 1 - _progress(step, self.num_steps - self.num_decay_steps, self.num_steps)
        decayed = self.final_fraction + (1 - self.final_fraction) * left
        return _warmup(step, self.num_warmup_steps) * decayed


def _warmup(step: int, num_warmup_steps: int) -> float:
    return 1.0 if step >= num_warmup_steps else (step + 1) / num_warmup_steps


def _progress(step: int, start: int, stop: int) -> float:
    """How far ``step`` is from ``start`` to ``stop``, as a fraction between 0 and 1."""
    return min(1.0, max(0.0, (step - start) / max(1, stop - start)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    learning_rate: float  # the peak
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def build(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over this rank's rows; one fused kernel where the device has one."""
        return torch.optim.AdamW(
            decay_groups(params, self.weight_decay),
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
            fused=_can_fuse(params),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent with momentum."""

    learning_rate: float  # the peak
    momentum: float = 0.9
    is_nesterov: bool = False
    weight_decay: float = 0.0

    def build(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over this rank's rows; one fused kernel where the device has one."""
        return torch.optim.SGD(
            decay_groups(params, self.weight_decay),
            lr=self.learning_rate,
            momentum=self.momentum,
            nesterov=self.is_nesterov,
            fused=_can_fuse(params),
        )


OptimizerSpec = AdamW | Sgd


def decay_groups(params: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, biases) do not."""
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def _can_fuse(params: Sequence[nn.Parameter]) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in params)
