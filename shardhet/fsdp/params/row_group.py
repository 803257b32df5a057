"""The ranks that store the rows of a model's parameters, and what they find out together."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.channel import SECONDS_FOR_ALL_TO_COME, Channel
from shardhet.comm.failure import Lifeline
from shardhet.fsdp.sharding.comm import CommContext


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """The ranks that store the rows of a model's parameters."""

    comm: CommContext
    control: Channel
    lifeline: Lifeline

    @property
    def is_alone(self) -> bool:
        """Whether a single rank stores all rows."""
        return self.control.group is None

    def norm(
        self, local_norms: Sequence[Tensor], order: float, *, num_grads: int, call: str
    ) -> Tensor:
        """The norm of all ranks' ``local_norms`` together, 0-d, float64.  Collective.

        ``num_grads`` counts the gradients, including those of which this rank has no rows.
        """
        device = self.comm.device
        nothing = 0.0 if order >= 0 else math.inf
        local = torch.full((1,), nothing, dtype=torch.float64, device=device)
        if local_norms:
            # A norm of order 0 counts elements, so counts are summed.
            together = torch.stack([norm.to(device) for norm in local_norms]).double()
            local[0] = together.sum() if order == 0 else vector_norm(together, order)
        with self.lifeline.guard(call):
            given = self.control.enter(
                call, [order, num_grads], within_s=SECONDS_FOR_ALL_TO_COME
            )
            if any(row != given[0] for row in given):
                raise ValueError(
                    f"{call}: ranks ask for [order, number of gradients] {given} in plan "
                    "order. Take norms of the same gradients on every rank, including those "
                    "of which a rank has no rows."
                )
            rows = self.comm.reduce_channel.gather_rows(local)[:, 0]
        return rows.sum() if order == 0 else vector_norm(rows, order)

    def wait_for_device(self, grads: Sequence[Tensor]) -> None:
        """Let the host wait for numbers that it was sent, if it is to compute with them.

        GradScaler copies its scale to where gradients are, and goes on without waiting.
        """
        comm = self.comm
        if not devices.is_on_host(comm.device) and any(map(devices.is_on_host, grads)):
            comm.record_event(comm.current_stream()).synchronize()

    def agree_on_inf(self, found_inf: Tensor) -> None:
        """Set ``found_inf`` on all ranks if it is set on any.  Collective."""
        with self.lifeline.guard("GradScaler"):
            self.control.enter("GradScaler", within_s=SECONDS_FOR_ALL_TO_COME)
            mine = found_inf.reshape(1).double().to(self.comm.device)
            rows = self.comm.reduce_channel.gather_rows(mine)
        found_inf.copy_(rows.amax().reshape(found_inf.shape))

    def reduce(self, local: float, numel: int, kind: str, fqn: str) -> float:
        """The "sum", "mean", "max" or "min" over the elements of all ranks.  Collective.

        ``local`` is the result for this rank's ``numel`` elements; ignored if it has none.
        """
        call = f"p.grad.{kind}"
        with self.lifeline.guard(call):
            mine = [local, numel, zlib.crc32(fqn.encode())]
            given = self.control.enter(call, mine, within_s=SECONDS_FOR_ALL_TO_COME)
            if any(row[2] != mine[2] for row in given):
                raise ValueError(
                    f"{call}: this rank called it for {fqn}, another rank for another "
                    "parameter. Reduce the same gradients in the same order on every rank."
                )
        parts = [(value, int(count)) for value, count, _ in given if count]
        if not parts:
            return 0.0 if kind == "sum" else math.nan
        if kind == "mean":
            return sum(value * n for value, n in parts) / sum(n for _, n in parts)
        if kind == "sum":
            return sum(value for value, _ in parts)
        largest = torch.tensor([value for value, _ in parts], dtype=torch.float64)
        return float(largest.amax() if kind == "max" else largest.amin())  # NaN stays NaN

    def refuse(self, what: str) -> None:
        """Raise ``RuntimeError`` here and on the other ranks at their next collective."""
        with self.lifeline.guard("a call on gradients"):
            raise RuntimeError(
                f"{what} of a gradient of which this rank has only some rows. Use the norm of "
                "whole gradients (p.grad.norm(), torch.nn.utils.clip_grad_norm_), or gather "
                "the rows first."
            )


def vector_norm(norms: Tensor, order: float) -> Tensor:
    """The norm of a tensor's elements."""
    norm: Tensor = torch.linalg.vector_norm(norms, order)
    return norm
