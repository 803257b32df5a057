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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
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
class OptimizerSpec:
    """A class of ``torch.optim`` and its arguments."""

    learning_rate: float  # the peak
    name: str = "AdamW"
    weight_decay: float = 0.0  # of matrices
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the class's others

    def build(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over this rank's rows; one fused kernel where there is one.

        Raises ``ValueError`` for a class that torch does not have, and what the class raises.
        """
        kinds: dict[str, Any] = {key.lower(): each for key, each in vars(torch.optim).items()}
        kind: Any = kinds.get(self.name.lower())
        is_optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if not is_optimizer:
            raise ValueError(f"{self.name!r} is no optimizer of torch.optim")
        arguments = dict(self.arguments)
        if "fused" in signature(kind).parameters and _can_fuse(params):
            arguments["fused"] = True
        groups = decay_groups(params, self.weight_decay)
        optimizer: torch.optim.Optimizer = kind(groups, lr=self.learning_rate, **arguments)
        return optimizer

    def count_moments(self) -> int:
        """How many tensors as large as a parameter it keeps, counted after one step."""
        param = nn.Parameter(torch.zeros(2, 3))
        param.grad = torch.ones_like(param)
        optimizer = self.build([param])
        optimizer.step()
        kept = optimizer.state[param].values()
        return sum(torch.is_tensor(each) and each.shape == param.shape for each in kept)


def decay_groups(params: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, biases) do not."""
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def _can_fuse(params: Sequence[nn.Parameter]) -> bool:
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in params)
