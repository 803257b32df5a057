"""What tables and bars say of the rows; nothing is predicted here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from experiments.common.results import Bar
from experiments.published.forms import (
    BY_SPECIFICATION,
    CEPHALO,
    EVEN,
    FEWER_NODES,
    FORMS,
    FULL,
    ONE_SIDED,
    Row,
)
from experiments.published.inputs import DERIVED
from shardhet.pricing.efficiency import MOST

NO_PLAN, TOO_SLOW = "no", "too slow"
LEAST_RATIO = 0.999  # among plans that are this close the simulator chooses
LEAST_GAIN = 1.02  # of taking a batch in rounds, to be told
CASE_HEADER = [
    "model",
    *(f"{form}, samples/s" for form in FORMS),
    "full / even",
    "full / best one-sided",
    "step s, predicted",
    "simulated",
    "gap",
    "links",
    "MFU",
]
SUMMARY_HEADER = [
    "cluster",
    "batch",
    "cases",
    "even fits",
    "compute only",
    "memory only",
    "Cephalo's",
    "full fits",
    "full / even, median",
    "best",
    "full / best one-sided, median",
    "best ",
    "full / Cephalo's, median",
]


@dataclass(frozen=True)
class Forms:
    """The rows of one case."""

    rows: tuple[Row, ...]

    @property
    def part(self) -> str:
        """Where the seconds come from."""
        return self.rows[0].part

    @property
    def cluster(self) -> str:
        """Whose devices."""
        return self.rows[0].cluster

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.rows[0].global_batch_size

    @property
    def title(self) -> str:
        """Over a table of such cases."""
        row = self.rows[0]
        devices = f"{row.num_devices} devices, {row.param_dtype}, batch {self.batch}"
        return f"{self.cluster}: {self.part}; {devices}"

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells cases apart."""
        row = self.rows[0]
        return row.part, row.cluster, row.model, row.global_batch_size

    @property
    def is_cephalos_too_slow(self) -> bool:
        """Whether its programme was not run to its end."""
        return "programme is too slow" in self.row(CEPHALO).why_not

    def row(self, form: str) -> Row:
        """The form's row."""
        return next(row for row in self.rows if row.form == form)

    def speed(self, *forms: str) -> float | None:
        """Samples per second of the fastest of these; None where none fits."""
        speeds = [row.predicted_samples_per_s for row in map(self.row, forms) if row.fits]
        return max(speeds, default=None)

    def full_over(self, *forms: str) -> float | None:
        """How many times as fast the full plan is; None where one does not fit."""
        ours, theirs = self.speed(FULL), self.speed(*forms)
        return None if ours is None or theirs is None else ours / theirs

    @property
    def cells(self) -> list[str]:
        """A row of the table of cases."""
        full = self.row(FULL)
        speeds = [self.speed(form) for form in FORMS]
        said = [NO_PLAN if speed is None else f"{speed:.3g}" for speed in speeds]
        if self.is_cephalos_too_slow:
            said[FORMS.index(CEPHALO)] = TOO_SLOW
        ratios = [self.full_over(EVEN), self.full_over(*ONE_SIDED)]
        tail = [
            f"{full.predicted_step_time_s:.3g}",
            f"{full.simulated_step_time_s:.3g}",
            f"{gap(full):.1e}",
            f"{full.links_part:.0%}",
            f"{full.mfu:.1%}",
        ]
        return [
            full.model,
            *said,
            *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            *(tail if full.fits else [""] * len(tail)),
        ]


def by_case(rows: Iterable[Row]) -> list[Forms]:
    """Rows of each case together, in the order in which they come."""
    found: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in rows:
        found.setdefault(Forms((row,)).key, []).append(row)
    return [Forms(tuple(each)) for each in found.values()]


def at_shown_batch(of_cluster: Sequence[Forms]) -> list[Forms]:
    """The cases at the batch at which the full plan fits most models; the largest such."""
    num_fitting: dict[int, int] = {}
    for each in of_cluster:
        num_fitting.setdefault(each.batch, 0)
        num_fitting[each.batch] += each.row(FULL).fits
    shown = max(num_fitting, key=lambda batch: (num_fitting[batch], batch))
    return [each for each in of_cluster if each.batch == shown]


def gap(row: Row) -> float:
    """How much longer the step is than that of any plan of the form, at most."""
    return max(0.0, row.predicted_step_time_s / row.lower_bound_s - 1) if row.fits else 0.0


