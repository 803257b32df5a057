"""Do models that know nothing of HetFSDP train in stages as one process trains them?

python -m experiments.other_peoples_models.in_stages                 families of transformers
python -m experiments.other_peoples_models.in_stages --quick         each at one cut; keeps nothing
python -m experiments.other_peoples_models.in_stages --only llama    what has the word in its name

Each is cut before every unit, in two stages of 1 + 1, 2 + 1 and 1 + 2 ranks (of which the last
only stores) for the families of ``FIRST``, in turns for the others, and in three stages.
"""  # noqa: E501

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from experiments.common.machine import Environment
from experiments.common.results import console, parser_of, write_csv
from experiments.other_peoples_models import calls
from experiments.other_peoples_models.cases import Runner
from experiments.other_peoples_models.families import FAMILIES, WAYS
from experiments.other_peoples_models.plans import STAGES, in_stages
from experiments.other_peoples_models.records import Case, Family, Named, Way
from experiments.other_peoples_models.run import say
from experiments.other_peoples_models.warming import import_for

HERE = Path(__file__).parent
FIRST = ("Llama", "Llama, tied", "Qwen2", "GPT-2", "BERT", "ViT")


def main() -> None:
    """Run what is asked for, print, and keep."""
    options = _options()
    environment = Environment.here()
    console.print(environment.as_markdown())
    words = [word.lower() for word in options.only or [""]]
    families = options.family and [FAMILIES[name] for name in options.family]
    families = families or [
        family
        for family in FAMILIES.values()
        if family.source == "transformers" and any(w in family.name.lower() for w in words)
    ]
    import_for(families)
    path = options.results or (None if options.quick else HERE / "stages.csv")
    rows = []
    started_at_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), environment.commit)
        for name in options.way or ["stages", "stages, lora"]:
            way = WAYS[name]
            for family in families:
                if way.has_lora and not family.lora_targets:
                    continue
                for named in _plans(family, way, is_quick=options.quick):
                    case = Case(family=family.name, way=name, plan=named.name)
                    rows.append(runner.run_under(named, case))
                    say(rows[-1], len(rows), 0, time.monotonic() - started_at_s)
                    if path is not None:
                        write_csv(path, rows)
    for verdict in dict.fromkeys(row.verdict for row in rows):
        own = [row for row in rows if row.verdict == verdict]
        names = ", ".join(dict.fromkeys(row.family for row in own))
        console.print(f"{verdict}: {len(own)} cases of {names}", markup=False)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "each at one cut; keeps nothing")
    parser.add_argument("--only", action="append", metavar="WORD", help="of family names")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="exactly this one")
    parser.add_argument("--way", action="append", choices=("stages", "stages, lora"))
    parser.add_argument("--results", type=Path, metavar="FILE", help="written instead")
    return parser.parse_args()


def _plans(family: Family, way: Way, *, is_quick: bool) -> Iterator[Named]:
    model = calls.make_model(family, way)
    units = [unit.fqns[0] for unit in calls.units_of(model, family, way)]
    two = [name for name in STAGES if name.count("|") == 1]
    cuts = range(1, len(units))
    if is_quick:
        yield in_stages("2|1", units, [len(units) // 2])
        return
    for cut in cuts:
        for name in two if family.name in FIRST else [two[cut % len(two)]]:
            yield in_stages(name, units, [cut])
    for pair in pairwise(cuts):
        if family.name in FIRST:
            yield in_stages("1|1|1", units, pair)
    if family.name not in FIRST and len(units) > 2:
        yield in_stages("1|1|1", units, [1, len(units) - 1])


if __name__ == "__main__":
    main()
