"""``shardhet doctor``: what is here, and what would be in the way of training with it.

    shardhet doctor                                        this host, with ranks of its own
    torchrun --nnodes=2 ... -m shardhet.apps.doctor        ranks and links of several hosts

Versions, host and devices are looked at; then ranks are started as ``shardhet train`` starts
them, measure their links, and take a step of a small model with uneven batches and shards,
whose loss must be that of one process.
"""

import argparse
import os
import platform
import resource
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardhet.apps.launch import RunFailedExit, start_ranks
from shardhet.apps.rank_env import RankEnv
from shardhet.apps.run_folder import RunFolder

GIB = 2**30
PACKAGES = ("shardhet", "torch", "numpy", "scipy", "hydra-core")
LEAST_FREE_BYTES = GIB
LEAST_OPEN_FILES = 1024  # each pair of ranks on a host takes some
OTHERS_PART_OF_GPU = 0.1  # of its memory: a desktop takes less
MAX_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    memory_bytes: int
    free_bytes: int
    has_bf16: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found on this host before any rank was started."""

    versions: tuple[tuple[str, str], ...]
    torch_cuda: str | None  # the version that torch was built for
    has_nccl: bool
    has_driver: bool
    gpus: tuple[Gpu, ...]
    processor: str
    num_cores: int  # that this process may use
    memory_bytes: int
    free_bytes: int
    open_files: int
    has_host_name: bool  # one that has an address
    num_threads: int | None  # OMP_NUM_THREADS

    @property
    def num_ranks(self) -> int:
        """How many ranks to start: one per GPU, and at least two, which can speak."""
        return min(MAX_RANKS, max(1, len(self.gpus)) if self.gpus else 2)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something in the way, and how to mend it."""

    what: str
    mend: str


def main(arguments: Sequence[str] | None = None) -> None:
    """Look and tell; ends with 1 where training would fail."""
    parser = argparse.ArgumentParser(
        prog="shardhet doctor",
        description="What is here, and what would be in the way of training with it.",
        epilog="On several hosts: torchrun --nnodes=2 --nproc-per-node=4 ... "
        "-m shardhet.apps.doctor",
    )
    parser.add_argument(
        "--ranks", type=int, help="how many to start (default: one per GPU, two without)"
    )
    given = parser.parse_args(arguments)
    if given.ranks is not None and given.ranks < 1:
        parser.error(f"--ranks: {given.ranks} but it must be at least 1.")
    env = RankEnv.from_environment()
    if env is not None:
        from shardhet.apps.doctor_rank import check_as_rank

        with tempfile.TemporaryDirectory() as folder:
            check_as_rank(RunFolder(Path(folder)), env)
        return
    console = Console(highlight=False, soft_wrap=True)
    facts = find_facts()
    console.print(table_of(facts))
    troubles = troubles_of(facts)
    for trouble in troubles:
        console.print(f"[bold]In the way:[/] {trouble.what} {trouble.mend}")
    has_failed = not _ranks_work(console, given.ranks or facts.num_ranks)
    if troubles or has_failed:
        raise SystemExit(1)
    console.print(
        "\nNothing is in the way. How fast this is with a model: shardhet measure model=small"
    )


