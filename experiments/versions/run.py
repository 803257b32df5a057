"""Run the suite, the demo and the examples with other versions of what shardhet needs.

``tested``  what constraints.txt says
``newest``  what pip gives
``oldest``  the lower bounds of pyproject.toml

Each gets an environment of its own, made with this interpreter's ``venv`` and pip, in a folder
where they stay: a second run goes on with those that are there.
"""

import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common.machine import REPOSITORY
from experiments.common.results import (
    Page,
    markdown_table,
    parser_of,
    replace_cases,
)

HERE = Path(__file__).parent
NEEDED = re.compile(r"([\w-]+)>=([\w.]+)")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
PASSED = re.compile(r"(\d+) passed")
SHOWN = (
    *("torch", "numpy", "scipy", "PyYAML", "hydra-core", "omegaconf", "rich", "safetensors"),
    *("transformers", "accelerate", "peft", "datasets", "tokenizers", "matplotlib"),
    *("tensorboard", "triton"),
)
# Steps, checkpoints, Hugging Face, planning, training: where libraries meet.
TELLING = (
    *(
        "parity",
        "optim",
        "planner",
        "hydra_entry",
        "rounds",
        "pipelines",
        "ordinary_calls",
        "optimizers_on_rows",
    ),
    *("checkpoint", "checkpoint_fit", "hf_folder", "hf_trainer", "hf_resuming", "model_hf"),
    *("loader", "datasets", "planner_highs", "demands", "config"),
    *("train", "worker", "doctor", "imports", "quantized"),
)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not campaign and not alone")
CARDS = ("--cards", "4090 | 3090x2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The version of a package, or what a part came to, in one environment."""

    case: str  # the environment's name
    what: str
    came_to: str
    seconds: float = 0.0


def lower_bounds() -> list[str]:
    """Of each package that pyproject.toml gives one."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    needed = [*project["dependencies"], *(each for extra in extras for each in extra)]
    return [f"{name}=={least}" for name, least in NEEDED.findall("\n".join(needed))]


def environments() -> dict[str, Sequence[str]]:
    """Constraints of pip, by name."""
    tested = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {"tested": tested, "newest": [], "oldest": lower_bounds()}


def parts(*, is_quick: bool, is_whole: bool) -> dict[str, list[str]]:
    """Arguments of Python: the files of the suite that tell most, or all; demo; examples."""
    names = () if is_whole else TELLING[:4] if is_quick else TELLING
    files = [f"tests/test_{name}.py" for name in names]
    demo = ["examples/demo.py", "--out=demo", *(["--quick"] if is_quick else [])]
    programs = {
        f"examples/{p.name}": ["-m", "shardhet", "rehearse", str(p), *CARDS]
        for p in sorted((REPOSITORY / "examples").glob("*.py"))
        if p.stem != "demo"
    }
    suite = [*PYTEST, "-n", "2", "--dist", "worksteal", *files]
    return {"tests": suite, "demo": demo, **programs}


def installed(folder: Path, name: str, constraints: Sequence[str]) -> Path:
    """The environment's Python; made if it is not there."""
    place = folder / name
    python, done = place / "bin/python", place / ".installed"
    if not done.exists():
        listed = folder / f"{name}.txt"
        listed.write_text("\n".join(constraints) + "\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        pip = [python, "-m", "pip", "install", "-q", "-e", f"{REPOSITORY}[dev]"]
        subprocess.run([*pip, "-c", listed], check=True)
        done.touch()
    return python


def versions_in(python: Path, name: str) -> list[Row]:
    """Of all packages."""
    pip = [python, "-m", "pip", "list", "--format=freeze"]
    listed = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    pairs = [line.split("==") for line in listed.splitlines() if "==" in line]
    return [Row(case=name, what=package, came_to=version) for package, version in pairs]


def tried(python: Path, name: str, part: str, arguments: Sequence[str], folder: Path) -> Row:
    """Run it, and once more, alone, the tests that failed: on a busy machine they run out of
    time.  What it prints stays in a file.
    """
    start_s = time.perf_counter()
    returncode, text = _run(python, name, part, arguments, folder)
    numbers = [f"{PASSED.findall(text)[-1]} passed"] if PASSED.search(text) else []
    if failed := FAILED.findall(text):
        returncode, text = _run(python, name, "again", [*PYTEST, *failed], folder)
        numbers += [f"{number} when run again" for number in PASSED.findall(text)[-1:]]
        failed = FAILED.findall(text)
    told = [f" ({', '.join(numbers)})"] if numbers else []
    told += [": " + (", ".join(failed) or "exit")] if returncode else []
    return Row(
        case=name,
        what=part,
        came_to="".join(["FAIL" if returncode else "PASS", *told]),
        seconds=round(time.perf_counter() - start_s, 1),
    )


def _run(
    python: Path, name: str, part: str, arguments: Sequence[str], folder: Path
) -> tuple[int, str]:
    """How it ended, and what it printed."""
    log = folder / f"{name}-{Path(part).stem}.log"
    place = REPOSITORY if part in ("tests", "again") else log.with_suffix("")
    place.mkdir(exist_ok=True)
    with log.open("w") as file:
        ended = subprocess.run(
            [python, *arguments],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return ended.returncode, log.read_text()


def table(rows: Sequence[Row]) -> str:
    """Versions, and what each part came to, by environment."""
    names = list(dict.fromkeys(each.case for each in rows))
    found = {(each.case, each.what): each.came_to for each in rows}
    shown = [*SHOWN, *dict.fromkeys(each.what for each in rows if each.seconds)]
    cells = [[what, *(found.get((name, what), "-") for name in names)] for what in shown]
    return markdown_table(["", *names], cells)


def main() -> None:
    """Make environments, run all parts in each, print, and keep."""
    parser = parser_of(__doc__, "a small part of the suite; keeps nothing")
    parser.add_argument("--whole", action="store_true", help="the whole suite")
    parser.add_argument("--only", choices=environments(), help="in place of its rows")
    parser.add_argument("--folder", type=Path, required=True, help="where environments stay")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    page, rows = Page(HERE, is_kept=not options.quick), list[Row]()
    for name, constraints in environments().items():
        if options.only in (None, name):
            python = installed(folder, name, constraints)
            rows += versions_in(python, name)
            asked = parts(is_quick=options.quick, is_whole=options.whole)
            rows += [tried(python, name, *each, folder) for each in asked.items()]
    if page.is_kept:
        rows = replace_cases(HERE / "results.csv", rows, Row, list(environments()))
    page.tell(table(rows))
    page.write_block()


if __name__ == "__main__":
    main()
