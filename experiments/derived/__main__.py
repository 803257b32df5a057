"""How far are times from specifications off, on blocks that others have timed?

    python -m experiments.derived [--data FOLDER]            about two minutes
    python -m experiments.derived --table                    the numbers, as Python

Fits what shardhet/pricing/efficiency.py holds, and leaves models and kinds of device out.  No
clock is read.  FOLDER holds layer_latency.csv of github.com/benson-guo/cephalo; otherwise it
is the folder cephalo in SHARDHET_SHARED_DATA.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np
import scipy

from experiments.common.machine import SHARED_DATA, Environment
from experiments.common.results import BAR_HEADER, Bar, Page, Table, columns, parser_of
from experiments.derived import table
from experiments.derived.blocks import Timed, kinds_by_name, read_blocks
from experiments.derived.checks import (
    CHECKS,
    NO_KIND,
    NO_MODEL,
    NO_POWER,
    OWN,
    SHIPPED,
    Ratio,
    covered,
    factor,
    judged,
    relatives,
)
from experiments.derived.elsewhere import ROUNDPIPE
from experiments.derived.elsewhere import blocks as blocks_elsewhere
from experiments.derived.elsewhere import steps as steps_elsewhere
from experiments.derived.fit import fitted_by_group, watts_per_tflop_per_s
from shardhet.pricing.efficiency import (
    FITTED,
    SPREAD_BY_POWER,
    SPREAD_FITTED,
    SPREAD_UNKNOWN,
)

HERE = Path(__file__).parent
NUM_WORST = 10
SPREAD_BY_CHECK = {
    NO_MODEL: SPREAD_FITTED,
    NO_KIND: SPREAD_BY_POWER,
    NO_POWER: SPREAD_UNKNOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Derived over published seconds of one block, forward and backward together."""

    model: str
    gpu: str
    seq_len: int
    dtype: str
    microbatch_size: int
    as_shipped: float
    own_block: float
    model_left_out: float
    kind_left_out: float
    power_not_stated: float


def main() -> None:
    """Fit, judge, print, and keep."""
    parser = parser_of(__doc__, quick="without leaving anything out, and keeps nothing")
    parser.add_argument("--data", type=Path, default=SHARED_DATA / "cephalo")
    parser.add_argument("--table", action="store_true", help="the numbers, as Python")
    options = parser.parse_args()
    blocks = read_blocks(options.data)
    if options.table:
        print("\n".join(table.lines(blocks)))
        return
    ratios = judged(blocks, CHECKS[:2] if options.quick else CHECKS)
    here = Environment.here()
    versions = f"{here.date}, commit `{here.commit}`; Python {here.python}, numpy"
    heading = f"{versions} {np.__version__}, scipy {scipy.__version__}. No clock was read."
    page = Page(HERE, is_kept=not options.quick, heading=heading)
    if not options.quick:
        cells = [bar.cells for bar in bars(blocks, ratios)]
        page.table("Bars", BAR_HEADER, cells)
    page.tables(tables(ratios))
    page.keep({"results.csv": list(rows(ratios))} if page.is_kept else {})


def bars(blocks: Sequence[Timed], ratios: Sequence[Ratio]) -> Iterator[Bar]:
    """What was asked of derived times before they were fitted."""
    no_model = [row for row in ratios if row.check == NO_MODEL]
    totals, pairs = [row.total for row in no_model], relatives(no_model)
    for name, quantile, at_most in (("median", 0.5, 1.25), ("p90", 0.9, 1.6)):
        claim = f"block time, {NO_MODEL}: factor, {name}"
        yield Bar(claim=claim, measured=factor(totals, quantile), at_most=at_most)
    yield Bar(
        claim=f"relative speed of two kinds, {NO_MODEL}: factor, median",
        measured=factor([pair.ratio for pair in pairs], 0.5),
        at_most=1.2,
    )
    yield Bar(
        claim=f"pairs more than 1.5 apart in the wrong order, of {len(pairs)}",
        measured=sum(pair.is_reversed for pair in pairs),
        at_most=0,
    )
    for check, spread in SPREAD_BY_CHECK.items():
        found = [row.total for row in ratios if row.check == check]
        claim = f"part within the printed factor of {spread:g}, {check}"
        yield Bar(claim=claim, measured=covered(found, spread), at_least=0.9)
    yield Bar(
        claim="numbers in efficiency.py beside this fit, largest difference",
        measured=max(
            abs(ours - theirs)
            for (kind, dtype), row in fitted_by_group(blocks).items()
            for ours, theirs in (
                (FITTED[kind][dtype].forward, row.forward),
                (FITTED[kind][dtype].backward, row.backward),
                (FITTED[kind][dtype].slowdown_per_s, row.slowdown_per_s),
            )
        ),
        at_most=0.001,
    )


