"""One process in plain PyTorch: the plan's microbatches, one after the other, seeded as
HetFSDP seeds them.

Root code runs per microbatch here and per rank there, so a root that mixes samples gives
something else.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from shardhet.fsdp.sharding.unit import find_units
from tests.fuzzing.model import IGNORED, Batch, FuzzModel, call_model, loss_of, part_of
from tests.fuzzing.shapes import FuzzCase, StepShape
from tests.seeded import seeded, unit_by_param


class Reference:
    """The plain model, trained beside HetFSDP."""

    def __init__(self, model: FuzzModel, case: FuzzCase) -> None:
        self.model = model
        self._case = case
        self._num_forwards = 0
        options = case.options
        self._units = find_units(
            model, options.get("units"), keeps_last=options.get("loss_fn") is not None
        )

    def unit_by_param(self) -> dict[str, str]:
        """The unit (its first module's fqn) by whose largest gradient one is measured.

        Parameters of the root go with the embedding: their gradients are sums over samples,
        which the root of a rank adds in another order, and may be what is left of large ones.
        """
        return unit_by_param(self.model, self._units, "embedding")

    def train_step(self, batch: Batch, step: StepShape, index: int) -> float:
        """Gradients of the mean loss are added; returns the mean loss."""
        targets = batch["targets"]
        assert targets is not None
        num_tokens = (targets != IGNORED).sum()
        losses = []
        with seeded(self.model, self._units, self._case.options.get("seed", 0)) as seeds:
            for first, size in self._microbatches(step.sizes):
                piece = part_of(self._case.model, batch, first, size)
                self.model.num_forwards = self._num_forwards
                seeds.start(step=index, first_sample=first)
                output = call_model(self._case.model, self.model, piece)
                loss_sum, _ = loss_of(self._case.model, output, piece)
                (loss_sum / num_tokens).backward()
                losses.append(loss_sum.detach())
        self._num_forwards += 1
        return float(sum(losses) / num_tokens)

    @torch.no_grad()
    def evaluate(self, batch: Batch, step: StepShape, position: int) -> list[Any]:
        """Leaves of the model's output for a position's samples, put together."""
        self.model.eval()
        first = sum(step.sizes[:position])
        joined: list[Any] = []
        for start, size in self._microbatches(step.sizes):
            if not first <= start < first + step.sizes[position]:
                continue
            piece = part_of(self._case.model, batch, start, size)
            output = call_model(self._case.model, self.model, piece)
            if self._case.options.get("loss_fn") is not None:
                output = self._case.options["loss_fn"](output, piece["targets"])
            leaves = tree_flatten(output)[0]
            joined = [*map(self._join, joined, leaves)] if joined else leaves
        self.model.train()
        return joined

    def _join(self, before: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            assert before == leaf
            return leaf
        if leaf.dim() == 0:
            return before + leaf
        return torch.cat([before, leaf], self._case.model.batch_at)

    def _microbatches(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """First sample and size of each, in the order of the plan."""
        first = 0
        for rank, size in zip(self._case.plan.ranks, sizes, strict=True):
            for microbatch_size in rank.split(size) if size else ():
                yield first, microbatch_size
                first += microbatch_size
