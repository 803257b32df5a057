"""What transformers counts while it trains, for all ranks' samples and the whole model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardhet.fsdp import HetFSDP
from shardhet.records.layout import Span
from shardhet.training.dealing.batches import rows_of


class InputCounts:
    """The inputs of a run, counted as if one process had padded them all to one length."""

    def __init__(self, model: HetFSDP) -> None:
        self._het = model
        self._name = getattr(model.module, "main_input_name", "input_ids")
        looked_up = {
            f"{fqn}.weight"
            for fqn, module in model.module.named_modules()
            if isinstance(module, nn.Embedding)
        }
        held = [
            (slot, param)
            for flat in model._flats
            for slot, param in zip(flat.slots, flat.sharded_params, strict=True)
        ]
        self._num_multiplied = (
            sum(
                slot.shape.numel() * _weights_in_one(param)
                for slot, param in held
                if slot.fqn not in looked_up
            )
            if hasattr(model.module, "num_parameters")
            else 0  # transformers counts for its own models alone
        )
        plan, position = model.plan, model.position  # others have the same samples
        self._is_counted = position in plan.groups[0] and plan.leads(position)
        self._shapes: list[tuple[int, int]] = []  # of each batch since the last ``flops``

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """The rows of the model's main input, and the elements of each."""
        main = inputs.get(self._name)
        if not isinstance(main, Tensor) or not main.numel() or not self._is_counted:
            return 0, 0
        return len(main), main[0].numel()

    def counted(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs, without rows if another stage's ranks count them."""
        none: Mapping[str, Any] = rows_of(inputs, Span(0, 0))
        return inputs if self._is_counted else none

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Count a batch of this rank."""
        self._shapes.append(self.shape(inputs))

    def flops(self) -> int:
        """The estimate of transformers for what was added since the last call.  Collective."""
        mine, self._shapes = self._shapes, []
        return 6 * self._num_multiplied * self.numel(mine)

    def numel(self, mine: list[tuple[int, int]]) -> int:
        """The elements of batches of which this rank has rows of these shapes.  Collective."""
        batches = zip(*self._het.exchange_objects(mine), strict=True)
        return sum(
            sum(rows for rows, _ in batch) * max(width for _, width in batch)
            for batch in batches
        )


def _weights_in_one(param: nn.Parameter) -> int:
    """How many weights an element holds; bitsandbytes packs two of 4 bits into each byte."""
    return 2 * param.element_size() if hasattr(param, "quant_storage") else 1
