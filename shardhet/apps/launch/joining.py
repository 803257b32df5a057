"""Set up one rank of a program: its log, device and process group, and failure reports."""

import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from shardhet import DeviceSpec
from shardhet.apps.launch.builds import check_alike, check_serves
from shardhet.apps.launch.crash import OUTPUT_CLOSED, RankConsole, is_repeated, save_failure
from shardhet.apps.launch.leaving import end_agent
from shardhet.apps.launch.memory_limits import PlansAgainError
from shardhet.apps.launch.rank_env import RankEnv, is_task_of_srun
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.comm import devices
from shardhet.comm.calls import SWITCH, wants_gloo
from shardhet.comm.channel import Channel, progress
from shardhet.comm.failure import Failure
from shardhet.comm.liveness.diagnosis import LONG_FACTOR
from shardhet.comm.liveness.ending import end_if_launcher_is_gone, end_now, end_with_launcher
from shardhet.comm.liveness.watch import HANG_TIMEOUT_S, watch_ranks
from shardhet.comm.members import local_device_spec
from shardhet.comm.peers import failure_of
from shardhet.config.training import ClusterConf, DeviceType
from shardhet.training.emulation import cores_for, stay_on

logger = logging.getLogger(__name__)
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads one
GROWING_SEGMENTS = "expandable_segments:True"
# A network or a disk may be back at the next start; Ctrl-C is no fault of the run.
MAY_HEAL = (OSError, dist.DistError, KeyboardInterrupt)


def run_as_rank(part: Callable[[RunFolder, RankEnv], None]) -> None:
    """Run a rank's part of what ``start_ranks`` has started, with its folder.

    The launcher shows the root cause of a failure; this rank's traceback is in its log.
    """
    env = RankEnv.from_environment()
    assert env is not None, "ranks are started by start_ranks"
    try:
        part(RunFolder(Path(sys.argv[1])), env)
    except SystemExit as ended:
        if ended.code == OUTPUT_CLOSED:
            # Before its peers miss it: the launcher asks who was first.
            end_now(OUTPUT_CLOSED)
        raise
    except Exception:
        end_now(1)


@contextmanager
def joined(
    cluster: ClusterConf,
    folder: RunFolder,
    env: RankEnv,
    *,
    transport: str = "auto",
    hang_timeout_s: float | None = HANG_TIMEOUT_S,
    needs_bfloat16: bool = False,
    fp16_accumulation: bool = False,
) -> Iterator[torch.device]:
    """Context of one rank, with its log, device, process group and watch over all ranks.

    A failure is written to where the launcher looks for it.
    """
    with _log_to(folder, env.rank):
        end_with_launcher()
        with _report_failure(folder, env, "no device"):
            device = choose_device(cluster, env)
            name = f"{device}, {announced_device(cluster, env, device)}"
            check_serves(device, needs_bfloat16=needs_bfloat16)
        with _report_failure(folder, env, name):
            torch.set_num_threads(cluster.num_threads)
            torch.backends.cuda.matmul.allow_fp16_accumulation = fp16_accumulation
            if cluster.speeds:
                stay_on(cores_for(cluster.speeds)[env.rank])
            if transport != "auto":  # otherwise the environment decides
                os.environ[SWITCH] = transport
            # Agreements between hosts need gloo on GPUs too.  The group is not bound to the
            # device: NCCL would connect here, before hosts know whether theirs are alike.
            with _all_here(env, hang_timeout_s):
                dist.init_process_group(
                    "gloo" if wants_gloo() else devices.backends_for(device)
                )
            with watch_ranks(
                hang_timeout_s=hang_timeout_s,
                device=device,
                on_failure=partial(_save_found, folder),
            ):
                for trouble in check_alike(device, Channel.of_world()):
                    logger.warning("%s", trouble)
                    RankConsole(stderr=True, quiet=env.rank != 0).print(f"Note: {trouble}")
                yield device
            dist.destroy_process_group()


@contextmanager
def _all_here(env: RankEnv, hang_timeout_s: float | None) -> Iterator[None]:
    """Context that is entered once all ranks are there; the watch over them begins later.

    Torch would wait for half an hour, and name none that is absent.
    """
    if hang_timeout_s and env.world_size > 1:
        limit = timedelta(seconds=LONG_FACTOR * hang_timeout_s)
        store, _, _ = next(rendezvous("env://", timeout=limit))
        await_all(store, env.rank, env.world_size, limit)
    yield  # with the store: rank zero may be its host


