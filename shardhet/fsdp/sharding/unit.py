"""A unit: the parameters that are gathered and reduced together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import nn

from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.flat import FlatTensor, ParamSlot
from shardhet.fsdp.sharding.flat_grad import forget_autograds


class UnitState(Enum):
    """The state of a unit's parameters."""

    SHARDED = auto()  # at the start, and after reshard()
    GATHERING = auto()  # after unshard(): the collective is in flight
    UNSHARDED = auto()  # after wait_for_unshard(): modules hold whole parameters


class Casts:
    """Whether units cast their inputs to the dtype of gathered parameters: not in a try of what
    they compute, whose parameters are in float32 or wider.
    """

    are_off = False

    @classmethod
    @contextmanager
    def off(cls) -> Iterator[None]:
        """A context without."""
        cls.are_off = True
        try:
            yield
        finally:
            cls.are_off = False


@dataclass(frozen=True, slots=True)
class UnitModule:
    """A module whose calls are visits of a unit."""

    fqn: str
    module: nn.Module
    forward: Callable[..., Any]  # the module's own, before it was intercepted
    is_trainable: bool  # whether any of its parameters is, including those the root owns


class FSDPUnit:
    """A unit in a step: unshard, wait_for_unshard, compute, reshard in forward; the same in
    backward, with begin_backward before the compute and reduce, finish_reduce after it.
    """

    def __init__(
        self,
        fqn: str,
        modules: Sequence[UnitModule],
        flats: Sequence[FlatTensor],
        *,
        comm: CommContext,
    ) -> None:
        self.fqn = fqn
        self.modules = tuple(modules)  # several if they share a parameter
        self.flats = tuple(flats)  # one per dtype and trainability
        self._trainable_flats = tuple(flat for flat in flats if flat.is_trainable)
        self.is_trainable = len(self._trainable_flats) > 0
        self.state = UnitState.SHARDED
        self._comm = comm

    def gather_over(self, comm: CommContext) -> None:
        """Communicate over ``comm`` from now on, as the flat tensors do."""
        self._comm = comm

    @property
    def slots(self) -> list[ParamSlot]:
        """The parameters of the unit."""
        return [slot for flat in self.flats for slot in flat.slots]

    @property
    def numel(self) -> int:
        """The number of elements of all parameters of the unit."""
        return sum(slot.shape.numel() for slot in self.slots)

    def copy_to_device(self) -> None:
        """Launch the copies of rows on the host that ``unshard`` launches otherwise."""
        for flat in self.flats:
            is_wanted = flat.residence is None or flat.residence.to_reach() is not None
            if flat.on_host is not None and is_wanted:
                flat.on_host.copy_to_device()

    def unshard(self) -> None:
        """SHARDED -> GATHERING; does nothing in any other state."""
        if self.state is not UnitState.SHARDED:
            return
        for flat in self.flats:
            flat.unshard()
        self.state = UnitState.GATHERING

    def wait_for_unshard(self) -> None:
        """GATHERING -> UNSHARDED; does nothing if already UNSHARDED."""
        if self.state is UnitState.SHARDED:
            raise RuntimeError(
                f"unit {self.fqn!r}: waited for a gather that was never launched."
            )
        if self.state is UnitState.UNSHARDED:
            return
        for flat in self.flats:
            flat.wait_for_unshard()
        self.state = UnitState.UNSHARDED

    def reshard(self) -> None:
        """Any state -> SHARDED; waits for a gather that is in flight.

        Later gathers wait for the kernels queued so far (``CommContext.mark_compute``).
        """
        if self.state is UnitState.SHARDED:
            return
        self.wait_for_unshard()
        for flat in self.flats:
            flat.reshard()
        self._comm.mark_compute()
        self.state = UnitState.SHARDED

    def begin_backward(self) -> None:
        """Prepare to accumulate gradients; does nothing on a rank that computes nothing."""
        if self._comm.is_receiver:
            for flat in self.flats:
                if flat.residence is None:
                    flat.grad.begin()
                else:
                    flat.residence.check_unwritten()

    def reduce(self) -> None:
        """Start the reduce-scatter of the computing ranks' gradients to the owners."""
        for flat in self._trainable_flats:
            forget_autograds(flat.unsharded_params)
            flat.grad.reduce()

    def finish_reduce(self) -> None:
        """Wait until this rank has its part of the sums, and nobody reads its gradients."""
        for flat in self._trainable_flats:
            flat.grad.finish()

    def pass_over(self) -> None:
        """Have no rows of the gradients, on a rank of another stage."""
        for flat in self._trainable_flats:
            flat.grad.pass_over()

    def drop_grads(self) -> None:
        """Drop the gradients of an unfinished or invalid step."""
        for flat in self._trainable_flats:
            forget_autograds(flat.unsharded_params)
            flat.grad.drop()
