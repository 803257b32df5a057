"""A surrounding: counts what it is told of the visits of one rank."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from shardhet.fsdp.microbatch.surroundings import Context, VisitContext
from shardhet.fsdp.sharding.unit import UnitModule
from shardhet.fsdp.step.around import Visits
from shardhet.records.schedule import Phase

seen: Counter[tuple[str, str]] = Counter()


class Counted(VisitContext):
    def __init__(self, fqn: str) -> None:
        self._fqn = fqn

    def in_phase(self, phase: Phase) -> Context | None:
        seen[self._fqn, phase.value] += 1
        return None

    def in_function(self, start: int, is_repeated: bool) -> Context | None:
        seen[self._fqn, "repeated" if is_repeated else "run"] += 1
        return None


def beside(around: Callable[..., list[VisitContext]]) -> Callable[..., list[VisitContext]]:
    def with_counts(visits: Visits, module: UnitModule, *others: Any) -> list[VisitContext]:
        return [*around(visits, module, *others), Counted(module.fqn)]

    return with_counts
