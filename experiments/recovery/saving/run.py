"""Checkpoints: what they cost while a model trains, and beside the disk's own speed.

python -m experiments.recovery.saving.run            about eight minutes
python -m experiments.recovery.saving.run --quick    one round; keeps nothing
"""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.common.launch import FORKED, run_ranks
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.recovery.saving.ranks import EVERY, SPEEDS, WAYS, save_large, train

HERE = Path(__file__).parent
IN_MEMORY = Path("/dev/shm")
NUM_ROUNDS, NUM_LARGE_ROUNDS = 8, 6
NUM_LAYERS = 20  # 1.0 GB with AdamW's states in float32
LAYER_BYTES = 3 * 4 * (2048 * 2048 + 2048)
NUM_RANKS = 4
LEAST_THROUGHPUT = 0.95
LEAST_OF_DISK = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Steps that end with a save, and as many again."""

    way: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """One save of a large state, and as many bytes written by dd, by turns."""

    save_s: float
    dd_s: float


def write_by_dd(num_bytes: int, disk: Path) -> float:
    """Seconds until one program for each rank has written its part, on the disk."""
    mib = num_bytes // NUM_RANKS // 2**20
    started_s = time.perf_counter()
    command = ["dd", "if=/dev/zero", "bs=1M", f"count={mib}", "conv=fsync"]
    writers = [
        subprocess.Popen(
            [*command, f"of={disk / f'dd{i}'}"],
            stderr=subprocess.DEVNULL,
        )
        for i in range(NUM_RANKS)
    ]
    for writer in writers:
        writer.wait()
    seconds = time.perf_counter() - started_s
    for i in range(NUM_RANKS):
        (disk / f"dd{i}").unlink()
    return seconds


def large_saves(num_layers: int, num_rounds: int, disk: Path) -> list[Large]:
    """Saves and writes by turns."""
    found = []
    for i in range(num_rounds + 1):
        args = (num_layers, 2, disk)
        save_s = run_ranks(save_large, NUM_RANKS, *args, context=FORKED)[0][-1]
        dd_s = write_by_dd(num_layers * LAYER_BYTES, disk)
        if i:
            found.append(Large(save_s=round(save_s, 3), dd_s=round(dd_s, 3)))
            print(found[-1], flush=True)
    return found


def report(blocks: Sequence[Block], large: Sequence[Large], page: Page) -> None:
    """The tables and the bars."""
    seconds = {way: [e.seconds for e in blocks if e.way == way] for way in WAYS}
    throughputs = {
        way: Spread.of(
            [alone / own for alone, own in zip(seconds["nothing"], seconds[way], strict=True)]
        )
        for way in WAYS
    }
    rows = [[way, Spread.of(seconds[way]).cell(2), throughputs[way].cell(3)] for way in WAYS]
    page.table(
        f"two blocks of {EVERY} steps, on four devices of "
        f"{', '.join(f'{speed:g}' for speed in SPEEDS)} of a core",
        ["each ends with", "s", "throughput of nothing's"],
        rows,
    )
    ratios = Spread.of([each.dd_s / each.save_s for each in large])
    page.table(
        f"{NUM_LAYERS * LAYER_BYTES / 1e9:.2f} GB by four processes, with fsync",
        ["writer", "s"],
        [
            ["shardhet.checkpoint.save", Spread.of([each.save_s for each in large]).cell(2)],
            ["dd conv=fsync", Spread.of([each.dd_s for each in large]).cell(2)],
            ["throughput of dd's", ratios.cell(2)],
        ],
    )
    page.bars(
        [
            Bar(
                claim="throughput with a checkpoint in the background every ten steps",
                measured=throughputs["checkpoint in the background"].median,
                at_least=LEAST_THROUGHPUT,
            ),
            Bar(
                claim="throughput of a large save beside dd's",
                measured=ratios.median,
                at_least=LEAST_OF_DISK,
            ),
        ]
    )


def main() -> None:
    """Run what the command line says."""
    options = parser_of(__doc__, "one round; keeps nothing").parse_args()
    page = Page(HERE, is_kept=not options.quick)
    num_rounds, num_large = (1, 1) if options.quick else (NUM_ROUNDS, NUM_LARGE_ROUNDS)
    root = IN_MEMORY if IN_MEMORY.is_dir() else None
    with TemporaryDirectory(dir=root) as memory, TemporaryDirectory(dir=HERE) as disk:
        args = (num_rounds, Path(memory), Path(disk))
        seconds = run_ranks(train, NUM_RANKS, *args, context=FORKED)[0]
        blocks = [
            Block(way=way, seconds=round(each, 4)) for way in WAYS for each in seconds[way]
        ]
        large = large_saves(4 if options.quick else NUM_LAYERS, num_large, Path(disk))
    report(blocks, large, page)
    page.keep({"blocks.csv": blocks, "large.csv": large})


if __name__ == "__main__":
    main()
