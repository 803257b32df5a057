"""Rows of results.csv, and what tables and bars say of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.common.machine import Environment
from experiments.common.results import BAR_HEADER, Bar, Spread, markdown_table, print_table
from experiments.common.systems import FSDP2
from experiments.mixed_cluster.clusters import CASES, Case
from experiments.mixed_cluster.contest import Turn, plain_name
from experiments.mixed_cluster.plans import PLANNED, SPARED, Planned
from experiments.mixed_cluster.systems import FSDP2_UNEVEN

TIMED, WEIGHED, PREDICTED = "timed", "weighed", "predicted"
HEADER = ["system", "samples/s (p10-p90)", "of the ideal", "times FSDP2", "MiB per rank", "n"]
PLAN_HEADER = ["plan", "rank", "samples", "microbatches", "state", "recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    case: str
    system: str
    what: str  # TIMED, WEIGHED or PREDICTED
    round: int = 0
    samples_per_s: float = 0.0
    step_time_s: float = 0.0
    peak_mib: str = ""  # of each rank, above what it had before the model
    cpu_s: str = ""  # of each rank in a step
    cpu: str  # of the machine
    commit: str
    date: str
    load_before: float


class Results:
    """Collects the rows of one case."""

    def __init__(self, case: Case, environment: Environment, plans: Sequence[Planned]) -> None:
        self.rows: list[Row] = []
        self._about = {"case": case.name, **environment.stamp}
        for planned in plans:
            step_time_s = round(planned.predicted_step_time_s, 5)
            self._add(planned.system, PREDICTED, step_time_s=step_time_s)

    def add(self, turns: Sequence[Turn]) -> None:
        """Steps of systems that took turns, or of one by itself."""
        for turn in turns:
            self._add(
                turn.system,
                TIMED,
                round=turn.round,
                samples_per_s=round(turn.samples_per_s, 4),
                step_time_s=round(turn.step_time_s, 5),
                peak_mib=_joined(turn.peak_mib),
                cpu_s=_joined(turn.cpu_s),
            )

    def add_peaks(self, turn: Turn) -> None:
        """Memory of a system that was timed in turns."""
        self._add(turn.system, WEIGHED, round=turn.round, peak_mib=_joined(turn.peak_mib))

    def _add(self, system: str, what: str, **measured: Any) -> None:
        self.rows.append(Row(system=system, what=what, **measured, **self._about))


def _joined(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


@dataclass(frozen=True, slots=True)
class CaseRows:
    """What was measured of one case, by system."""

    case: Case
    rows: Sequence[Row]

    @classmethod
    def of(cls, case: Case, rows: Sequence[Row]) -> "CaseRows":
        return cls(case, [row for row in rows if row.case == case.name])

    @property
    def ideal_samples_per_s(self) -> float:
        """What all ranks do alone under plain PyTorch, added up."""
        ranks = range(self.case.cluster.world_size)
        return sum(self.spread(plain_name(rank)).median for rank in ranks)

    @property
    def systems(self) -> list[str]:
        """In the order in which they were measured, without plain PyTorch on single ranks."""
        alone = {plain_name(rank) for rank in range(self.case.cluster.world_size)}
        return [
            name for name in dict.fromkeys(r.system for r in self.rows) if name not in alone
        ]

    def spread(self, system: str) -> Spread:
        """Samples per second."""
        return Spread.of([r.samples_per_s for r in self._timed(system)])

    def has(self, system: str) -> bool:
        """Whether it has trained."""
        return bool(self._timed(system))

    def _timed(self, system: str) -> list[Row]:
        return [r for r in self.rows if (r.system, r.what) == (system, TIMED)]

    def peaks_mib(self, system: str) -> list[float]:
        """Of each rank, the median of all launches; empty if it was not weighed."""
        texts = [r.peak_mib for r in self.rows if r.system == system and r.peak_mib]
        by_launch = [[float(mib) for mib in text.split()] for text in texts]
        return [Spread.of(of_rank).median for of_rank in zip(*by_launch, strict=True)]

    def over(self, system: str, opponent: str) -> float | None:
        """How many times as fast; None where one of them has not trained."""
        if not self.has(system) or not self.has(opponent):
            return None
        return self.spread(system).median / self.spread(opponent).median

    def cells(self, system: str) -> list[str]:
        """A row of the table."""
        spread = self.spread(system)
        over = self.over(system, FSDP2)
        return [
            system,
            spread.cell(2),
            f"{spread.median / self.ideal_samples_per_s:.2f}",
            "" if over is None else f"{over:.2f}",
            " / ".join(f"{mib:.0f}" for mib in self.peaks_mib(system)),
            str(spread.n),
        ]

    def table(self) -> list[list[str]]:
        """All systems, and a line to read them by."""
        ideal = self.ideal_samples_per_s
        rows = [["the ideal: plain PyTorch on each rank, added up", f"{ideal:.2f}", "1.00"]]
        rows += [self.cells(system) for system in self.systems]
        return [row + [""] * (len(HEADER) - len(row)) for row in rows]

    @property
    def title(self) -> str:
        """For a heading."""
        work = self.case.work
        return (
            f"{self.case.cluster.title}; {work.name}: {work.config.num_layers} layers of width "
            f"{work.config.width}, {work.config.seq_len} tokens, global batch "
            f"{work.global_batch_size}"
        )


def show_plans(plans: Sequence[Planned]) -> None:
    """Print who computes and stores what."""
    rows = []
    for planned in plans:
        for i, rank in enumerate(planned.plan.ranks):
            sizes = rank.microbatch_sizes
            rows.append(
                [
                    planned.system if i == 0 else "",
                    str(i),
                    str(rank.rank_batch_size),
                    f"{len(sizes)} of {max(sizes, default=0)}",
                    f"{rank.state_share:.0%}",
                    " ".join(rank.recomputed_units) or "-",
                ]
            )
    print_table("Plans", PLAN_HEADER, rows)


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The claims made before the measurement."""
    found = []
    for case in CASES:
        of_case = CaseRows.of(case, rows)
        if not of_case.has(PLANNED):
            continue
        if case.has_bars:
            found += _strong_bars(of_case)
    return found


