"""Do models that know nothing of HetFSDP train under uneven plans as one process trains them?

python -m experiments.other_peoples_models.run                 an hour
python -m experiments.other_peoples_models.run --quick         one plan; keeps nothing
python -m experiments.other_peoples_models.run --only llama    what has the word in its name
python -m experiments.other_peoples_models.run --stages        in stages, to stages.csv
python -m experiments.other_peoples_models.run --tokens        tiles and a group, to tokens.csv

Results are written case by case; what is there already is not run again without --again.
torchvision that lies in a folder of its own: TORCHVISION_FOLDER=FOLDER.

In stages each family is cut before every unit, in two stages of 1 + 1, 2 + 1 and 1 + 2 ranks
(of which the last only stores) for the families of ``FIRST``, in turns for the others, and in
three.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from experiments.common.machine import Environment
from experiments.common.results import (
    console,
    parser_of,
    read_csv,
    write_csv,
    write_results_block,
)
from experiments.other_peoples_models import calls
from experiments.other_peoples_models.cases import Runner
from experiments.other_peoples_models.families import (
    DOCUMENTED,
    FAMILIES,
    STAGED,
    WAYS,
    cases_by_tokens,
    cases_of,
    ways_of,
)
from experiments.other_peoples_models.forks import import_for
from experiments.other_peoples_models.plans import (
    ALONE,
    APART,
    BY_TOKENS,
    PLANS,
    SHARED,
    STAGES,
    in_stages,
)
from experiments.other_peoples_models.records import Case, Named, Row
from experiments.other_peoples_models.report import as_markdown

HERE = Path(__file__).parent
FIRST = ("Llama", "Llama, tied", "Qwen2", "GPT-2", "BERT", "ViT")


def main() -> None:
    """Run what is asked for, print, and keep."""
    options = _options()
    environment = Environment.here()
    console.print(environment.as_markdown())
    name = "stages.csv" if options.stages else "tokens.csv" if options.tokens else "results.csv"
    path = options.results or (None if options.quick else HERE / name)
    rows = {row.key: row for row in (read_csv(path, Row) if path and path.exists() else [])}
    pairs = _pairs(options)
    import_for([FAMILIES[family] for family in dict.fromkeys(family for family, _ in pairs)])
    drawn = _staged if options.stages else _by_tokens if options.tokens else _flat
    cases = [*drawn(pairs, options)]
    if options.again:
        asked = {case.key for case, _ in cases}
        rows = {key: row for key, row in rows.items() if key not in asked}
    missing = [each for each in cases if each[0].key not in rows]
    console.print(f"{len(cases)} cases, {len(cases) - len(missing)} of them there already")
    started_at_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), environment.commit)
        for number, (case, named) in enumerate(missing, 1):
            row = rows[case.key] = runner.run(case, named)
            _say(row, number, len(missing), time.monotonic() - started_at_s)
            if path is not None:
                write_csv(path, _in_order(rows))
    keys = {case.key for case, _ in cases}
    text = as_markdown([row for row in _in_order(rows) if row.key in keys])
    console.print(text, markup=False)
    if path == HERE / "results.csv":
        everything = as_markdown(_in_order(rows))
        write_results_block(HERE / "README.md", f"{environment.as_markdown()}\n\n{everything}")


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "one plan or cut; keeps nothing")
    parser.add_argument("--only", action="append", metavar="WORD", help="of family names")
    parser.add_argument("--way", action="append", choices=WAYS, help="of calling")
    parser.add_argument("--case", nargs="+", metavar="FAMILY/WAY", help="only these")
    parser.add_argument("--plan", choices=PLANS, help="only this one")
    parser.add_argument("--stages", action="store_true", help="in stages")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--tokens", action="store_true", help="in tiles, and a shared sample")
    parser.add_argument("--results", type=Path, metavar="FILE", help="written instead")
    return parser.parse_args()


def _pairs(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Families and ways of calling that are asked for."""
    words = [word.lower() for word in options.only or [""]]
    if options.case:
        return [tuple(case.split("/")) for case in options.case]
    return [
        (name, way)
        for name, family in FAMILIES.items()
        if any(word in name.lower() for word in words)
        and (family.source == "transformers" or not options.stages)
        for way in options.way or (STAGED if options.stages else ways_of(family))
        if family.lora_targets or "lora" not in way
    ]


def _flat(
    pairs: list[tuple[str, str]], options: argparse.Namespace
) -> Iterator[tuple[Case, Named]]:
    """First the documented call of all families, then other ways in turns, then other plans."""
    cases = [
        case
        for family, way in pairs
        for case in cases_of(FAMILIES[family], way, is_quick=options.quick)
        if options.plan in (None, case.plan)
    ]

    def turn(case: Case) -> tuple[int, int]:
        if case.plan != APART.name or case.way == DOCUMENTED.name:
            return {APART.name: 0, ALONE.name: 1}.get(case.plan, 3), 0
        family, way = list(FAMILIES).index(case.family), list(WAYS).index(case.way)
        return 2, (family + way) % len(WAYS)

    for case in cases if options.case else sorted(cases, key=turn):
        yield case, PLANS[case.plan]


def _by_tokens(
    pairs: list[tuple[str, str]], options: argparse.Namespace
) -> Iterator[tuple[Case, Named]]:
    """Families in tiles, and of which two ranks share samples."""
    for family in dict.fromkeys(family for family, _ in pairs):
        for case in cases_by_tokens(FAMILIES[family]):
            if not options.quick or case.plan == SHARED.name:
                yield case, BY_TOKENS[case.plan]


def _staged(
    pairs: list[tuple[str, str]], options: argparse.Namespace
) -> Iterator[tuple[Case, Named]]:
    """Families cut into stages."""
    two = [name for name in STAGES if name.count("|") == 1]
    for name, way in pairs:
        family = FAMILIES[name]
        model = calls.make_model(family, WAYS[way])
        units = [unit.fqns[0] for unit in calls.units_of(model, family, WAYS[way])]
        cuts, is_first = range(1, len(units)), name in FIRST
        found = [
            (each, (cut,)) for cut in cuts for each in (two if is_first else [two[cut % 3]])
        ]
        if is_first:
            found += [("1|1|1", pair) for pair in pairwise(cuts)]
        elif len(units) > 2:
            found.append(("1|1|1", (1, len(units) - 1)))
        for stages, places in [("2|1", (len(units) // 2,))] if options.quick else found:
            named = in_stages(stages, units, places)
            yield Case(family=name, way=way, plan=named.name), named


def _in_order(rows: dict[tuple[str, str, str], Row]) -> list[Row]:
    names, ways, plans = list(FAMILIES), list(WAYS), [*PLANS, *BY_TOKENS]

    def place(row: Row) -> tuple[int, int, int]:
        plan = plans.index(row.plan) if row.plan in plans else 0
        return names.index(row.family), ways.index(row.way), plan

    return sorted(rows.values(), key=place)


def _say(row: Row, number: int, count: int, seconds: float) -> None:
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
