"""``shardhet doctor``: shows versions, devices and links, and what would prevent training.

    shardhet doctor                                        this host, with ranks of its own
    torchrun --nnodes=2 ... -m shardhet.apps.doctor        ranks and links of several hosts

It checks versions and devices.  Then it starts ranks as ``shardhet train`` does, measures
their links, and trains a small model with uneven batches and shards, whose losses must be those
of a single process.
"""

import argparse
import math
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from rich.table import Table

from shardhet.apps.launch.crash import RankConsole
from shardhet.apps.launch.launch import RunFailedExit, start_ranks
from shardhet.apps.launch.rank_env import RankEnv
from shardhet.apps.launch.run_folder import RunFolder, versions

GIB = 2**30
# Others may use this part of a GPU's memory, or a GiB: the driver and a desktop take less.
OTHERS_PART_OF_GPU = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as reported by torch."""

    name: str
    memory_bytes: int
    free_bytes: int
    has_bf16: bool
    capability: tuple[int, int] = (0, 0)  # compute capability; (0, 0): not CUDA's
    has_kernels: bool = True  # torch is built for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found on this host before any rank was started."""

    versions: Mapping[str, str | None]  # by package; None: not installed
    torch_for: str  # "CUDA 13.0", "ROCm 6.4" or "CPUs"
    built_for: tuple[str, ...] = ()  # architectures of GPUs: "sm_75", "sm_86", ...
    has_nccl: bool
    has_driver: bool  # for NVIDIA's devices
    has_device_files: bool  # for them; a container may have been given none
    hides_gpus: bool  # CUDA_VISIBLE_DEVICES is set
    gpus: tuple[Gpu, ...]
    gpu_errors: tuple[str, ...]  # from GPUs that could not be queried


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth knowing, and how to fix it."""

    what: str
    fix: str
    prevents_training: bool = True  # False: training works anyway


def main(arguments: Sequence[str] | None = None) -> None:
    """Check and report; the exit status is 1 if training would fail."""
    parser = argparse.ArgumentParser(
        prog="shardhet doctor",
        description="Show versions, devices and links, and what would prevent training.",
        epilog="On several hosts: torchrun --nnodes=2 --nproc-per-node=4 ... "
        "-m shardhet.apps.doctor",
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
    console = RankConsole(soft_wrap=True)
    facts = find_facts()
    if facts.gpus and (given.ranks or 0) > len(facts.gpus):
        parser.error(f"--ranks: {given.ranks} but this host has {len(facts.gpus)} GPUs.")
    console.print(table_of(facts))
    findings = gpu_findings(facts)
    for finding in findings:
        title = "Error" if finding.prevents_training else "Note"
        console.print(f"[bold]{title}:[/] {finding.what} {finding.fix}")
    has_worked = _ranks_work(console, given.ranks or len(facts.gpus) or 2)
    if not has_worked or any(finding.prevents_training for finding in findings):
        raise SystemExit(1)
    console.print(
        "\nNo problems found. To measure the speed of a model: shardhet measure model=small"
    )


def _ranks_work(console: RankConsole, num_ranks: int) -> bool:
    """Start ranks that check each other and print what they find; returns whether they work."""
    console.print(f"\nstarting {num_ranks} rank{'s' * (num_ranks > 1)} ...")
    folder = Path(tempfile.mkdtemp(prefix="shardhet_doctor_"))
    try:
        start_ranks(RunFolder(folder), num_ranks, worker_module="shardhet.apps.doctor_rank")
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
    from shardhet.apps.doctor_rank import check_as_rank

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


# What is here #


def find_facts() -> Facts:
    """Query packages, driver and system."""
    import torch
    import torch.distributed as dist

    gpus, gpu_errors = _find_gpus(torch.cuda.device_count())
    return Facts(
        # Metadata of the wheel may lack the build, as in 2.15.0+cu132.
        versions={
            "Python": platform.python_version(),
            **versions(),
            "torch": torch.__version__,
        },
        torch_for=_torch_for(torch.version.cuda, torch.version.hip),
        built_for=tuple(torch.cuda.get_arch_list()),
        has_nccl=dist.is_nccl_available(),
        has_driver=Path("/proc/driver/nvidia/version").exists(),
        has_device_files=any(Path("/dev").glob("nvidia[0-9]*")),
        hides_gpus="CUDA_VISIBLE_DEVICES" in os.environ,
        gpus=gpus,
        gpu_errors=gpu_errors,
    )


def _torch_for(cuda: str | None, hip: str | None) -> str:
    return f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPUs"


def _find_gpus(count: int) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Query the GPUs in a separate process, whose contexts on the devices end with it."""
    if not count:
        return (), ()
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(_ask_gpus, count).result()
    except BrokenProcessPool:
        found = ["the driver ended the process that asked it"]
    gpus = tuple(each for each in found if isinstance(each, Gpu))
    return gpus, tuple(each for each in found if isinstance(each, str))


