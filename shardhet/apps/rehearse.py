"""``shardhet rehearse PROGRAM --cards CARDS``: run a program on CPUs, as it would run on cards.

One process stands in for each device, and computes and stores what that would.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from shardhet.apps.launch.crash import save_failure
from shardhet.apps.launch.launch import start_ranks
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.comm.members import REHEARSE
from shardhet.comm.peers import failure_of
from shardhet.records.cluster import Cluster
from shardhet.records.kinds import described_cluster
from shardhet.records.plan import Plan


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program on every rank; SystemExit if one fails."""
    parser = argparse.ArgumentParser(
        prog="shardhet rehearse",
        description="Run a program that uses HetFSDP as it is, on this machine's CPU: one "
        "process for each device. What is not known here is passed on to it.",
        allow_abbrev=False,
    )
    parser.add_argument("program", type=Path, help="a Python file")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "--plan", type=Path, help="the plan.json that it follows, and plan_for returns"
    )
    either.add_argument(
        "--cards", help="as '4090 | 3090x2', or a description: plan_for plans for these"
    )
    given, passed_on = parser.parse_known_args(arguments)
    try:
        if given.plan is None:
            rehearsed = given.cards
            world_size = Cluster.named(described_cluster(given.cards)).world_size
        else:
            rehearsed = str(given.plan.resolve())
            world_size = Plan.load(given.plan).world_size
    except (OSError, ValueError) as error:
        parser.error(f"--{'cards' if given.plan is None else 'plan'}: {error}")
    if not given.program.is_file():
        parser.error(f"{given.program} is not a file. Give the Python file to run.")
    # Programs that ask for an accelerator take the CPU instead.
    os.environ |= {REHEARSE: rehearsed, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    with TemporaryDirectory() as folder:
        start_ranks(
            RunFolder(Path(folder)),
            world_size,
            worker_module=__name__,
            arguments=(str(given.program), *passed_on),
        )


def run_program() -> None:
    """Run the program as ``python PROGRAM`` does, in one rank."""
    _, folder, *sys.argv = sys.argv
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        rank = int(os.environ["RANK"])
        failure = failure_of(error, rank=rank, name=f"rank {rank} (cpu)")
        save_failure(failure, RunFolder(Path(folder)))
        raise


if __name__ == "__main__":
    run_program()
