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
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.common.machine import REPOSITORY
from experiments.common.results import (
    Page,
    markdown_table,
    parse_cases,
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
        "hydra_door",
        "rounds",
        "pipelines",
        "ordinary_calls",
        "optimizers_on_rows",
    ),
    *("checkpoint", "checkpoint_fit", "hf_folder", "hf_trainer", "hf_resuming", "model_hf"),
    *("loader", "datasets", "planner_highs", "objectives", "config"),
    *("train", "worker", "doctor", "imports", "quantized"),
)
PYTEST = ("-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider")
CARDS = ("--cards", "4090 | 3090x2")


@dataclass(frozen=True, slots=True)
class Versions:
    """An environment."""

    name: str
    constraints: Sequence[str]  # of pip


@dataclass(frozen=True, slots=True)
class Part:
    """What is run in each environment."""

    name: str
    arguments: Sequence[str]  # of Python


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a part came to."""

    case: str  # the environment's name
    part: str
    returncode: int
    passed: int  # tests
    again: int  # of them, once they ran again, alone
    failed: str  # tests
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A version that was installed."""

    case: str  # the environment's name
    package: str
    version: str


def lower_bounds() -> list[str]:
    """Of each package that pyproject.toml gives one."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    needed = [*project["dependencies"], *(each for extra in extras for each in extra)]
    return [f"{name}=={least}" for name, least in NEEDED.findall("\n".join(needed))]


def environments() -> list[Versions]:
    """The three."""
    tested = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return [
        Versions("tested", tested),
        Versions("newest", []),
        Versions("oldest", lower_bounds()),
    ]


def parts(*, is_quick: bool, is_whole: bool) -> list[Part]:
    """The files of the suite that tell most, or all; the demo; loops of one's own."""
    names = () if is_whole else TELLING[:4] if is_quick else TELLING
    files = [f"tests/test_{name}.py" for name in names]
    suite = [*PYTEST, "-m", "not campaign and not alone", *files]
    examples = sorted((REPOSITORY / "examples").glob("*.py"))
    programs = [
        Part(f"examples/{p.name}", ["-m", "shardhet", "rehearse", str(p), *CARDS])
        for p in examples
    ]
    demo = ["-m", "shardhet.extras.demo", "--out=demo", *(["--quick"] if is_quick else [])]
    return [Part("tests", suite), Part("demo", demo), *programs]


def installed(folder: Path, versions: Versions) -> Path:
    """The environment's Python; made if it is not there."""
    place = folder / versions.name
    python, done = place / "bin/python", place / ".installed"
    if not done.exists():
        constraints = folder / f"{versions.name}.txt"
        constraints.write_text("\n".join(versions.constraints) + "\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        pip = [python, "-m", "pip", "install", "-q", "-e", f"{REPOSITORY}[dev]"]
        subprocess.run([*pip, "-c", constraints], check=True)
        done.touch()
    return python


def versions_in(python: Path, name: str) -> list[Installed]:
    """Of all packages."""
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"],
        check=True,
        capture_output=True,
        text=True,
    )
    pairs = [line.split("==") for line in listed.stdout.splitlines() if "==" in line]
    return [Installed(case=name, package=p, version=v) for p, v in pairs]


def tried(python: Path, name: str, part: Part, folder: Path) -> Verdict:
    """Run it; what it prints stays in a file."""
    start_s = time.perf_counter()
    returncode, text = _run(python, name, part.name, part.arguments, folder)
    return Verdict(
        case=name,
        part=part.name,
        returncode=returncode,
        passed=_num_passed(text),
        again=0,
        failed="\n".join(FAILED.findall(text)),
        seconds=round(time.perf_counter() - start_s, 1),
    )


def settled(python: Path, verdict: Verdict, folder: Path) -> Verdict:
    """After what failed has run again, alone: on a busy machine tests run out of time."""
    if not verdict.failed:
        return verdict
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *verdict.failed.splitlines()]
    returncode, text = _run(python, verdict.case, "again", arguments, folder)
    return replace(
        verdict,
        returncode=returncode,
        passed=verdict.passed + _num_passed(text),
        again=_num_passed(text),
        failed="\n".join(FAILED.findall(text)),
    )


def _run(
    python: Path, name: str, part: str, arguments: Sequence[str], folder: Path
) -> tuple[int, str]:
    """How it ended, and what it printed."""
    is_of_tests = part in ("tests", "again")
    log = folder / f"{name}-{Path(part).stem}.log"
    place = REPOSITORY if is_of_tests else log.with_suffix("")
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


def _num_passed(text: str) -> int:
    passed = PASSED.findall(text)
    return int(passed[-1]) if passed else 0


def tables(verdicts: Sequence[Verdict], versions: Sequence[Installed]) -> str:
    """Versions, and what each part came to, by environment."""
    names = list(dict.fromkeys(each.case for each in verdicts))
    version_of = {(each.case, each.package): each.version for each in versions}
    verdict_of = {(each.case, each.part): each for each in verdicts}
    rows = [
        [package, *(version_of.get((name, package), "-") for name in names)]
        for package in SHOWN
    ]
    rows += [
        [part, *(_cell(verdict_of.get((name, part))) for name in names)]
        for part in dict.fromkeys(each.part for each in verdicts)
    ]
    return markdown_table(["", *names], rows)


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    failed = verdict.failed.splitlines()
    again = f", {verdict.again} when run again" if verdict.again else ""
    counts = f" ({verdict.passed} passed{again})" if verdict.passed else ""
    if not verdict.returncode:
        return f"PASS{counts}"
    return f"FAIL{counts}: {', '.join(each.rpartition('::')[2] for each in failed) or 'exit'}"


def main() -> None:
    """Make environments, run all parts in each, print, and keep."""
    parser = parser_of(__doc__, "a small part of the suite; keeps nothing")
    parser.add_argument("--whole", action="store_true", help="the whole suite")
    parser.add_argument("--folder", type=Path, required=True, help="where environments stay")
    options = parse_cases(parser, environments())
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(HERE, is_kept=not options.quick)
    verdicts, versions = list[Verdict](), list[Installed]()
    for each in options.cases:
        python = installed(folder, each)
        versions += versions_in(python, each.name)
        verdicts += [
            settled(python, tried(python, each.name, part, folder), folder)
            for part in parts(is_quick=options.quick, is_whole=options.whole)
        ]
    if page.is_kept:
        order = [each.name for each in environments()]
        verdicts = replace_cases(HERE / "results.csv", verdicts, Verdict, order)
        versions = replace_cases(HERE / "versions.csv", versions, Installed, order)
    page.tell(tables(verdicts, versions))
    page.write_block()


if __name__ == "__main__":
    main()