def _ask_gpus(count: int) -> list[Gpu | str]:
    import torch

    from shardhet.apps.launch.builds import has_kernels

    found: list[Gpu | str] = []
    built_for = torch.cuda.get_arch_list()
    for i in range(count):
        try:
            with torch.cuda.device(i):
                free_bytes, memory_bytes = torch.cuda.mem_get_info(i)
                capability = torch.cuda.get_device_capability(i)
                gpu = Gpu(
                    name=torch.cuda.get_device_name(i),
                    memory_bytes=memory_bytes,
                    free_bytes=free_bytes,
                    has_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
                    capability=capability if torch.version.cuda else (0, 0),
                    has_kernels=not torch.version.cuda or has_kernels(capability, built_for),
                )
            found.append(gpu)
        except RuntimeError as error:
            found.append(f"GPU {i}: {str(error).splitlines()[0]}")
    return found


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def table_of(facts: Facts) -> Table:
    """A table of the facts."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    installed = [f"{name} {version}" for name, version in facts.versions.items() if version]
    table.add_row("versions", ", ".join(installed))
    table.add_row("torch for", f"{facts.torch_for} {' '.join(facts.built_for)}")
    for i, gpu in enumerate(facts.gpus):
        capability = f", compute capability {_version(gpu.capability)}"
        table.add_row(
            f"GPU {i}",
            f"{gpu.name}: {gpu.free_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB free"
            + (capability if any(gpu.capability) else "")
            + ("" if gpu.has_bf16 else ", no bfloat16 of its own"),
        )
    if not facts.gpus:
        table.add_row("devices", "no GPU: ranks are processes on the CPU")
    if len({gpu.name for gpu in facts.gpus}) > 1:
        table.add_row("not alike", "measure and plan before training")
    table.add_row("host", "python -m torch.utils.collect_env shows everything else")
    return table


# What it means #


def gpu_findings(facts: Facts) -> list[Finding]:
    """What is wrong with the GPUs, or with what torch can do with them."""
    findings = [
        Finding(f"{error}.", "Run nvidia-smi; a reset or a reboot may help.")
        for error in facts.gpu_errors
    ]
    if facts.has_driver and not facts.gpus and not facts.gpu_errors:
        findings.append(_why_no_gpu(facts))
    if facts.gpus and not facts.has_nccl:
        what = "torch has no NCCL, which GPUs communicate through."
        findings.append(Finding(what, "Install another build."))
    for i, gpu in enumerate(facts.gpus):
        if not gpu.has_kernels:
            what = (
                f"torch has no kernels for GPU {i}, {gpu.name} of compute capability "
                f"{_version(gpu.capability)}: it is built for {', '.join(facts.built_for)}."
            )
            fix = (
                "Install a build of the same version of torch for an older CUDA (as cu126 for "
                "V100, P100 and P40), or hide this GPU."
            )
            findings.append(Finding(what, fix))
        taken_bytes = gpu.memory_bytes - gpu.free_bytes
        if taken_bytes > max(GIB, OTHERS_PART_OF_GPU * gpu.memory_bytes):
            usable_gib = math.floor(9 * gpu.free_bytes / GIB) / 10
            fix = "Stop the processes on it"
            if usable_gib >= 1:
                fix += f", or plan for less: shardhet plan limits.{i}.memory_gib={usable_gib}"
            what = f"{taken_bytes / GIB:.1f} GiB of GPU {i} are taken."
            findings.append(Finding(what, fix, prevents_training=False))
    return findings


def _why_no_gpu(facts: Facts) -> Finding:
    """Why torch sees no device although there is a driver."""
    if facts.torch_for == "CPUs":
        return Finding(
            "there is an NVIDIA driver, but torch is a build for CPUs.",
            "Install the build for the CUDA version that nvidia-smi names.",
        )
    if facts.hides_gpus or not facts.has_device_files:
        hidden_by = "CUDA_VISIBLE_DEVICES" if facts.hides_gpus else "the container"
        return Finding(
            f"{hidden_by} hides the GPUs of this host.",
            "Unset it, or start the container with --gpus all, to use them.",
            prevents_training=False,
        )
    return Finding(
        f"torch is for {facts.torch_for} but sees no GPU.",
        "Install the build for the CUDA version that nvidia-smi names, or a newer driver.",
    )


if __name__ == "__main__":
    main()
