"""Does this version start and step as fast as an older one?

python -m experiments.older_tree.run --old FOLDER      15 minutes
python -m experiments.older_tree.run --old FOLDER --quick

FOLDER is a tree of the older version: git worktree add FOLDER COMMIT.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.machine import REPOSITORY, commit_of
from experiments.common.results import (
    BAR_HEADER,
    Bar,
    Page,
    Spread,
    markdown_table,
    parse_cases,
    parser_of,
)
from experiments.older_tree.cases import CASES, Case

HERE = Path(__file__).parent
NUM_ROUNDS = 20
SLOWER_AT_MOST = 1.03
START_AT_MOST_S = 2.0
DEEP = "32 blocks, 2 ranks, 2 x 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A turn of one version; round -1 is the start."""

    case: str
    version: str  # "old" or "new"
    round: int
    seconds: float  # of a step on the rank where it took longest; of the start


class World:
    """The ranks of one version, which wait while it is not their turn."""

    def __init__(self, tree: Path, case: Case, store: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, HERE / "rank.py", "--case", case.name, "--rank", str(rank),
                 "--store", store],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=HERE,
            )
            for rank in range(case.plan.world_size)
        ]  # fmt: skip

    def ask(self, command: str) -> list[dict[str, Any]]:
        """All ranks' answers."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{command}\n")
            rank.stdin.flush()
        answers = []
        for rank in self._ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise RuntimeError("a rank has ended; its error is above.")
            answers.append(json.loads(line))
        return answers

    def end(self) -> None:
        """Let all ranks end."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait(timeout=60)


def measure(case: Case, trees: dict[str, Path], num_rounds: int) -> list[Sample]:
    """Both versions in turns, there and back again."""
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        worlds = {
            version: World(tree, case, Path(folder) / version)
            for version, tree in trees.items()
        }
        losses = {}
        for version, world in worlds.items():
            answers = world.ask("start")
            losses[version] = answers[0]["loss"]
            seconds = max(each["start_s"] for each in answers)
            samples.append(Sample(case=case.name, version=version, round=-1, seconds=seconds))
        if abs(losses["old"] / losses["new"] - 1) > 1e-5:
            raise RuntimeError(f"{case.name}: the versions do not train the same: {losses}.")
        for turn in range(-1, num_rounds):  # the first one warms up
            for version in trees if turn % 2 else reversed(trees):
                by_rank = [each["steps_s"] for each in worlds[version].ask("turn")]
                steps_s = [max(step) for step in zip(*by_rank, strict=True)]
                if turn >= 0:
                    mean_s = sum(steps_s) / len(steps_s)
                    samples.append(
                        Sample(case=case.name, version=version, round=turn, seconds=mean_s)
                    )
        for world in worlds.values():
            world.end()
    return samples


def as_markdown(samples: list[Sample]) -> str:
    """Tables of steps and starts, and whether the bars hold."""
    rows, bars = [], []
    for name in dict.fromkeys(sample.case for sample in samples):
        of_case = [sample for sample in samples if sample.case == name]
        old, new = (
            [s.seconds for s in of_case if s.version == version and s.round >= 0]
            for version in ("old", "new")
        )
        starts = {s.version: s.seconds for s in of_case if s.round < 0}
        ratio = Spread.of([b / a for a, b in zip(old, new, strict=True)])
        rows.append(
            [
                name,
                Spread.of(old).cell(1, scale=1e3),
                Spread.of(new).cell(1, scale=1e3),
                ratio.cell(3),
                str(len(old)),
                f"{starts['old']:.2f}",
                f"{starts['new']:.2f}",
            ]
        )
        bars.append(Bar(claim=f"{name}: step", measured=ratio.median, at_most=SLOWER_AT_MOST))
        if name == DEEP:
            longer_s = starts["new"] - starts["old"]
            claim = f"{name}: seconds longer at the start"
            bars.append(Bar(claim=claim, measured=longer_s, at_most=START_AT_MOST_S))
    header = ["case", "step ms, old", "new", "new / old", "rounds", "start s, old", "new"]
    verdicts = markdown_table(BAR_HEADER, [bar.cells for bar in bars])
    return f"{markdown_table(header, rows)}\n\n{verdicts}"


def main() -> None:
    """Measure, print, and keep."""
    parser = parser_of(__doc__, "two rounds; keeps nothing")
    parser.add_argument("--old", type=Path, required=True, metavar="FOLDER", help="its tree")
    options = parse_cases(parser, CASES.values())
    trees = {"old": options.old.resolve(), "new": REPOSITORY}
    page = Page(HERE, is_kept=not (options.quick or options.only))
    page.tell(f"Old: commit `{commit_of(trees['old'])}`.")
    samples = []
    for case in options.cases:
        samples += measure(case, trees, 2 if options.quick else NUM_ROUNDS)
    page.tell(as_markdown(samples))
    page.keep({"results.csv": samples})


if __name__ == "__main__":
    main()
