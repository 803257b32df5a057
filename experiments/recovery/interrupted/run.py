"""Runs that are killed or told to end: do they go on where they were?

python -m experiments.recovery.interrupted.run          64 kills, 16 notices, 64 nodes lost
python -m experiments.recovery.interrupted.run --seeds 0 3    some of the kills; keeps nothing
python -m experiments.recovery.interrupted.run --again 0 3    in place of those in results.csv

Faults are numbered in this order: the nodes that are lost are 80 to 143.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import TCPStore

from experiments.common.launch import FORKED, HOST, answers, started
from experiments.common.results import Bar, Page, Spread, parser_of, read_csv
from experiments.recovery.interrupted.ranks import (
    ANYTIME,
    KILL,
    LOST,
    NOTICE,
    NUM_STEPS,
    PLACES,
    PLANS,
    Course,
    Fault,
    Life,
    live,
)

HERE = Path(__file__).parent
NUM_KILLS, NUM_NOTICES, NUM_LOSSES = 64, 16, 64
LIMIT_S = 120.0  # a life that takes longer hangs
GRACE_S = 45.0  # the same, for ranks after another has ended
SECONDS_BETWEEN_LOOKS = 0.002
STEP_S = 0.1  # about
ROUNDING = 1e-9  # relative to the largest parameter, in float64
MAX_SECONDS_TO_END = 15.0
HEADER = ["deed", "where", "runs", "as they should", "steps lost, most", "s to the end of all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Fault):
    """What came of it."""

    committed: int  # the last checkpoint that a rank had been told of before
    went_on_after: int  # the step of the checkpoint that was loaded
    error: float  # of losses and parameters at the end, relative to an undisturbed run
    seconds: float  # from the deed to the end of the other ranks
    verdict: str  # "bit-equal", "within rounding", or what went wrong

    @property
    def is_well(self) -> bool:
        """Whether the run went on as it should."""
        return self.verdict in ("bit-equal", "within rounding")


@dataclass(frozen=True, slots=True)
class _End:
    """How the ranks of one life ended."""

    courses: Mapping[int, Course | str | None]  # by rank; why it failed; None: it was killed
    hung: Sequence[int]
    seconds: float  # from the deed to the end of the last other rank


def run_life(life: Life, folder: Path, fault: Fault | None = None) -> _End:
    """Start the ranks; interrupt them from outside if the fault says so."""
    world_size = PLANS[life.plan].world_size
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    (folder / "step").unlink(missing_ok=True)
    args = [(rank, store.port, life, str(folder)) for rank in range(world_size)]
    with started(FORKED, live, args, grace_s=5.0) as processes:
        done_at_s = 0.0
        if fault is not None and fault.place == ANYTIME:
            _wait_for(fault, folder)
            done_at_s = time.monotonic()
            pid = processes[fault.rank][0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL if fault.deed == KILL else signal.SIGTERM)
        receivers = [receiver for _, receiver in processes]
        ends: dict[int, tuple[Course | str | None, float]] = {}
        for rank, course in answers(receivers, timeout_s=LIMIT_S, grace_s=GRACE_S):
            ends[rank] = (course, time.monotonic())
    times_s = [at_s for _, at_s in ends.values()]
    return _End(
        courses={rank: course for rank, (course, _) in ends.items()},
        hung=[rank for rank in range(world_size) if rank not in ends],
        seconds=max(times_s, default=0.0) - (done_at_s or min(times_s, default=0.0)),
    )


def _wait_for(fault: Fault, folder: Path) -> None:
    """Until a moment in the fault's step, drawn by its seed."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        text = (folder / "step").read_text() if (folder / "step").exists() else ""
        if text and int(text) >= fault.step:
            break
        time.sleep(SECONDS_BETWEEN_LOOKS)
    time.sleep(STEP_S * random.Random(f"moment {fault.deed} {fault.seed}").random())


def undisturbed(plan: int) -> Course:
    """Rank zero's course of a run under a plan."""
    with TemporaryDirectory() as folder:
        course = run_life(Life(plan=plan), Path(folder)).courses[0]
    assert isinstance(course, Course), course
    return course


def interrupt(fault: Fault, expected: Course) -> Outcome:
    """Interrupt a run, let it go on, and compare; ``expected`` is of the plan that goes on."""
    trap = {"rank": fault.rank, "step": fault.step, "occasion": fault.occasion}
    with TemporaryDirectory() as name:
        folder = Path(name)
        is_late = fault.place == "loading"
        first = Life(
            plan=fault.plan,
            in_background=fault.in_background,
            nodes=fault.nodes,
            place="end" if is_late else fault.place,
            **({**trap, "rank": 0} if is_late else trap),
        )
        end = run_life(first, folder, fault)
        committed = int((folder / "committed").read_text())
        if is_late:
            nodes = tuple(range(PLANS[fault.next_plan].world_size)) if fault.nodes else ()
            late = Life(plan=fault.next_plan, place=fault.place, nodes=nodes, **trap)
            end = run_life(late, folder)
        if fault.deed == LOST:
            shutil.rmtree(folder / f"node{fault.rank}", ignore_errors=True)
        last = run_life(Life(plan=fault.next_plan, nodes=fault.nodes_left), folder)
    course = last.courses.get(0)
    went_on_after = course.first_step - 1 if isinstance(course, Course) else -1
    error, verdict = _compare(fault, end, last, committed, expected)
    return Outcome(
        **asdict(fault),
        committed=committed,
        went_on_after=went_on_after,
        error=error,
        seconds=round(end.seconds, 2),
        verdict=verdict,
    )


