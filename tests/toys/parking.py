"""A kind of launch: a copy of each unit's outputs to the host when its forward turn ends."""

from dataclasses import replace

from shardhet.fsdp.sharding.unit import FSDPUnit
from shardhet.fsdp.step.around import Activity
from shardhet.fsdp.step.schedule_executor import Handling
from shardhet.pricing.priced import Priced
from shardhet.records.schedule import LaunchKind, Phase, Shape, Turns
from shardhet.records.workload import UnitKind

PARK = LaunchKind("park", "host link", max_in_flight=2)
SECONDS = 3.0

calls: list[tuple[str, str]] = []


def mark(turns: Turns, shape: Shape) -> Turns:
    """Park after each forward turn."""
    return tuple(
        replace(turn, after=(*turn.after, PARK)) if turn.phase is Phase.FORWARD else turn
        for turn in turns
    )


def price(priced: Priced, unit: UnitKind, unevenness: float) -> float:
    return SECONDS


def launch(unit: FSDPUnit) -> None:
    calls.append(("launch", unit.fqn))


def wait(unit: FSDPUnit) -> None:
    calls.append(("wait", unit.fqn))


HANDLING = Handling(launch, wait, Activity.WAIT_REDUCE)
