"""``shardhet doctor``: shows versions, devices and links, and what would prevent training.

    shardhet doctor                                        this host, with ranks of its own
    torchrun --nnodes=2 ... -m shardhet.extras.doctor        ranks and links of several hosts

It checks versions and devices.  Then it starts ranks as ``shardhet train`` does, measures
their links, and trains a small model with uneven batches and shards, whose losses must be those
of a single process.
"""

import argparse
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shardhet.apps.cli.streamed import say
from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.launch.launch import RunFailedExit, start_ranks
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder, versions

DRIVER, DEVICE_FILES = Path("/proc/driver/nvidia/version"), Path("/dev")  # of NVIDIA


def main(arguments: Sequence[str] | None = None) -> None:
    """Check and report; the exit status is 1 if training would fail."""
    parser = argparse.ArgumentParser(
        prog="shardhet doctor",
        description="Show versions, devices and links, and what would prevent training.",
        epilog="On several hosts: torchrun --nnodes=2 --nproc-per-node=4 ... "
        "-m shardhet.extras.doctor",
    )
    parser.add_argument(
        "--ranks", type=int, help="how many to start (default: one per GPU, two without)"
    )
    given = parser.parse_args(arguments)
    env = RankEnv.from_environment()
    if env is not None:
        if given.ranks is not None:
            parser.error("--ranks: the ranks were started already, by torchrun or srun.")
        _check_as_launched(env)
        return
    if given.ranks is not None and given.ranks < 1:
        parser.error(f"--ranks: {given.ranks} but it must be at least 1.")
    num_gpus = torch.cuda.device_count()
    if num_gpus and (given.ranks or 0) > num_gpus:
        parser.error(f"--ranks: {given.ranks} but this host has {num_gpus} GPUs.")
    console = RankConsole(soft_wrap=True)
    # Metadata of the wheel may lack the build, as in 2.15.0+cu132.
    installed = {"Python": platform.python_version(), **versions(), "torch": torch.__version__}
    found = (f"{name} {version}" for name, version in installed.items() if version)
    say(console, f"versions: {', '.join(found)}", f"torch for: {torch_for()}")
    say(console, "host: python -m torch.utils.collect_env shows everything else")
    why = why_no_gpu() if num_gpus == 0 else why_no_nccl()
    say(console, why)
    have_worked = _ranks_work(console, given.ranks or num_gpus or 2)
    if not have_worked or (why is not None and why.startswith("Error")):
        raise SystemExit(1)
    console.print(
        "\nNo problems found. To measure the speed of a model: shardhet measure model=small"
    )


def _ranks_work(console: RankConsole, num_ranks: int) -> bool:
    """Start ranks that check each other and print what they find; returns whether they work."""
    console.print(f"\nstarting {num_ranks} rank{'s' * (num_ranks > 1)} ...")
    folder = Path(tempfile.mkdtemp(prefix="shardhet_doctor_"))
    try:
        start_ranks(RunFolder(folder), num_ranks, worker_module="shardhet.extras.doctor_rank")
    except RunFailedExit as exit_:
        if exit_.code != 1:  # stopped, or output closed: this says nothing about the ranks
            shutil.rmtree(folder, ignore_errors=True)
            raise
        # The cause was shown; the logs stay.
        console.print(f"[bold]Error:[/] ranks cannot train here. Logs: {folder}")
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def _check_as_launched(env: RankEnv) -> None:
    """Run as a rank that torchrun or srun has started; the rank itself reports a failure."""
    from shardhet.extras.doctor_rank import check_as_rank

    env.publish()
    folder = Path(tempfile.mkdtemp(prefix="shardhet_doctor_"))
    errors = os.dup(sys.stderr.fileno())  # kept, because ranks above zero print into their logs
    try:
        check_as_rank(RunFolder(folder), env)
    except Exception as error:
        told = f"rank {env.rank} on {socket.gethostname()}: {type(error).__name__}: {error}"
        os.write(errors, f"{told}\nIts log is in {folder}.\n".encode())
        raise SystemExit(1) from None
    finally:
        os.close(errors)
    shutil.rmtree(folder, ignore_errors=True)


def torch_for() -> str:
    """``CUDA 13.0 sm_75 sm_86``, ``ROCm 6.4 gfx90a`` or ``CPUs``."""
    cuda, hip = torch.version.cuda, torch.version.hip
    name = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPUs"
    return " ".join([name, *torch.cuda.get_arch_list()])


def why_no_gpu() -> str | None:
    """Why torch sees no device although there is an NVIDIA driver; None if there is none."""
    if not DRIVER.exists():
        return None
    if not (torch.version.cuda or torch.version.hip):
        return (
            "Error: there is an NVIDIA driver, but torch is a build for CPUs. Install the "
            "build for the CUDA version that nvidia-smi names."
        )
    hides = "CUDA_VISIBLE_DEVICES" in os.environ
    if hides or not any(DEVICE_FILES.glob("nvidia[0-9]*")):  # a container may have none
        return (
            f"Note: {'CUDA_VISIBLE_DEVICES' if hides else 'the container'} hides the GPUs of "
            "this host. Unset it, or start the container with --gpus all, to use them."
        )
    return (
        f"Error: torch is for {torch_for()} but sees no GPU. Install the build for the CUDA "
        "version that nvidia-smi names, or a newer driver."
    )


def why_no_nccl() -> str | None:
    """What to do where GPUs cannot communicate; None if they can."""
    if dist.is_nccl_available():
        return None
    return "Error: torch has no NCCL, which GPUs communicate through. Install another build."


if __name__ == "__main__":
    main()
