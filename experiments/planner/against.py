"""How long ``shardhet plan`` takes from Enter, beside an earlier version.

    OMP_NUM_THREADS=1 python -m experiments.planner.against [--before COMMIT] [--runs 7]

Both versions plan the same problem from the shell in turns, start-up included: user seconds of
the process and its children.  The earlier one knows no rounds, so the present one plans twice:
by default, and with ``max_rounds=1``.  Everything by default comes first (what limits the plan,
simpler plans, parts of the cluster), then the plan alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from experiments.common.machine import REPOSITORY, Environment
from experiments.common.results import write_csv
from experiments.planner.large_clusters import EIGHT_KINDS, write_eight_kinds
from experiments.planner.shell import EVERYTHING, PLAN_ALONE
from shardhet.records.kinds import built_in_kinds

HERE = Path(__file__).parent
BEFORE = "3049c5d"  # the version that the bar is set by
BAR = 1.3
ONE_ROUND = "max_rounds=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command."""

    devices: int
    is_everything: bool  # else the plan alone
    version: str  # the earlier one, this one, this one in one round
    run: int
    user_s: float


def checked_out(commit: str, folder: Path) -> Path:
    """The sources of a commit, as they were."""
    archive = ["git", "-C", str(REPOSITORY), "archive", commit, "shardhet", "conf"]
    packed = subprocess.run(archive, stdout=subprocess.PIPE, check=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
    return folder


def keys_of(sources: Path, is_everything: bool) -> Sequence[str]:
    """Those with which these sources show everything, or the plan alone."""
    if "what_if_s" in (sources / "conf/planner.yaml").read_text(encoding="utf-8"):
        return EVERYTHING if is_everything else PLAN_ALONE
    return () if is_everything else ("explain=false", "baselines=false", "leave_out=never")


def user_s(arguments: list[str], sources: Path, folder: Path) -> float:
    """User seconds of ``shardhet plan`` of these sources."""
    environment = os.environ | {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardhet.apps.main", "plan", *arguments]
    with tempfile.TemporaryFile() as output:
        done = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(done.pid, 0)
        done.returncode = os.waitstatus_to_exitcode(status)
        if done.returncode:
            output.seek(0)
            raise RuntimeError(output.read().decode())
    return usage.ru_utime


def cases(folder: Path) -> Iterator[tuple[int, list[str]]]:
    """Devices and arguments: two described clusters, then made-up ones of eight kinds."""
    yield 8, ["cluster=l4_a6000_p40_p100", "model=llama_1b", "global_batch_size=32"]
    yield 64, ["cluster=a10g_v100_t4_64", "model=llama_7b", "global_batch_size=256"]
    for size in (256, 1024, 16384):
        path = folder / f"eight_kinds_{size}.yaml"
        write_eight_kinds(path, size)
        with path.open("a") as file:  # the earlier version has no kinds of its own
            file.write("kinds:\n" + "\n".join(map(described, EIGHT_KINDS)) + "\n")
        yield size, [f"cluster_file={path}", "model=llama_7b", f"global_batch_size={4 * size}"]


def described(name: str) -> str:
    """A kind as one line of a description."""
    kind = built_in_kinds()[name]
    peaks = ", ".join(f"{dtype}: {peak:.6e}" for dtype, peak in kind.peak_flops_per_s)
    return (
        f"- {{kind: {name}, memory_capacity_bytes: {kind.memory_capacity_bytes}, "
        f"memory_bandwidth_bytes_per_s: {kind.memory_bandwidth_bytes_per_s:.6e}, "
        f'peak_flops_per_s: {{{peaks}}}, source: "as built in"}}'
    )


def told(rows: list[Row], before: str) -> str:
    """A line of the table: medians, and how they compare."""
    medians = {
        version: median(row.user_s for row in rows if row.version == version)
        for version in (before, "now", ONE_ROUND)
    }
    ratios = [medians[version] / medians[before] for version in ("now", ONE_ROUND)]
    seconds = " | ".join(f"{each:.2f}" for each in medians.values())
    what = "everything" if rows[0].is_everything else "the plan alone"
    met = ["met" if ratio <= BAR else "NOT MET" for ratio in ratios]
    compared = " | ".join(f"{r:.2f} ({m})" for r, m in zip(ratios, met, strict=True))
    return f"| {rows[0].devices:,} | {what} | {seconds} | {compared} |"


def main() -> None:
    """All cases; every run to against.csv, medians to the screen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", default=BEFORE)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--devices", type=int, nargs="*", help="only of these sizes")
    asked = parser.parse_args()
    rows: list[Row] = []
    titles = ["devices", "", f"{asked.before}, s", "now, s", f"{ONE_ROUND}, s", "now / before"]
    print(f"| {' | '.join([*titles, 'one round / before'])} |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = checked_out(asked.before, folder / "before")
        versions = (
            (asked.before, before, []),
            ("now", REPOSITORY, []),
            (ONE_ROUND, REPOSITORY, [ONE_ROUND]),
        )
        for size, arguments in cases(folder):
            if asked.devices and size not in asked.devices:
                continue
            for is_everything in (True, False):
                of_case = []
                for run in range(-1, asked.runs):  # the first fills caches
                    for version, sources, more in versions:
                        keys = [*arguments, *keys_of(sources, is_everything), *more]
                        seconds = user_s(keys, sources, folder)
                        of_case.append(
                            Row(
                                devices=size,
                                is_everything=is_everything,
                                version=version,
                                run=run,
                                user_s=seconds,
                            )
                        )
                of_case = [row for row in of_case if row.run >= 0]
                rows += of_case
                print(told(of_case, asked.before), flush=True)
    if not asked.devices:
        write_csv(HERE / "against.csv", rows)
    print(Environment.here().as_markdown("user seconds, start-up included"))


if __name__ == "__main__":
    main()
