"""The part of a forward that each stage computes, and what it receives and hands over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardhet.fsdp.microbatch.batching import BatchAxis, Join
from shardhet.fsdp.probing.prober import Findings
from shardhet.fsdp.stages.flow import DROPPED, Returned
from shardhet.fsdp.stages.handover import Carried


@dataclass(frozen=True, slots=True)
class StagePart:
    """Calls of units from ``start`` to before ``stop``, by their place in forward."""

    start: int
    stop: int
    received: tuple[Returned, ...]  # of earlier calls, that reach ``start`` or a later one
    sent: tuple[Returned, ...]  # of calls before ``stop``, that reach it or a later one


def parts_of(
    findings: Findings, unit_fqns: Sequence[str], stage_by_fqn: Mapping[str, int], number: int
) -> list[StagePart]:
    """The parts of all stages, of which there are ``number``.

    Raises ``ValueError`` if a stage's units are not called one after the other.
    """
    called = [unit_fqns[each.unit] for each in findings.schedule.segments]
    stages = [stage_by_fqn[fqn] for fqn in called]
    for (one, other), pair in zip(pairwise(called), pairwise(stages), strict=True):
        if pair[0] > pair[1]:
            raise ValueError(
                f"stages: unit {other!r} of stage {pair[1]} is called after unit {one!r} of "
                f"stage {pair[0]}, but each stage computes its units and hands on. Give both "
                "to one stage."
            )
    idle = [i for i in range(number) if i not in stages]
    if idle:
        raise ValueError(
            f"stages: forward calls no unit of stage {idle[0]}. Give it units that are called."
        )
    borders = [0, *(stages.index(i) for i in range(1, number)), len(stages)]

    def reaching(border: int) -> tuple[Returned, ...]:
        found = frozenset[Returned]().union(*findings.reached[border:])
        return tuple(sorted(value for value in found if 0 <= value.place < border))

    return [
        StagePart(start, stop, reaching(start), reaching(stop) if stop < len(stages) else ())
        for start, stop in pairwise(borders)
    ]


def check_dropouts(findings: Findings, stages: Sequence[int]) -> None:
    """Raise ``ValueError`` if two stages use one dropout; ``stages`` are those of calls."""
    users: dict[Returned, set[int]] = {}
    for reached, stage in zip(findings.reached, [*stages, stages[-1]], strict=True):
        for mark in (each for each in reached if each.place == DROPPED):
            users.setdefault(mark, set()).add(stage)
    for using in users.values():
        if len(using) > 1:
            raise ValueError(
                f"stages: the result of dropout outside of units is used in stages "
                f"{sorted(using)}, where its microbatches may be others. Let one unit contain "
                "the dropout, or give all that use it to one stage."
            )


def carried_of(
    values: Sequence[Returned], findings: Findings, called: Sequence[str]
) -> list[Carried]:
    """The tensors of ``values``, given what a probe has found and of which unit calls are.

    Raises ``ValueError`` for one without a row for each sample that may differ between ranks,
    and for one that code outside of units changes.
    """
    carried = []
    for value in values:
        result = findings.results[value.place]
        if value in findings.altered:
            raise ValueError(
                f"stages: code outside of units writes to what unit {called[value.place]!r} "
                "has returned (x += y), or gives it a hook, and a later stage uses it, so two "
                "stages would do it. Make a new tensor there (x = x + y), do it inside a unit, "
                "or give both units to one stage."
            )
        axis = result.rules[value.number]
        if not isinstance(axis, BatchAxis) and not (
            axis is Join.SHARED and result.is_same_on_all
        ):
            raise ValueError(
                f"stages: unit {called[value.place]!r} returns a tensor without a row for each "
                "sample, which a later stage uses and which may differ between ranks. Give "
                "both units to one stage."
            )
        example = result.examples[value.number]
        is_used = result.is_differentiable[value.number]
        carried.append(
            Carried(value, example, axis if isinstance(axis, BatchAxis) else None, is_used)
        )
    return carried
