"""Clusters and models that others have published about: what does each form of plan give?

python -m experiments.published.run            about 4 minutes
python -m experiments.published.run --quick    some seconds, keeps nothing

Nothing is measured and no GPU is needed.  Published tables are read from --data, or from
the folder cephalo in SHARDHET_SHARED_DATA; without them only derived figures are made.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.common.machine import SHARED_DATA, Environment
from experiments.common.results import BAR_HEADER, Page, Table, parser_of, read_csv
from experiments.published.checks import CHECK_HEADER, checks
from experiments.published.forms import BY_SPECIFICATION, EVEN, FULL, Row, predict
from experiments.published.inputs import (
    CLUSTERS,
    DERIVED,
    FEWER_BATCH,
    MEASURED,
    NO_LINKS,
    PARTS,
    PUBLISHED_CLUSTER,
    Case,
    cases,
    inputs_of,
)
from experiments.published.picture import draw
from experiments.published.summary import (
    CASE_HEADER,
    SUMMARY_HEADER,
    Forms,
    at_shown_batch,
    bars,
    by_case,
    fewer_nodes,
    in_rounds,
    plan_by_specification,
    summary_cells,
)

HERE = Path(__file__).parent
RESULTS = HERE / "results.csv"
QUICK_CLUSTERS, QUICK_BATCH = ("rtx4090_2x3090", PUBLISHED_CLUSTER), 128


def main() -> None:
    """Predict, print, and keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=CLUSTERS, help="keeps the others' rows")
    parser.add_argument("--data", type=Path, default=SHARED_DATA / "cephalo")
    options = parser.parse_args()
    has_tables = (options.data / "model_latencies.json").is_file()
    chosen = [case for case in cases() if is_chosen(case, options, has_tables)]
    rows = [row for case in chosen for row in predict(case, inputs_of(case, options.data))]
    if not options.quick and RESULTS.is_file():
        rows = merged(rows, read_csv(RESULTS, Row))
    here = Environment.here()
    versions = f"{here.date}, commit `{here.commit}`; Python {here.python}, numpy"
    heading = f"{versions} {np.__version__}. Predictions: no clock was read."
    page = Page(HERE, is_kept=not options.quick, heading=heading)
    page.tables(tables(rows))
    if has_tables:
        cells = [check.cells for check in checks(options.data)]
        page.table("Published figures beside ours", CHECK_HEADER, cells)
    page.keep({RESULTS.name: rows})
    if page.is_kept:
        draw(rows, HERE / "predicted.png")


def is_chosen(case: Case, options: argparse.Namespace, has_tables: bool) -> bool:
    """Whether this run predicts the case."""
    if case.part != DERIVED and not has_tables:
        return False
    if options.quick:
        return case.cluster in QUICK_CLUSTERS and case.global_batch_size == QUICK_BATCH
    return case.cluster in (options.only or CLUSTERS)


def merged(new: Sequence[Row], old: Sequence[Row]) -> list[Row]:
    """New rows in place of old ones of the same case, in the order of cases."""
    rows_by_case: dict[tuple[str, str, str, int], list[Row]] = {}
    for rows in (old, new):
        for each in by_case(rows):
            rows_by_case[each.key] = list(each.rows)
    order = [(c.part, c.cluster, c.model, c.global_batch_size) for c in cases()]
    return [row for key in order for row in rows_by_case.get(key, [])]


def tables(rows: Sequence[Row]) -> list[Table]:
    """All tables that rows alone make; single cases at one batch per cluster."""
    every = by_case(rows)
    lines, single = [], []
    for part in PARTS:
        for cluster in dict.fromkeys(e.cluster for e in every if e.part == part):
            of_cluster = [e for e in every if (e.part, e.cluster) == (part, cluster)]
            batches = sorted({e.batch for e in of_cluster})
            lines += [
                summary_cells([e for e in of_cluster if e.batch == batch]) for batch in batches
            ]
            found = at_shown_batch(of_cluster)
            single.append(Table(found[0].title, CASE_HEADER, [e.cells for e in found]))
    return [
        Table("Bars", BAR_HEADER, [bar.cells for bar in bars(rows)]),
        Table("How many cases fit, and ratios of samples/s", SUMMARY_HEADER, lines),
        *single,
        Table(
            f"Where some nodes alone are faster, batch {FEWER_BATCH}",
            ["cluster", "model", "all", "samples/s", "only", "these", "samples/s", "of all"],
            [cells for each in every if (cells := fewer_nodes(each))],
        ),
        Table(
            "Where the largest batch is slower at once than in rounds of a smaller one",
            ["cluster", "model", "batch", "at once", "in rounds", "samples/s", "of at once"],
            rounds(every),
        ),
        Table(
            "Where not even the full plan fits",
            ["cluster", "model", "batch", "nearest miss"],
            refusals(every),
        ),
        Table(
            "Planned from specifications, judged by published times; samples/s",
            ["model", "batch", FULL, BY_SPECIFICATION, f"of {FULL}", f"of {EVEN}"],
            [plan_by_specification(each) for each in every if each.part == MEASURED],
        ),
    ]


def rounds(every: Sequence[Forms]) -> list[list[str]]:
    """Where a batch in rounds would be faster than at once."""
    found: dict[tuple[str, str, str], list[Forms]] = {}
    for each in every:
        if each.part != NO_LINKS:
            found.setdefault(each.key[:3], []).append(each)
    return [cells for each in found.values() if (cells := in_rounds(each))]


def refusals(every: Sequence[Forms]) -> list[list[str]]:
    """Where there is no plan at all: the smallest batch, and what would help."""
    refused: dict[tuple[str, str, str], list[str]] = {}
    for each in every:
        full = each.row(FULL)
        if not full.fits and each.part != NO_LINKS:
            said = [f"{each.cluster}: {each.part}", full.model, str(each.batch), full.why_not]
            refused.setdefault((each.part, each.cluster, full.model), said)
    return list(refused.values())


if __name__ == "__main__":
    main()