def _ranks_work(console: Console, num_ranks: int) -> bool:
    """Start ranks and let them check each other; what they find they print."""
    console.print(f"\nstarting {num_ranks} rank{'s' * (num_ranks > 1)} ...")
    folder = Path(tempfile.mkdtemp(prefix="shardhet_doctor_"))
    try:
        start_ranks(RunFolder(folder), num_ranks, worker_module="shardhet.apps.doctor_rank")
    except RunFailedExit:  # and the cause was shown; their logs stay
        console.print(f"[bold]In the way:[/] ranks cannot train together. Logs: {folder}")
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def find_facts() -> Facts:
    """Ask packages, driver and system."""
    import torch
    import torch.distributed as dist

    gpus = []
    for i in range(torch.cuda.device_count()):
        free_bytes, memory_bytes = torch.cuda.mem_get_info(i)
        properties = torch.cuda.get_device_properties(i)
        has_bf16 = properties.major >= 8  # Ampere
        gpus.append(
            Gpu(
                name=properties.name,
                memory_bytes=memory_bytes,
                free_bytes=free_bytes,
                has_bf16=has_bf16,
            )
        )
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return Facts(
        versions=(("Python", platform.python_version()), *map(_version, PACKAGES)),
        torch_cuda=torch.version.cuda,
        has_nccl=dist.is_nccl_available(),
        has_driver=Path("/proc/driver/nvidia/version").exists(),
        gpus=tuple(gpus),
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=_meminfo("MemTotal"),
        free_bytes=_meminfo("MemAvailable"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        has_host_name=_has_address(socket.gethostname()),
        num_threads=int(threads) if threads.isdecimal() else None,
    )


def _version(package: str) -> tuple[str, str]:
    try:
        return package, metadata.version(package)
    except metadata.PackageNotFoundError:
        return package, "from a checkout" if package == "shardhet" else "missing"


def _processor() -> str:
    with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    return names[0] if names else platform.machine()


def _meminfo(entry: str) -> int:
    """Bytes, by proc(5)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith(f"{entry}:"))
    return 1024 * int(kib)


def _has_address(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def table_of(facts: Facts) -> Table:
    """What is here."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("versions", ", ".join(" ".join(each) for each in facts.versions))
    table.add_row("torch for", f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPUs")
    table.add_row(
        "host",
        f"{socket.gethostname()}: {facts.processor}, {facts.num_cores} cores, "
        f"{facts.free_bytes / GIB:.1f} of {facts.memory_bytes / GIB:.1f} GiB free",
    )
    for i, gpu in enumerate(facts.gpus):
        table.add_row(
            f"GPU {i}",
            f"{gpu.name}: {gpu.free_bytes / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} GiB free"
            + ("" if gpu.has_bf16 else ", no fast bfloat16: train with precision=fp32"),
        )
    if not facts.gpus:
        table.add_row("devices", "no GPU: ranks are processes on the CPU")
    kinds = Counter(gpu.name for gpu in facts.gpus)
    if len(kinds) > 1:
        mixed = ", ".join(f"{number} x {name}" for name, number in kinds.items())
        table.add_row("not alike", f"{mixed}: measure and plan before training")
    return table


def troubles_of(facts: Facts) -> list[Trouble]:
    """What would make training fail, or take far longer than it has to."""
    troubles = []
    if facts.has_driver and not facts.gpus:
        found = (
            f"torch is for CUDA {facts.torch_cuda} but sees no GPU."
            if facts.torch_cuda
            else "there is an NVIDIA driver, but torch is a build for CPUs."
        )
        mend = "Install a build of torch that fits the driver (nvidia-smi says which CUDA)"
        troubles.append(Trouble(found, f"{mend}, and look at CUDA_VISIBLE_DEVICES."))
    if facts.gpus and not facts.has_nccl:
        troubles.append(
            Trouble("torch has no NCCL, which GPUs speak through.", "Install another build.")
        )
    for i, gpu in enumerate(facts.gpus):
        taken_bytes = gpu.memory_bytes - gpu.free_bytes
        if taken_bytes > OTHERS_PART_OF_GPU * gpu.memory_bytes:
            troubles.append(
                Trouble(
                    f"other programs have taken {taken_bytes / GIB:.1f} GiB of GPU {i}.",
                    "End them, or plan for less: shardhet plan limits."
                    f"{i}.memory_gib={0.95 * gpu.free_bytes / GIB:.0f}",
                )
            )
    if facts.free_bytes < LEAST_FREE_BYTES:
        troubles.append(
            Trouble(
                f"{facts.free_bytes / GIB:.1f} GiB of the host's memory are free.",
                "Each rank takes half a GiB before it has a model; end other programs.",
            )
        )
    if facts.open_files < LEAST_OPEN_FILES:
        troubles.append(
            Trouble(f"a process may open {facts.open_files} files.", "Say ulimit -n 4096.")
        )
    if not facts.has_host_name:
        troubles.append(
            Trouble(
                f"the host's name {socket.gethostname()!r} has no address, so gloo cannot "
                "find its interface.",
                "Put it into /etc/hosts, or set GLOO_SOCKET_IFNAME.",
            )
        )
    if facts.num_threads and not facts.gpus and facts.num_threads > facts.num_cores:
        troubles.append(
            Trouble(
                f"OMP_NUM_THREADS is {facts.num_threads} on {facts.num_cores} cores.",
                "Unset it: ranks on the CPU take cluster.num_threads, which is 1.",
            )
        )
    return troubles


if __name__ == "__main__":
    main()
