"""Optimizers, and learning rates as pure functions of the step.

A schedule maps the number of finished steps to a fraction of the peak learning rate:

    constant   1 ........ 1 ........ 1
    linear     1 ....... 1/2 ....... 0      a straight line
    cosine     1 ....... 1/2 ....... 0      half a cosine
    wsd        1 .. 1 ....... 1 .... 0      a straight line over the last steps

All of them rise in equal steps over the first ``num_warmup_steps``, the last of which is at
the peak.  They may end at a ``final_fraction`` instead of zero.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardhet.fsdp.params.host_step import fused
from shardhet.fsdp.params.optimizer_trial import Trial
from shardhet.records.plan import EVERY_BLOCK, is_matched

OF_REST = ("betas", "eps")  # arguments of AdamW, beside Muon

Schedule = Callable[[int], float]  # finished steps -> fraction of the peak


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecay:
    """Rises to the peak, stays, and falls to ``final_fraction`` of it at ``num_steps``."""

    num_steps: int
    num_warmup_steps: int = 0
    num_decay_steps: int | None = None  # in which it falls; None: all after the warm-up
    final_fraction: float = 0.0  # 1: constant
    is_cosine: bool = True  # falls as half a cosine; False: as a straight line

    def __call__(self, step: int) -> float:
        start = self.num_warmup_steps
        if self.num_decay_steps is not None:
            start = self.num_steps - self.num_decay_steps
        fallen = min(1.0, max(0.0, (step - start) / max(1, self.num_steps - start)))
        left = 0.5 * (1 + math.cos(math.pi * fallen)) if self.is_cosine else 1 - fallen
        decayed = self.final_fraction + (1 - self.final_fraction) * left
        warmup = self.num_warmup_steps
        return decayed if step >= warmup else (step + 1) / warmup * decayed


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """A class of ``torch.optim`` and its arguments."""

    learning_rate: float  # the peak
    name: str = "AdamW"
    weight_decay: float = 0.0  # of matrices
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the class's others

    def build(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over this rank's rows; one fused kernel where there is a right one.

        Raises ``ValueError`` for a class that torch does not have, and what the class raises.
        """
        kinds: dict[str, Any] = {key.lower(): each for key, each in vars(torch.optim).items()}
        kind: Any = kinds.get(self.name.lower())
        is_optimizer = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if not is_optimizer:
            raise ValueError(f"{self.name!r} is no optimizer of torch.optim")
        groups = decay_groups(params, self.weight_decay)
        return fused(kind(groups, lr=self.learning_rate, **self.arguments))

    @property
    def takes_matrices(self) -> bool:
        """Whether it is Muon, which takes the matrices of blocks; AdamW takes the rest."""
        return self.name.lower() == "muon"

    @property
    def of_rows(self) -> "OptimizerSpec":
        """Of parameters that are cut by rows: beside Muon, AdamW."""
        if not self.takes_matrices:
            return self
        others = {key: each for key, each in self.arguments.items() if key in OF_REST}
        return replace(self, name="AdamW", arguments=others)

    def build_each(
        self, named: Iterable[tuple[str, nn.Parameter]]
    ) -> list[torch.optim.Optimizer]:
        """The optimizers of the parameters of a model; beside Muon, one of the rest."""
        params = dict(named)
        if not self.takes_matrices:
            return [self.build(list(params.values()))]
        matrices = [fqn for fqn, param in params.items() if param.ndim == 2]
        matrices = [fqn for fqn in matrices if is_matched(fqn, EVERY_BLOCK)]
        if not matrices:
            raise ValueError(
                "optim: Muon takes the matrices of blocks, parameters with a number in their "
                "names, and there are none. Use optim=adamw."
            )
        mine = {key: each for key, each in self.arguments.items() if key not in OF_REST}
        muon = torch.optim.Muon(
            [params.pop(fqn) for fqn in matrices],
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            **mine,
        )
        return [muon, self.of_rows.build(list(params.values()))]

    def count_moments(self) -> int:
        """How many tensors as large as a parameter it keeps at most, counted after one step."""
        # Matrices and vectors, as models have them: some classes take matrices alone.
        shapes = {"head": (2, 3), "blocks.0": (2, 3), "norm": (3,)}
        named = {fqn: nn.Parameter(torch.zeros(shape)) for fqn, shape in shapes.items()}
        return [Trial(each).num_moments() for each in self.build_each(named.items())][-1]


def decay_groups(params: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; vectors (norms, biases) do not."""
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
