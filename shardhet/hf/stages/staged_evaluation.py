"""Evaluation of a HetTrainer in stages: the last stage's ranks have losses and predictions."""

from functools import reduce
from typing import Any

import numpy as np
from torch.utils._pytree import tree_map_only

from shardhet.hf.evaluation import EvaluationPass
from shardhet.hf.predictions import joined
from shardhet.records.layout import Span
from shardhet.training.dealing.batches import Share
from shardhet.training.dealing.rows import num_rows, rows_of


class StagedEvaluation(EvaluationPass):
    """One pass over a dataset; a batch runs as so many steps of the plan as it fills."""

    def add(self, inputs: dict[str, Any]) -> None:
        """Evaluate this rank's samples of one batch.  Collective."""
        plan, het = self._trainer.plan, self._trainer.het
        own = Share.of_step(plan, het.position).numel
        size, before, first = num_rows(inputs), len(self._sums), len(self._batches)
        num_steps = max(int(n) for (n,) in het.exchange([-(-size // own) if own else 0]))
        for step in range(num_steps):
            start, stop = (min(i * own, size) for i in (step, step + 1))
            super().add(rows_of(inputs, Span(start, stop)))
        parts, self._batches = self._batches[first:], self._batches[:first]
        if parts:  # those of one batch
            self._batches.append(
                [reduce(joined, each, None) for each in zip(*parts, strict=True)]
            )
        steps, self._sums = self._sums[before:], self._sums[:before]
        if steps:
            loss_sums, nums_items, sizes = zip(*steps, strict=True)
            is_last = self._has_outputs(inputs)
            self._sums.append((sum(loss_sums), sum(nums_items), sum(sizes) * is_last))

    def _has_outputs(self, inputs: dict[str, Any]) -> bool:
        position = self._trainer.het.position
        return position in self._trainer.plan.groups[-1] and super()._has_outputs(inputs)

    def _of_all(self, mine: list[Any]) -> list[Any]:
        """The parts of all ranks, which have their samples round after round, in order."""
        plan, found = self._trainer.plan, super()._of_all(mine)
        whole = next((each for each in found if each is not None), None)
        arrays: list[Any] = []
        tree_map_only(np.ndarray, arrays.append, whole)
        if not arrays:
            return found
        samples = list(range(len(arrays[0])))
        dealt = [
            sample
            for position in plan.groups[-1]
            for sample in Share.in_stages(plan, position, len(samples)).of(samples)
        ]
        order = np.argsort(dealt)
        in_order: list[Any] = tree_map_only(np.ndarray, lambda each: each[order], found)
        return in_order
