"""Training from a command line: one run folder, whoever starts the ranks; a panel at worst."""

import json
import signal
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardhet.records.plan import Plan
from tests.programs import FEW_TEXTS, SHARDHET, SMALL_MODEL, TORCHRUN, run, start

FEW_STEPS = ("debug=quick", "data.num_eval_samples=2")
QUICK = (*FEW_STEPS, *FEW_TEXTS)
SMALL = (*SMALL_MODEL, *QUICK)
ALONE = (*SHARDHET, "train")

# Put on the path of all ranks: makes one of them fail in its second step.
FAILING_RANK = """
import os

if os.environ.get("RANK") == "1":
    import shardhet.training.trainer

    take_step = shardhet.training.trainer.Trainer.train_step

    def fail(trainer, **options):
        if trainer.model.step == 1:
            {failure}
        return take_step(trainer, **options)

    shardhet.training.trainer.Trainer.train_step = fail
"""


def free_port() -> int:
    """One that the system has just given out, and so gives nobody else soon."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def run_dirs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "runs").iterdir())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


def losses(run_dir: Path) -> list[float]:
    return [entry["loss"] for entry in metrics(run_dir) if "loss" in entry]


def test_a_run_leaves_one_complete_folder(tmp_path: Path) -> None:
    keys = (*SMALL_MODEL, *FEW_STEPS, "optim.lr=1e-3")
    done = run([*ALONE, "experiment=demo", *keys], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    [run_dir] = run_dirs(tmp_path)
    names = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    assert names == {
        "config.yaml",
        "end.json",
        "lock",
        "run.json",
        "plan.json",
        "devices.json",
        "metrics.jsonl",
        "logs/config.yaml",
        "logs/run.json",
        *(f"logs/rank{rank}.log" for rank in range(4)),
    }
    assert Plan.load(run_dir / "plan.json").world_size == 4
    about = json.loads((run_dir / "run.json").read_text())
    assert about["versions"]["torch"]
    devices = json.loads((run_dir / "devices.json").read_text())
    assert [each["kind"].split()[1] for each in devices] == ["big", "cramped", "slow", "store"]
    assert about["command_line"][1] == "experiment=demo"
    entries = metrics(run_dir)
    assert len(losses(run_dir)) == 5
    assert "held_out_bits_per_byte" in entries[-1]
    assert 0 < entries[1]["device0/busy_share"] < 1
    assert "step     5 of 5" in done.stdout
    assert f"written to {run_dir}" in done.stdout


def test_torchrun_is_the_same_program(tmp_path: Path) -> None:
    torchrun = [*TORCHRUN, "--nproc-per-node=2", "-m", "shardhet.apps.train", *SMALL]
    done = run(torchrun, tmp_path)
    assert done.returncode == 0, done.stderr
    [run_dir] = run_dirs(tmp_path)
    done = run([*ALONE, *SMALL, f"run_dir={tmp_path}/alone"], tmp_path)  # one rank, even so
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(run_dir), losses(tmp_path / "alone"), rtol=1e-5)


@pytest.mark.campaign  # tests of folders have it in small
def test_two_agents_with_unlike_numbers_of_ranks_share_one_folder(tmp_path: Path) -> None:
    port = free_port()
    agents = [
        start(
            [
                *TORCHRUN,
                "--nnodes=2",
                f"--nproc-per-node={nproc}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=localhost:{port}",
                "--local-addr=localhost",
                "-m",
                "shardhet.apps.train",
                *SMALL,
            ],
            tmp_path,
        )
        for nproc in (1, 3)
    ]
    outputs = [agent.communicate(timeout=100) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    [run_dir] = run_dirs(tmp_path)
    assert len(losses(run_dir)) == 5
    assert len(list((run_dir / "logs").glob("rank*.log"))) == 4


@pytest.mark.campaign  # four launches
def test_a_sweep_is_one_run_per_job(tmp_path: Path) -> None:
    done = run([*ALONE, "-m", "optim.lr=1e-3,1e-2", "cluster.num_ranks=1", *SMALL], tmp_path)
    assert done.returncode == 0, done.stderr
    [sweep_dir] = run_dirs(tmp_path)
    curves = [losses(sweep_dir / job) for job in ("0", "1")]
    assert curves[0][0] == curves[1][0]
    assert curves[0][-1] != curves[1][-1]


def test_a_sweep_may_be_handed_to_submitit(tmp_path: Path) -> None:
    pytest.importorskip(
        "hydra_plugins.hydra_submitit_launcher",
        reason="needs hydra-submitit-launcher, of the extra submitit",
    )
    sweep = ["-m", "hydra/launcher=submitit_local", "optim.lr=1e-3,1e-2"]
    done = run([*ALONE, *sweep, "cluster.num_ranks=2", *SMALL], tmp_path)
    assert done.returncode == 0, done.stderr
    [sweep_dir] = run_dirs(tmp_path)
    curves = [losses(sweep_dir / job) for job in ("0", "1")]
    assert curves[0][0] == curves[1][0]
    assert curves[0][-1] != curves[1][-1]


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = run([*ALONE, "plan=demo_4", "cluster.num_ranks=3"], tmp_path)
    assert done.returncode == 1
    assert "cluster.num_ranks says 3, plan says 4" in done.stderr
    assert done.stderr.endswith("Nothing was started.\n")
    assert not list((tmp_path / "runs").iterdir())
    done = run([*ALONE, "optim.lrr=3"], tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("Did you mean optim.lr?\n")


FULL_DISK = """\
import pathlib
write_text = pathlib.Path.write_text
def on_full_disk(path, *args, **kwargs):
    if "logs" in path.parts:
        path.touch()
        path = pathlib.Path("/dev/full")
    return write_text(path, *args, **kwargs)
