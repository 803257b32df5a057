"""Faults put into running ranks: is the culprit named, and how soon does the run end?

python -m experiments.recovery.run                   80 faults, about 15 minutes
python -m experiments.recovery.run --seeds 0 6       some of them; keeps nothing
python -m experiments.recovery.run --cost            what the watch costs a step; keeps nothing
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from torch.distributed import TCPStore

from experiments.common.launch import FORKED, HOST, answers, run_ranks, started
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.recovery.ranks import DEEDS, TIMEOUT_S, Fault, time_steps, train
from shardhet.comm.liveness import EXIT_STATUS

HERE = Path(__file__).parent
NUM_FAULTS = 80
LIMIT_S = 60.0  # a rank that is still running then, and after the patience, hangs
GRACE_S = 30.0  # the same, after another has ended
SECONDS_BEYOND_PATIENCE = 17.0
HEADER = ["deed", "faults", "as they should", "s to the last rank's end (p10-p90)", "most"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a fault."""

    seed: int
    deed: str
    place: str
    world_size: int
    rank: int
    step: int
    transport: str
    patience_s: float  # of the others with the rank at fault
    verdict: str  # "named", "untouched", or what went wrong
    seconds: float  # from the deed to the end of the last rank that was not at fault


def inject(fault: Fault) -> Outcome:
    """Run ranks with the fault."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    others = [rank for rank in range(fault.world_size) if rank != fault.rank]
    with TemporaryDirectory() as folder:
        args = [(rank, store.port, fault, folder) for rank in range(fault.world_size)]
        with started(FORKED, train, args, grace_s=0.0) as processes:
            waited_for = others if fault.deed != "slow" else list(range(fault.world_size))
            receivers = [processes[rank][1] for rank in waited_for]
            found = dict(
                answers(receivers, timeout_s=LIMIT_S + fault.patience_s, grace_s=GRACE_S)
            )
            ended = {waited_for[i]: answer for i, answer in found.items()}
            for rank in ended:
                processes[rank][0].join(5.0)
            codes = {rank: processes[rank][0].exitcode for rank in waited_for}
        deed = Path(folder, "deed")
        done_at_s = float(deed.read_text()) if deed.exists() else time.monotonic()
    ends_s = [answer[1] for answer in ended.values() if answer is not None]
    return Outcome(
        **asdict(fault),
        patience_s=fault.patience_s,
        verdict=_verdict(fault, ended, codes, waited_for),
        seconds=round(max(ends_s, default=time.monotonic()) - done_at_s, 2),
    )


def _verdict(
    fault: Fault,
    ended: dict[int, tuple[str, float] | None],
    codes: dict[int, int | None],
    waited_for: Sequence[int],
) -> str:
    missing = [rank for rank in waited_for if rank not in ended]
    if missing:
        return f"hang of {missing}"
    messages = {rank: answer[0] for rank, answer in ended.items() if answer is not None}
    silent = [rank for rank in waited_for if rank not in messages]
    if any(codes[rank] != EXIT_STATUS for rank in silent):
        return f"silent end of {silent}"
    if fault.deed == "slow":
        is_well = all(text == "returned" for text in messages.values())
        return "untouched" if is_well else f"accused: {messages}"
    for text in messages.values():
        if not text.startswith(f"rank {fault.rank} ("):
            return f"not named: {text}"
    return "named"


def report(outcomes: Sequence[Outcome], page: Page) -> None:
    """The tables of a campaign."""
    rows = []
    for deed in DEEDS:
        of_deed = [each for each in outcomes if each.deed == deed]
        if not of_deed:
            continue
        good = [each for each in of_deed if each.verdict in ("named", "untouched")]
        seconds = [each.seconds for each in of_deed]
        rows.append(
            [
                deed,
                str(len(of_deed)),
                str(len(good)),
                Spread.of(seconds).cell(1),
                f"{max(seconds):.1f}",
            ]
        )
    page.table(f"hang_timeout_s={TIMEOUT_S:g}", HEADER, rows)
    bad = [each for each in outcomes if each.verdict not in ("named", "untouched")]
    for each in bad:
        page.tell(f"{each}")
    page.bars(
        [
            Bar(claim="faults whose end was not as it should be", measured=len(bad), at_most=0),
            Bar(
                claim="seconds to the end beyond the patience, the most",
                measured=max(each.seconds - each.patience_s for each in outcomes),
                at_most=SECONDS_BEYOND_PATIENCE,
            ),
        ]
    )


def cost() -> float:
    """The median of the times of watched steps over that of the others."""
    blocks = [each for rank in run_ranks(time_steps, 2, 24, 200) for each in rank]
    watched, plain = ([s for is_on, s in blocks if is_on is each] for each in (True, False))
    ratio = median(watched) / median(plain)
    times = f"{1e3 * median(plain):.2f} ms a step, watched {1e3 * median(watched):.2f} ms"
    print(f"{times}: {ratio:.4f}")
    return ratio


def main() -> None:
    """Run what the command line says."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", nargs=2, type=int, metavar=("FIRST", "STOP"))
    parser.add_argument("--cost", action="store_true")
    arguments = parser.parse_args()
    if arguments.cost:
        cost()
        return
    first, stop = arguments.seeds or (0, 6 if arguments.quick else NUM_FAULTS)
    is_kept = arguments.seeds is None and not arguments.quick
    page = Page(HERE, is_kept=is_kept)
    outcomes = []
    for seed in range(first, stop):
        outcomes.append(inject(Fault.of(seed)))
        print(outcomes[-1], flush=True)
    report(outcomes, page)
    page.keep({"results.csv": outcomes})


if __name__ == "__main__":
    main()