def tables(ratios: Sequence[Ratio]) -> Iterator[Table]:
    """Factors by check and by kind, the worst blocks, and what was timed elsewhere."""
    by_check = {check: [row for row in ratios if row.check == check] for check in CHECKS}
    yield Table(
        "Derived / published seconds, as factors of at least 1",
        ["check", "times", *(f"{what}, {q}" for what in _WHAT for q in ("median", "p90"))],
        [
            [check, str(len(found)), *_factors(found)]
            for check, found in by_check.items()
            if found
        ],
    )
    yield Table(
        "By kind and precision",
        ["kind", "dtype", "blocks", "W per TFLOP/s", "forward", "backward", "slower per s"]
        + [f"{check}: {q}" for check in (NO_MODEL, NO_KIND) for q in ("median", "p90")],
        list(_by_group(by_check)),
    )
    yield Table(
        f"Furthest off, {NO_MODEL}, at the largest microbatch",
        ["block", "GPU", "tokens", "dtype", "microbatch", "derived / published"],
        list(_worst(by_check[NO_MODEL])),
    )
    yield Table(
        "Small microbatches timed elsewhere, by the clock of the host, ms of a block",
        *columns(
            blocks_elsewhere(),
            {
                **{name: f"{{0.{name}}}" for name in ("kind", "samples", "timed")},
                "printed": "{0.printed:.2f}",
                "its kernels alone": "{0.of_kernels:.2f}",
                "derived": "{0.derived:.2f}",
                "source": "{0.source}",
            },
        ),
    )
    yield Table(
        f"Steps of FSDP on eight cards, tokens/s ({ROUNDPIPE})",
        *columns(
            steps_elsewhere(),
            {
                **{n: f"{{0.{n}}}" for n in ("kind", "model", "samples", "microbatches")},
                "printed": "{0.printed:.0f}",
                "derived": "{0.derived:.0f}",
                "derived / printed": "{0.part:.2f}",
            },
        ),
    )


_WHAT = ("both", "forward", "backward")


def _factors(found: Sequence[Ratio]) -> list[str]:
    lists = (
        [row.total for row in found],
        [row.forward for row in found],
        [row.backward for row in found],
    )
    return [f"{factor(values, q):.2f}" for values in lists for q in (0.5, 0.9)]


def _by_group(by_check: dict[str, list[Ratio]]) -> Iterator[list[str]]:
    for kind, dtype in sorted({row.block.group for row in by_check[SHIPPED]}):
        row, group = FITTED[kind][dtype], (kind, dtype)
        mine = [each.block for each in by_check[SHIPPED] if each.block.group == group]
        cells = [kind, dtype, str(len({id(block) for block in mine}))]
        cells.append(f"{watts_per_tflop_per_s(group):.2f}")
        cells += [f"{row.forward:.3f}", f"{row.backward:.3f}", f"{row.slowdown_per_s:.3f}"]
        for check in (NO_MODEL, NO_KIND):
            values = [each.total for each in by_check[check] if each.block.group == group]
            cells += [f"{factor(values, q):.2f}" if values else "" for q in (0.5, 0.9)]
        yield cells


def _worst(found: Sequence[Ratio]) -> Iterator[list[str]]:
    largest = [row for row in found if row.size == max(row.block.seconds_by_size)]
    for row in sorted(largest, key=lambda row: -abs(log(row.total)))[:NUM_WORST]:
        block = row.block
        known = kinds_by_name()[block.group[0]].kind
        yield [
            block.model,
            known,
            str(block.seq_len),
            block.dtype,
            str(row.size),
            f"{row.total:.2f}",
        ]


def rows(ratios: Sequence[Ratio]) -> Iterator[Row]:
    """One row per block and size, with all checks beside each other."""
    totals: dict[tuple[int, int], dict[str, float]] = {}
    blocks = {id(ratio.block): ratio.block for ratio in ratios}
    for ratio in ratios:
        totals.setdefault((id(ratio.block), ratio.size), {})[ratio.check] = _short(ratio.total)
    for (key, size), by_check in totals.items():
        block = blocks[key]
        yield Row(
            model=block.model,
            gpu=block.gpu,
            seq_len=block.seq_len,
            dtype=block.dtype,
            microbatch_size=size,
            as_shipped=by_check[SHIPPED],
            own_block=by_check[OWN],
            model_left_out=by_check[NO_MODEL],
            kind_left_out=by_check[NO_KIND],
            power_not_stated=by_check[NO_POWER],
        )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
