"""Faults put into running ranks: is the culprit named, and how soon does the run end?

python -m experiments.recovery.run                           80 faults, about 15 minutes
python -m experiments.recovery.run --seeds 0 6 --only-show   some of them; keeps nothing
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed import TCPStore

from experiments.common import by_seed
from experiments.common.launch import FORKED, HOST, answers, started
from experiments.common.results import BAR_HEADER, Bar, Spread, markdown_table
from experiments.recovery.ranks import DEEDS, TIMEOUT_S, Fault, train
from shardhet.comm.liveness.ending import EXIT_STATUS

HERE = Path(__file__).parent
NUM_FAULTS = 80
LIMIT_S = 60.0  # a rank that is still running then, and after the patience, hangs
GRACE_S = 30.0  # the same, after another has ended
SECONDS_BEYOND_PATIENCE = 17.0
HEADER = ["deed", "faults", "as they should", "s to the last rank's end (p10-p90)", "most"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Fault):
    """What came of it."""

    timeout_s: float  # of the others with the rank at fault
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
            found = dict(answers(receivers, timeout_s=LIMIT_S + fault.limit_s, grace_s=GRACE_S))
            ended = {waited_for[i]: answer for i, answer in found.items()}
            for rank in ended:
                processes[rank][0].join(5.0)
            codes = {rank: processes[rank][0].exitcode for rank in waited_for}
        deed = Path(folder, "deed")
        done_at_s = float(deed.read_text()) if deed.exists() else time.monotonic()
    ends_s = [answer[1] for answer in ended.values() if answer is not None]
    return Outcome(
        **asdict(fault),
        timeout_s=fault.limit_s,
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


def as_markdown(outcomes: list[Outcome]) -> str:
    """By deed, what went wrong, and the bars."""
    rows = []
    bad = [each for each in outcomes if each.verdict not in ("named", "untouched")]
    for deed in DEEDS:
        of_deed = [each for each in outcomes if each.deed == deed]
        if of_deed:
            seconds = [each.seconds for each in of_deed]
            good = len(of_deed) - sum(each in bad for each in of_deed)
            cells = [deed, str(len(of_deed)), str(good), Spread.of(seconds).cell(1)]
            rows.append([*cells, f"{max(seconds):.1f}"])
    bars = [
        Bar(claim="faults whose end was not as it should be", measured=len(bad), at_most=0),
        Bar(
            claim="seconds to the end beyond the patience, the most",
            measured=max(each.seconds - each.timeout_s for each in outcomes),
            at_most=SECONDS_BEYOND_PATIENCE,
        ),
    ]
    parts = [f"hang_timeout_s={TIMEOUT_S:g}:", markdown_table(HEADER, rows), *map(str, bad)]
    return "\n\n".join([*parts, markdown_table(BAR_HEADER, [bar.cells for bar in bars])])


def row_of(seed: int) -> Outcome:
    """Of the fault of a seed."""
    return inject(Fault.of(seed))


if __name__ == "__main__":
    how = f"torch {torch.__version__}, gloo over loopback, one thread a rank"
    by_seed.run(HERE, Outcome, row_of, as_markdown, range(NUM_FAULTS), doc=__doc__, how=how)
