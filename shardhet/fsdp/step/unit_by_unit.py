"""Calls of units outside of a step: each call gathers the unit, runs it unsplit, reshards it.

[Note: Rounds]
A rank may call units in any order and any number of times, as text generation does with
prompts of different lengths.  Collectives need the same order on all ranks, so each call is a
*round*: the ranks exchange the unit that each of them wants next, and gather the wanted units
one after the other, each on the ranks that want it.  A rank that has left the body of its
context keeps taking part, without wanting a unit, until all ranks have left.

    rank 0   a  b  c  a  b  c   leaves
    rank 1   a  b  c  leaves    sends its rows of a, b, c
    rank 2   leaves             sends its rows of a, b, c, a, b, c
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shardhet.comm.channel import SECONDS_FOR_ALL_TO_COME, Channel
from shardhet.comm.peers import Peers
from shardhet.fsdp.microbatch.modes import OperationMode, tensors_among
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.fsdp.sharding.persistence import forget_changed, share_holders
from shardhet.fsdp.sharding.unit import FSDPUnit, UnitModule
from shardhet.fsdp.step.runtime import Runtime, aside

WANTS_NOTHING = -1


@contextmanager
def unit_by_unit(
    runtime: Runtime, *, control: Channel, peers: Peers, if_outside: bool = False
) -> Iterator[None]:
    """A context in which units are gathered as they are called.  Collective.

    ``if_outside``: nothing within such a context, and within the model's forward.
    """
    is_inside = runtime.calls.outside_of_steps is not None or runtime.step.is_in_forward
    if if_outside and is_inside:
        yield
        return
    if runtime.calls.outside_of_steps is not None:
        raise RuntimeError("unit_by_unit: entered twice. Leave one context before the next.")
    awaits_backward = runtime.step.awaits_backward
    runtime.rounds.check_goes_on("unit_by_unit", awaits_backward=awaits_backward)
    with peers.fail_together("unit_by_unit"), torch.no_grad(), aside(runtime):
        rounds = UnitByUnit(runtime, control)
        rounds.open()
        runtime.calls.outside_of_steps = rounds.visit
        try:
            with _RowsRefused(runtime.units) if control.world_size > 1 else nullcontext():
                yield
            rounds.follow_until_all_leave()
            rounds.close()
        finally:
            runtime.calls.outside_of_steps = None


class _RowsRefused(OperationMode):
    """Refuses operations on rows of a unit that is not being called: they look like the whole
    parameter.
    """

    def __init__(self, units: Sequence[FSDPUnit]) -> None:
        super().__init__()
        self._fqns = {
            id(param): slot.fqn
            for unit in units
            for flat in unit.flats
            for slot, param in zip(flat.slots, flat.sharded_params, strict=True)
        }

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        for each in tensors_among((args, kwargs)):
            if id(each) in self._fqns:
                raise RuntimeError(
                    f"{self._fqns[id(each)]} is used inside unit_by_unit() while its unit is "
                    "not called, where this rank has only some of its rows. Call model(...) "
                    "once before, which finds such units and keeps them gathered, or use it "
                    "inside of its unit."
                )
        return func(*args, **kwargs)


class UnitByUnit:
    """The rounds of one ``unit_by_unit`` context ([Note: Rounds])."""

    def __init__(self, runtime: Runtime, control: Channel) -> None:
        self._runtime = runtime
        self._comms: Sequence[CommContext] = runtime.comms
        self._control = control
        self._open_unit: int | None = None  # the unit whose forward this rank is in

    def open(self) -> None:
        """Gather the root, and units that stay, for the whole context."""
        everyone = tuple(range(self._control.world_size))
        of_frozen = self._runtime.of_frozen
        has_changed = any(each.has_changed() for each in of_frozen)
        rows = self._control.enter(
            "unit_by_unit",
            [WANTS_NOTHING, 1 + has_changed],
            within_s=SECONDS_FOR_ALL_TO_COME,
        )
        if any(row[1] > 1 for row in rows):
            forget_changed(of_frozen, self._control)
        if len(self._comms) > 1 and self._comms[0].resident_units:
            share_holders(of_frozen, self._control)
        for unit in self._always_unsharded():
            self._gather(unit, everyone)

    def _always_unsharded(self) -> list[FSDPUnit]:
        units = self._runtime.units
        return [self._runtime.root, *(units[i] for i in sorted(self._runtime.known_to_stay))]

    def close(self) -> None:
        """Reshard what stayed and wait until no peer reads this rank's rows."""
        for comm in self._comms:
            comm.set_receivers(tuple(range(self._control.world_size)))
        for unit in self._always_unsharded():
            unit.reshard()
        for comm in self._comms:
            comm.wait_all_sent()

    def visit(
        self, unit_index: int, module: UnitModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The output of ``module``'s own forward, with the unit's parameters gathered."""
        unit = self._runtime.units[unit_index]
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"unit {unit.fqn!r} was called inside unit_by_unit() with gradients enabled. "
                "Train with model(...) and model.backward, outside of the context."
            )
        if self._open_unit is not None:  # this call comes from a module of that unit
            if self._open_unit != unit_index:
                raise RuntimeError(
                    f"unit {unit.fqn!r} is called by unit "
                    f"{self._runtime.units[self._open_unit].fqn!r}. Choose units that do not "
                    "call each other."
                )
            return module.forward(*args, **kwargs)
        self._round(unit_index)
        self._open_unit = unit_index
        try:
            return module.forward(*args, **kwargs)
        finally:
            self._open_unit = None
            if unit_index not in self._runtime.known_to_stay:
                unit.reshard()

    def follow_until_all_leave(self) -> None:
        """Send this rank's rows to ranks that are still calling units."""
        while self._round(WANTS_NOTHING):
            pass

    def _round(self, wanted: int) -> bool:
        """Gather the unit that each rank wants; False once no rank wants one."""
        for comm in self._comms:
            comm.mark_compute()
        rows = self._control.enter("unit_by_unit", [wanted, 0])
        if any(is_entering for _, is_entering in rows):
            raise RuntimeError(
                "unit_by_unit: ranks enter and leave the context a different number of times. "
                "Enter it once on every rank, around everything."
            )
        wanted_by_position = [int(unit) for unit, _ in rows]
        distinct = sorted(set(wanted_by_position) - {WANTS_NOTHING})
        for index in distinct:
            receivers = tuple(i for i, unit in enumerate(wanted_by_position) if unit == index)
            self._gather(self._runtime.units[index], receivers)
            if index not in (wanted, *self._runtime.known_to_stay):
                self._runtime.units[index].reshard()
        return bool(distinct)

    def _gather(self, unit: FSDPUnit, receivers: tuple[int, ...]) -> None:
        for comm in self._comms:
            comm.set_receivers(receivers)
        unit.unshard()
        unit.wait_for_unshard()