def summary_cells(of_cluster: Sequence[Forms]) -> list[str]:
    """One line per cluster and batch."""
    fitting = [str(sum(each.row(form).fits for each in of_cluster)) for form in FORMS]
    if all(each.is_cephalos_too_slow for each in of_cluster):
        fitting[FORMS.index(CEPHALO)] = TOO_SLOW
    first = of_cluster[0]
    name = f"{first.cluster}: {first.part}"
    cells = [name, str(first.batch), str(len(of_cluster)), *fitting]
    for others, has_best in (((EVEN,), True), (ONE_SIDED, True), ((CEPHALO,), False)):
        ratios = [r for each in of_cluster if (r := each.full_over(*others)) is not None]
        cells.append(f"{median(ratios):.2f}" if ratios else "")
        cells += [f"{max(ratios):.2f}" if ratios else ""] * has_best
    return cells


def plan_by_specification(each: Forms) -> list[str]:
    """A row of the table that compares it with the plan made from published times."""
    full, even = each.speed(FULL), each.speed(EVEN)
    speed = each.speed(BY_SPECIFICATION)
    said = [each.rows[0].model, str(each.rows[0].global_batch_size)]
    said += [NO_PLAN if value is None else f"{value:.3g}" for value in (full, speed)]
    return said + [f"{speed / base:.2f}" if speed and base else "" for base in (full, even)]


def fewer_nodes(each: Forms) -> list[str]:
    """A row of the table of plans on fewer nodes; empty where all nodes are faster."""
    fewer = next((row for row in each.rows if row.form == FEWER_NODES), None)
    if fewer is None:
        return []
    full, speed = each.row(FULL), fewer.predicted_samples_per_s
    if full.fits and full.predicted_samples_per_s >= speed:
        return []
    devices = [f"{row.num_devices}, {row.param_dtype}" for row in (full, fewer)]
    return [
        each.cluster,
        full.model,
        devices[0],
        f"{full.predicted_samples_per_s:.3g}" if full.fits else NO_PLAN,
        fewer.hosts,
        devices[1],
        f"{speed:.3g}",
        f"{speed / full.predicted_samples_per_s:.2f}" if full.fits else "",
    ]


def in_rounds(found: Sequence[Forms]) -> list[str]:
    """One model on one cluster at all batches: what smaller batches, repeated, would give.

    Speeds of a smaller batch hold for the larger one in rounds: gradients add up where they
    are stored, and the optimizer is even counted once per round.
    """
    speeds = {each.batch: each.speed(FULL) for each in found}
    largest = max(speeds)
    best = max(speeds, key=lambda batch: (speeds[batch] or 0.0, batch))
    whole, rounds = speeds[largest], speeds[best]
    if best == largest or rounds is None or (whole and rounds / whole < LEAST_GAIN):
        return []
    said = [f"{found[0].cluster}: {found[0].part}", found[0].rows[0].model, str(largest)]
    said += [NO_PLAN if whole is None else f"{whole:.3g}", f"{largest // best} of {best}"]
    return [*said, f"{rounds:.3g}", f"{rounds / whole:.2f}" if whole else ""]


def bars(rows: Sequence[Row]) -> list[Bar]:
    """What must hold of any prediction, and was claimed before the run."""
    ratios = [
        ratio
        for each in by_case(rows)
        for row in each.rows
        if row.form not in (FULL, FEWER_NODES)
        and (ratio := each.full_over(row.form)) is not None
    ]
    fitting = [row for row in rows if row.fits]
    full = [row for row in fitting if row.form == FULL]
    derived = [row for row in fitting if row.part == DERIVED]
    return [
        Bar(
            claim="samples/s, full / any other form, least",
            measured=min(ratios),
            at_least=LEAST_RATIO,
        ),
        Bar(claim="gap of a full plan, worst", measured=max(map(gap, full)), at_most=0.001),
        Bar(
            claim="simulated step / predicted, full plans, furthest from 1",
            measured=furthest(
                row.simulated_step_time_s / row.predicted_step_time_s for row in full
            ),
            at_least=0.95,
            at_most=1.05,
        ),
        Bar(
            claim="memory of the fullest device / its budget",
            measured=max(row.memory_part for row in fitting),
            at_most=1.0,
        ),
        Bar(claim="MFU, highest", measured=max(row.mfu for row in fitting), at_most=1.0),
        Bar(
            claim="MFU where times are derived, highest",
            measured=max((row.mfu for row in derived), default=0.0),
            at_most=MOST,
        ),
    ]


def furthest(ratios: Iterable[float]) -> float:
    """The ratio that lies furthest from 1."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))