pathlib.Path.write_text = on_full_disk
raise ValueError("these samples are bad")"""


@pytest.mark.parametrize("disk", ["free", "full"])
def test_the_root_cause_is_what_is_seen_last(disk: str, tmp_path: Path) -> None:
    failure = FULL_DISK.replace("\n", "\n" + 12 * " ")
    if disk == "free":
        failure = failure.splitlines()[-1].strip()
    (tmp_path / "sitecustomize.py").write_text(FAILING_RANK.format(failure=failure))
    done = run([*ALONE, *SMALL, "cluster.num_ranks=3"], tmp_path)
    assert done.returncode == 1
    panel = done.stderr.splitlines()[-6:]
    assert "the run failed" in panel[0]
    assert "rank  1 (cpu" in panel[1]
    assert "ValueError: these samples are bad" in panel[2]
    if disk == "free":
        assert "sitecustomize.py:11" in panel[3]
        [run_dir] = run_dirs(tmp_path)
        log = (run_dir / "logs" / "rank1.log").read_text()
        assert "Traceback (most recent call last)" in log
        assert "these samples are bad" in log


def test_an_interrupted_run_ends_with_the_command_that_goes_on(tmp_path: Path) -> None:
    process = start([*ALONE, *SMALL, "num_steps=100000", "log_every=1"], tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("go on with: shardhet train resume=")
    assert "Traceback" not in errors


def test_a_rank_that_is_interrupted_while_it_imports_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "imports_torch.py").write_text("raise KeyboardInterrupt\n")
    ended = run(["-m", "shardhet.apps.launch.rank_start", "imports_torch"], tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_help_names_every_group(tmp_path: Path) -> None:
    done = run([*ALONE, "--help"], tmp_path)
    assert done.returncode == 0
    for group in ("model", "data", "optim", "lr_scheduler", "cluster", "plan", "logger"):
        assert f"   {group} " in done.stdout
    assert "schema" not in done.stdout


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arguments", [[], ["--help"], ["fly"]])
def test_the_console_script_lists_its_commands(arguments: list[str], tmp_path: Path) -> None:
    done = run([*SHARDHET, *arguments], tmp_path)
    assert done.returncode == (2 if arguments == ["fly"] else 0)
    assert "shardhet train" in done.stdout + done.stderr
