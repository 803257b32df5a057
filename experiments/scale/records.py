"""What the parts of this experiment have in common: samples, tables, and how much to do.

Every measurement is one line of one file, in long form; tables, bars and pictures are made
from these lines alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from experiments.common import systems
from experiments.common.results import Bar, Spread, Table
from experiments.common.systems import PLAIN, Rounds, System
from shardhet import HetFSDP, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number."""

    part: str
    case: str  # what is varied
    system: str
    quantity: str  # with its unit of measure: "step_s"
    number: int  # of the repetition
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure."""

    is_quick: bool = False
    is_far: bool = False  # the largest world too

    def rounds(self, num_rounds: int, num_steps: int) -> Rounds:
        """So many, or next to none."""
        if self.is_quick:
            return Rounds(num_rounds=1, num_steps=1)
        return Rounds(num_rounds=num_rounds, num_steps=num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What samples say."""

    tables: Sequence[Table]
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One question of this experiment."""

    name: str
    measure: Callable[[Effort], list[Sample]]
    report: Callable[[Sequence[Sample]], Report]


def trio(
    models: Sequence[nn.Module],
    units_of: Callable[[nn.Module], list[nn.Module]],
    plan: Plan,
    microbatch_size: int | None = None,
) -> list[System]:
    """Three copies of a model: by HetFSDP, by FSDP2, and alone; none has an optimizer."""
    ours, theirs, alone = models
    return [
        systems.het_fsdp(HetFSDP(ours, plan), None),
        systems.fsdp2(theirs, units_of(theirs), None, microbatch_size=microbatch_size),
        systems.stock(alone, None, name=PLAIN, microbatch_size=microbatch_size),
    ]


def step_seconds(
    contestants: Sequence[System], batch: tuple[Tensor, ...], rounds: Rounds
) -> dict[str, list[float]]:
    """Of each system's counted steps on one batch.  Collective."""
    steps = {each.name: partial(_step, each, batch) for each in contestants}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for timed in systems.take_turns(steps, rounds, in_line=True):
        seconds[timed.system].append(timed.slowest_rank_s)
    return seconds


def _step(system: System, batch: tuple[Tensor, ...], _number: int) -> None:
    system.step(*batch)


def samples_of(
    part: str, case: str, quantity: str, values_by_system: Mapping[str, Sequence[float]]
) -> list[Sample]:
    """Repetitions of one measurement."""
    return [
        Sample(
            part=part,
            case=case,
            system=system,
            quantity=quantity,
            number=number,
            value=round(value, 9),
        )
        for system, values in values_by_system.items()
        for number, value in enumerate(values)
    ]


def spread(samples: Sequence[Sample], case: str, system: str, quantity: str) -> Spread:
    """Of all repetitions of one measurement."""
    wanted = (case, system, quantity)
    return Spread.of([s.value for s in samples if (s.case, s.system, s.quantity) == wanted])


def median(samples: Sequence[Sample], case: str, system: str, quantity: str) -> float:
    """The middle of all repetitions of one measurement."""
    return spread(samples, case, system, quantity).median


def cases_in(samples: Sequence[Sample]) -> list[str]:
    """The different ones, in the order of their measurement."""
    return list(dict.fromkeys(sample.case for sample in samples))


def ms(seconds: float) -> str:
    """For a table; more digits where there is little."""
    return f"{1000 * seconds:.{0 if abs(seconds) >= 0.1 else 1}f}"


def ms_spread(found: Spread) -> str:
    """Median and how far it reaches, in milliseconds."""
    return f"{ms(found.median)} ({ms(found.p10)}-{ms(found.p90)})"
