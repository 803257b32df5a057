"""A unit: the parameters that are gathered and reduced together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import nn

from shardhet.fsdp.comm import CommContext
from shardhet.fsdp.flat import FlatTensor, ParamSlot


class UnitState(Enum):
    """Which life the parameters of a unit are in."""

    SHARDED = auto()  # by reshard(), and at the start
    GATHERING = auto()  # by unshard(): the collective is in flight
    UNSHARDED = auto()  # by wait_for_unshard(): modules see whole parameters


@dataclass(frozen=True, slots=True)
class UnitModule:
    """A module whose calls are visits of a unit."""

    fqn: str
    module: nn.Module
    forward: Callable[..., Any]  # the module's own, before it was intercepted
    is_trainable: bool  # any of its parameters is, whoever owns it: the root may


class FSDPUnit:
    """Life of a unit in a step: unshard, wait, compute, reshard; then the same for backward,
    with begin_backward before and reduce, finish_reduce after.
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
        self.is_trainable = any(flat.is_trainable for flat in flats)
        self.state = UnitState.SHARDED
        self._comm = comm

    @property
    def slots(self) -> list[ParamSlot]:
        """Its parameters."""
        return [slot for flat in self.flats for slot in flat.slots]

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(slot.shape.numel() for slot in self.slots)

    def unshard(self) -> None:
        """SHARDED -> GATHERING; nothing where that has happened already."""
        if self.state is not UnitState.SHARDED:
            return
        for flat in self.flats:
            flat.unshard()
        self.state = UnitState.GATHERING

    def wait_for_unshard(self) -> None:
        """GATHERING -> UNSHARDED; nothing where it is unsharded already."""
        if self.state is UnitState.SHARDED:
            raise RuntimeError(
                f"unit {self.fqn!r}: waits for a gather that was never launched."
            )
        if self.state is UnitState.UNSHARDED:
            return
        for flat in self.flats:
            flat.wait_for_unshard()
        self.state = UnitState.UNSHARDED

    def reshard(self) -> None:
        """Any state -> SHARDED, after the gather in flight if there is one."""
        if self.state is UnitState.SHARDED:
            return
        self.wait_for_unshard()
        for flat in self.flats:
            flat.reshard()
        self._comm.mark_compute()
        self.state = UnitState.SHARDED

    def begin_backward(self) -> None:
        """Get ready to accumulate gradients; nothing on a rank that computes nothing."""
        if self._comm.is_receiver:
            for flat in self.flats:
                flat.begin_backward()

    def reduce(self) -> None:
        """Start summing its gradients over ranks."""
        for flat in self._trainable_flats:
            flat.reduce()

    def finish_reduce(self) -> None:
        """Until the sums of what this rank stores are there."""
        for flat in self._trainable_flats:
            flat.finish_reduce()

    def drop_grads(self) -> None:
        """Forget gradients of an unfinished or invalid step."""
        for flat in self._trainable_flats:
            flat.drop_grads()

    @property
    def _trainable_flats(self) -> list[FlatTensor]:
        return [flat for flat in self.flats if flat.is_trainable]
