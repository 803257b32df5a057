"""One case from its reference to its row."""

from collections.abc import Sequence
from pathlib import Path

from experiments.other_peoples_models.families import FAMILIES, WAYS
from experiments.other_peoples_models.forks import run_forks
from experiments.other_peoples_models.plans import microbatches_of
from experiments.other_peoples_models.ranks import run_rank
from experiments.other_peoples_models.records import (
    Case,
    Family,
    Loss,
    Named,
    RankReport,
    Row,
    Verdict,
    Way,
)
from experiments.other_peoples_models.reference import Reference, load, run_reference

BAR = 1e-12  # at least; of the unit's largest gradient
BAR_FLOAT32 = 2e-6  # where the model computes its loss in float32
NOISES = 10.0  # times what plain torch itself shows ...
MOST_BAR = 1e-5  # ... which is rounding up to here, and above it another function
TIMEOUT_S = 240.0
EARLY_PHASES = ("wrap", "evaluation", "forward")  # before a gradient of the calls refused


class Runner:
    """Runs cases; keeps each reference as long as it may be wanted again."""

    def __init__(self, folder: Path, commit: str) -> None:
        self._folder = folder
        self._commit = commit
        # Where each is, and why there is none.
        self._made: dict[tuple[str, str, tuple[int, ...]], tuple[Path, str | None]] = {}
        self._noise_by_key: dict[tuple[str, bool, tuple[int, ...]], dict[str, float]] = {}

    def run(self, case: Case, named: Named) -> Row:
        """The row of a case under this plan."""
        family, way = FAMILIES[case.family], WAYS[case.way]
        path, failure = self._reference(family, way, named)
        if failure is not None:
            text = f"plain torch: {failure}"
            return self._row(case, family, Verdict.ABSENT, None, (), text)
        reports = run_forks(
            run_rank,
            named.plan.world_size,
            family,
            way,
            named,
            path,
            timeout_s=TIMEOUT_S,
            stays=_has_ended,
        )
        reference = load(path)
        verdict, text = judge(reports, reference, way)
        return self._row(case, family, verdict, reference, reports, text)

    def _row(
        self,
        case: Case,
        family: Family,
        verdict: Verdict,
        reference: Reference | None,
        reports: Sequence[RankReport | None],
        text: str,
    ) -> Row:
        ended = [report for report in reports if report is not None and report.phase == "end"]

        def worst(quantity: str) -> float:
            return max((report.errors[quantity] for report in ended), default=float("nan"))

        nan = float("nan")
        return Row(
            family=case.family,
            source=family.source,
            way=case.way,
            plan=case.plan,
            verdict=verdict.value,
            loss_error=worst("loss"),
            grad_error=worst("grad"),
            state_error=worst("state"),
            noise=reference.noise["grad"] if reference else nan,
            plain_start_s=reference.start_s if reference else nan,
            start_s=max((report.start_s for report in ended), default=nan),
            plain_step_s=reference.step_s if reference else nan,
            step_s=max((min(report.step_s[1:]) for report in ended), default=nan),
            text=text,
            commit=self._commit,
        )

    def _reference(self, family: Family, way: Way, named: Named) -> tuple[Path, str | None]:
        sizes = tuple(microbatches_of(named.plan))
        key = (family.name, way.name, sizes)
        for other, (path, _) in self._made.items():
            if other[0] != family.name:
                path.unlink(missing_ok=True)  # cases come family by family
        if key not in self._made:
            path = self._folder / f"{len(self._made)}.pt"
            known = self._noise_by_key.get((family.name, way.drops, sizes))
            [failure] = run_forks(
                _try_reference, 1, family, way, named, path, known, timeout_s=TIMEOUT_S
            )
            if failure is None:
                failure = "it ended without a message."
            elif not failure and known is None:
                self._noise_by_key[family.name, way.drops, sizes] = load(path).noise
            self._made[key] = path, failure or None
        return self._made[key]


def _has_ended(report: RankReport) -> bool:
    return report.phase == "end"


def _try_reference(
    family: Family, way: Way, named: Named, path: Path, noise: dict[str, float] | None
) -> str:
    try:
        run_reference(family, way, named, path, noise)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def judge(
    reports: Sequence[RankReport | None], reference: Reference, way: Way
) -> tuple[Verdict, str]:
    """What became of it, and what there is to say."""
    silent = [rank for rank, report in enumerate(reports) if report is None]
    ended = [report for report in reports if report is not None]
    failed = [report for report in ended if report.phase != "end"]
    if silent or failed:
        text = "; ".join(sorted({_story(report) for report in failed}, key=len)[:1])
        if silent:
            return Verdict.CRASHED, f"ranks {silent} hung or died; others: {text}"
        if len(failed) == len(reports) and all(report.is_deliberate for report in failed):
            is_early = all(report.phase.startswith(EARLY_PHASES) for report in failed)
            return Verdict.REFUSED if is_early else Verdict.LATE, text
        first = next((report for report in failed if not report.is_deliberate), failed[0])
        if len(failed) < len(reports):
            return Verdict.CRASHED, f"not on every rank: {_story(first)}"
        return Verdict.CRASHED, _story(first)
    least = BAR_FLOAT32 if way.loss in (Loss.INNER, Loss.ITEMS) else BAR
    too_far = [
        report.worst[quantity]
        for report in ended
        for quantity, error in report.errors.items()
        if error > max(least, min(NOISES * reference.noise[quantity], MOST_BAR))
    ]
    return (Verdict.WRONG, too_far[0]) if too_far else (Verdict.EXACT, "")


def _story(report: RankReport) -> str:
    return f"[{report.phase}] {report.error}".replace("\n", " ")