def _ideal_bar(of_case: CaseRows, system: str, at_least: float) -> Bar:
    speed = of_case.spread(system).median
    return Bar(
        claim=f"{of_case.case.name}: {_short(system)} / the ideal",
        measured=speed / of_case.ideal_samples_per_s,
        at_least=at_least,
    )


def _short(system: str) -> str:
    return system.removeprefix("HetFSDP, ")


def _strong_bars(of_case: CaseRows) -> list[Bar]:
    """All of them for two plans: the fastest, and that with least memory where it is scarce."""
    name = of_case.case.name
    evens = [each for each in of_case.systems if each.startswith(f"{FSDP2}, batches of")]
    found = []
    for system in (PLANNED, SPARED):
        if not of_case.has(system):
            continue
        found.append(_ideal_bar(of_case, system, 0.90))
        opponents = [*((each, 2.1) for each in evens), (FSDP2_UNEVEN, 1.0)]
        for opponent, at_least in opponents:
            over = of_case.over(system, opponent)
            if over is not None:
                claim = f"{name}: samples/s, {_short(system)} / {opponent}"
                found.append(Bar(claim=claim, measured=over, at_least=at_least))
        ours, theirs = of_case.peaks_mib(system), of_case.peaks_mib(FSDP2_UNEVEN)
        if ours and theirs:
            slowest = of_case.case.cluster.slowest_ranks
            over = max(ours[i] for i in slowest) / max(theirs[i] for i in slowest)
            claim = f"{name}: memory of a slowest device, {_short(system)} / {FSDP2_UNEVEN}"
            found.append(Bar(claim=claim, measured=over, at_most=0.75))
    return found


def as_markdown(rows: Sequence[Row]) -> str:
    """All tables for the README."""
    blocks = []
    for case in CASES:
        of_case = CaseRows.of(case, rows)
        if of_case.rows:
            row = of_case.rows[0]
            blocks.append(
                f"### {of_case.title}\n\n{row.date}, commit `{row.commit}`, {row.cpu}, "
                f"load before {row.load_before}\n\n{markdown_table(HEADER, of_case.table())}"
            )
    table = markdown_table(BAR_HEADER, [bar.cells for bar in bars(rows)])
    return "\n\n".join([f"### Bars\n\n{table}", *blocks])