def _compare(
    fault: Fault, end: _End, last: _End, committed: int, expected: Course
) -> tuple[float, str]:
    if end.hung:
        return -1.0, f"ranks {end.hung} of the interrupted run hang"
    left = [rank for rank, course in end.courses.items() if isinstance(course, Course)]
    if fault.deed != NOTICE and left and fault.place != ANYTIME:
        return -1.0, f"nobody was killed: ranks {left} ended well"
    if fault.deed == NOTICE and len(left) < len(end.courses):
        return -1.0, "not all ranks ended well"
    course = last.courses.get(0)
    if last.hung or not isinstance(course, Course):
        return -1.0, f"the run does not go on: {last}"
    if course.first_step <= committed:
        return -1.0, f"step {committed} was committed and is lost"
    if list(course.losses) != list(range(course.first_step, NUM_STEPS + 1)):
        return -1.0, f"steps {list(course.losses)} were taken"
    return _error(course, expected, is_same_plan=fault.plan == fault.next_plan)


def _error(course: Course, expected: Course, *, is_same_plan: bool) -> tuple[float, str]:
    losses = [(loss, expected.losses[step]) for step, loss in course.losses.items()]
    pairs = [(course.state[fqn], param) for fqn, param in expected.state.items()]
    error = max(
        [abs(a - b) / abs(b) for a, b in losses]
        + [float(abs(a - b).max() / abs(b).max()) for a, b in pairs]
    )
    is_equal = all(a == b for a, b in losses) and all((a == b).all() for a, b in pairs)
    if is_equal:
        return error, "bit-equal"
    if is_same_plan:
        return error, "not bit-equal under the same plan"
    return error, "within rounding" if error <= ROUNDING else "another run"


def report(outcomes: Sequence[Outcome], page: Page) -> None:
    """The tables of a campaign."""
    rows = []
    places = [*product((KILL,), PLACES), (NOTICE, ANYTIME), *product((LOST,), PLACES)]
    for deed, place in places:
        own = [each for each in outcomes if (each.deed, each.place) == (deed, place)]
        if own:
            lost = [each.step - 1 - each.went_on_after for each in own]
            numbers = (len(own), sum(each.is_well for each in own), max(0, *lost))
            seconds = Spread.of([each.seconds for each in own]).cell(1)
            rows.append([deed, place, *map(str, numbers), seconds])
    page.table(f"runs of {NUM_STEPS} steps", HEADER, rows)
    bad = [each for each in outcomes if not each.is_well]
    for each in bad:
        page.tell(f"{each}")
    same = sum(each.plan == each.next_plan for each in outcomes)
    page.tell(
        f"{same} went on under the same plan, {len(outcomes) - same} under another; "
        f"{sum(each.in_background and each.deed != LOST for each in outcomes)} wrote their "
        "checkpoints in a thread."
    )
    claims = (
        ("runs that did not go on as they should", len(bad), 0),
        (
            "relative difference from the undisturbed run, the most",
            max(each.error for each in outcomes),
            ROUNDING,
        ),
        (
            "seconds to the end of the other ranks, the most",
            max(each.seconds for each in outcomes),
            MAX_SECONDS_TO_END,
        ),
    )
    page.bars([Bar(claim=claim, measured=value, at_most=most) for claim, value, most in claims])


def main() -> None:
    """Run what the command line says."""
    parser = parser_of(__doc__, "ten of them; keeps nothing")
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    parser.add_argument("--again", nargs=2, type=int, metavar=("FIRST", "STOP"))
    options = parser.parse_args()
    faults = [Fault.of(seed, KILL) for seed in range(NUM_KILLS)]
    faults += [Fault.of(seed, NOTICE) for seed in range(NUM_NOTICES)]
    faults += [Fault.of(seed, LOST) for seed in range(NUM_LOSSES)]
    if options.quick:
        faults = faults[:8] + faults[NUM_KILLS : NUM_KILLS + 1] + faults[-1:]
    if options.seeds or options.again:
        faults = faults[slice(*(options.seeds or options.again))]
    page = Page(HERE, is_kept=not options.quick and options.seeds is None)
    expected: dict[int, Course] = {}
    outcomes = []
    for fault in faults:
        if fault.next_plan not in expected:
            expected[fault.next_plan] = undisturbed(fault.next_plan)
        outcomes.append(interrupt(fault, expected[fault.next_plan]))
        print(outcomes[-1], flush=True)
    if options.again:
        before = read_csv(HERE / "results.csv", Outcome)
        outcomes = list({(e.deed, e.seed): e for e in (*before, *outcomes)}.values())
    report(outcomes, page)
    page.keep({"results.csv": outcomes})


if __name__ == "__main__":
    main()
