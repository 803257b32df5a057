"""Do models that know nothing of HetFSDP train under uneven plans as one process trains them?

python -m experiments.other_peoples_models.run                 an hour
python -m experiments.other_peoples_models.run --quick         one plan; keeps nothing
python -m experiments.other_peoples_models.run --only llama    what has the word in its name

Results are written case by case; what is there already is not run again without --again.  torchvision that lies in a folder of its own: TORCHVISION_FOLDER=FOLDER.
"""  # noqa: E501

import argparse
import tempfile
import time
from pathlib import Path

from experiments.common.machine import Environment
from experiments.common.results import (
    console,
    parser_of,
    read_csv,
    write_csv,
    write_results_block,
)
from experiments.other_peoples_models.cases import Runner
from experiments.other_peoples_models.families import (
    DOCUMENTED,
    FAMILIES,
    WAYS,
    cases_of,
    ways_of,
)
from experiments.other_peoples_models.plans import ALONE, APART, PLANS
from experiments.other_peoples_models.records import Case, Row
from experiments.other_peoples_models.report import as_markdown
from experiments.other_peoples_models.warming import import_for

HERE = Path(__file__).parent


def main() -> None:
    """Run what is asked for, print, and keep."""
    options = _options()
    environment = Environment.here()
    console.print(environment.as_markdown())
    cases = [] if options.report else _chosen(options)
    path = options.results or (None if options.quick else HERE / "results.csv")
    rows = {row.key: row for row in (read_csv(path, Row) if path and path.exists() else [])}
    if options.again:
        rows = {key: row for key, row in rows.items() if key not in {c.key for c in cases}}
    missing = [case for case in cases if case.key not in rows]
    console.print(f"{len(cases)} cases, {len(cases) - len(missing)} of them there already")
    import_for([FAMILIES[name] for name in dict.fromkeys(case.family for case in missing)])
    started_at_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), environment.commit)
        for number, case in enumerate(missing, 1):
            row = runner.run(case)
            rows[row.key] = row
            say(row, number, len(missing), time.monotonic() - started_at_s)
            if path is not None:
                write_csv(path, _in_order(rows))
    keys = rows.keys() if options.report else {case.key for case in cases}
    text = as_markdown([row for row in _in_order(rows) if row.key in keys])
    console.print(text, markup=False)
    if path == HERE / "results.csv":
        everything = as_markdown(_in_order(rows))
        write_results_block(HERE / "README.md", f"{environment.as_markdown()}\n\n{everything}")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "one plan; keeps nothing")
    parser.add_argument("--only", action="append", metavar="WORD", help="of family names")
    parser.add_argument("--way", action="append", choices=WAYS, help="of calling")
    parser.add_argument("--case", nargs="+", metavar="FAMILY/WAY", help="only these")
    parser.add_argument("--plan", choices=PLANS, help="only this one")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--report", action="store_true", help="tables of what is there")
    parser.add_argument("--results", type=Path, metavar="FILE", help="written instead")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Case]:
    words = [word.lower() for word in options.only or [""]]
    pairs = [case.split("/") for case in options.case or ()] or [
        (name, way)
        for name, family in FAMILIES.items()
        if any(word in name.lower() for word in words)
        for way in options.way or ways_of(family)
    ]
    cases = [
        case
        for family, way in pairs
        for case in cases_of(FAMILIES[family], way, is_quick=options.quick)
    ]
    if options.plan:
        cases = [case for case in cases if case.plan == options.plan]
    return cases if options.case else sorted(cases, key=_turn)


def _turn(case: Case) -> tuple[int, int]:
    """First the documented call of all families, then other ways in turns, then other plans."""
    if case.plan != APART.name or case.way == DOCUMENTED.name:
        return {APART.name: 0, ALONE.name: 1}.get(case.plan, 3), 0
    family, way = list(FAMILIES).index(case.family), list(WAYS).index(case.way)
    return 2, (family + way) % len(WAYS)


def _in_order(rows: dict[tuple[str, str, str], Row]) -> list[Row]:
    names, ways, plans = list(FAMILIES), list(WAYS), list(PLANS)

    def place(row: Row) -> tuple[int, int, int]:
        return names.index(row.family), ways.index(row.way), plans.index(row.plan)

    return sorted(rows.values(), key=place)


def say(row: Row, number: int, count: int, seconds: float) -> None:
    figures = f"{row.loss_error:.0e} {row.grad_error:.0e} {row.state_error:.0e}"
    line = (
        f"{number:4d}/{count} {seconds:5.0f} s  {row.family:24} {row.way:12} "
        f"{row.plan:20} {row.verdict:8} {figures} (noise {row.noise:.0e})"
    )
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    if row.text:
        console.print(f"       {row.text[:400]}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