def await_all(store: Store, rank: int, world_size: int, limit: timedelta) -> None:
    """Return once all ranks have called it; ``DistStoreError`` names those that have not."""
    names = [f"shardhet/joined/{i}" for i in range(world_size)]
    store.set(names[rank], "")
    try:
        store.wait(names, limit)
    except dist.DistStoreError:
        absent = [str(i) for i, name in enumerate(names) if not store.check([name])]
        raise dist.DistStoreError(
            f"rank {rank} waits for rank{'s' * (len(absent) > 1)} {', '.join(absent)} to join, "
            f"and {limit.total_seconds():,.0f} s have passed. Look at what these processes "
            "do; if they only take long to start, set a larger hang_timeout_s, of which this "
            "is ten times."
        ) from None


def choose_device(cluster: ClusterConf, env: RankEnv) -> torch.device:
    """The GPU of this process's local rank if GPUs are used, else the CPU."""
    num_gpus = torch.cuda.device_count()
    wanted = cluster.device
    if wanted is DeviceType.CPU or (wanted is DeviceType.AUTO and not num_gpus):
        return torch.device("cpu")
    # srun --gpus-per-task=1 shows each rank a single GPU, its own.
    index = 0 if is_task_of_srun() and num_gpus == 1 else env.local_rank
    if index >= num_gpus:
        raise ValueError(
            f"rank {env.rank}: local rank {env.local_rank} but this host has {num_gpus} GPUs. "
            "Start fewer ranks per host, or set cluster.device=CPU."
        )
    choose_allocator()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def choose_allocator() -> None:
    """Let segments of device memory grow, unless the user has configured the allocator.

    Microbatches of unlike sizes and three streams' pools leave gaps otherwise, and a device is
    out of memory when what is reserved, not what is allocated, reaches its capacity.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, GROWING_SEGMENTS))
        # Some builds have read the variables by now, when torch was imported.
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        if change is not None:
            change(GROWING_SEGMENTS)


def announced_device(cluster: ClusterConf, env: RankEnv, device: torch.device) -> DeviceSpec:
    """The device that this rank announces: that of the driver, unless named or emulated."""
    found = local_device_spec(device)
    emulated = cluster.emulated_device(env.rank)
    kind, memory_bytes = found.kind, found.memory_capacity_bytes
    if emulated is not None:
        kind = f"emulated {kind} {emulated.speed:g}x"
        memory_bytes = emulated.memory_bytes or memory_bytes
    if cluster.kinds:
        kind = cluster.kinds[env.rank]
    return replace(found, kind=kind, memory_capacity_bytes=memory_bytes)


@contextmanager
def _log_to(folder: RunFolder, rank: int) -> Iterator[None]:
    """Log into the run folder; on ranks above zero, everything printed goes there too."""
    folder.logs_dir.mkdir(parents=True, exist_ok=True)
    with folder.log_path(rank).open("a", encoding="utf-8", buffering=1) as file:
        if rank > 0:
            progress.screen = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")
            _redirect(sys.stdout, file)
            _redirect(sys.stderr, file)
        faulthandler.enable()  # a native crash leaves its Python stack in the log
        handler = logging.StreamHandler(file)
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        )
        root = logging.getLogger()
        handlers_before, root.handlers = root.handlers, [handler]  # Hydra's handlers print
        root.setLevel(logging.INFO)
        try:
            yield
        finally:
            root.handlers = handlers_before


def _redirect(stream: TextIO, file: TextIO) -> None:
    """Redirect at the level of file descriptors, so that output of C++ is kept too."""
    stream.flush()
    os.dup2(file.fileno(), stream.fileno())


def _save_found(folder: RunFolder, failure: Failure) -> None:
    """Write the failure of a rank that cannot write its own."""
    save_failure(failure, folder)
    if failure.stack:
        logger.error("%s is at\n%s", failure.name, failure.stack)


@contextmanager
def _report_failure(folder: RunFolder, env: RankEnv, device: str) -> Iterator[None]:
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        what, may_heal = "", isinstance(error, MAY_HEAL)
        if isinstance(error, KeyboardInterrupt):
            what = "interrupted (SIGINT)"
        else:
            end_if_launcher_is_gone()  # the store was lost with it, which says less
            logger.exception("rank %d failed", env.rank)
        failure = failure_of(
            error, rank=env.rank, name=f"rank {env.rank} ({device})", what=what
        )
        failure = replace(failure, plans_again=isinstance(error, PlansAgainError))
        repeats = env.may_start_again and not may_heal and is_repeated(failure, folder)
        save_failure(failure, folder)
        if repeats:
            text = "it failed in the same way when it last started: this node does not go on"
            logger.error("%s", text)
            sys.stderr.write(f"rank {env.rank}: {error}\n{text}\n")
            end_agent()
        raise
