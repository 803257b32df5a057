"""Start the ranks of a run on this host, and report the cause if one of them fails."""

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from shardhet.apps.cli.streamed import WideConsole
from shardhet.apps.launch import rank_start
from shardhet.apps.launch.crash import (
    OUTPUT_CLOSED,
    crash_panel,
    read_failures,
    root_cause,
)
from shardhet.apps.launch.run_folder import IN_MEMORY, RunFolder
from shardhet.comm.failure import Failure, FailureKind

INTERRUPTED = "Ctrl-C"
LOCALHOST = "localhost"


class RunFailedExit(SystemExit):
    """The end of a run that had started, about which all is said; of a sweep, too."""


def start_ranks(
    folder: RunFolder,
    world_size: int,
    *,
    worker_module: str = "shardhet.apps.run.worker",
    arguments: Sequence[str] = (),
    grace_s: int | None = None,
) -> None:
    """Run the worker on ``folder`` once per rank and wait; SystemExit if one fails.

    ``arguments`` are what it gets besides the folder.
    Ranks start again, and go on, if one of them has lowered its device's budget of memory.
    ``grace_s`` is the time that ranks get to end in order if this process is told to end; None:
    that of torch, and they do not.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher's messages about signals add nothing to the panel.
    for name in ("agent.server.api", "multiprocessing.api"):  # each has a level of its own
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before a rank imports torch
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The launcher's own; ranks log into the run folder, unless its disk is full.
    in_memory = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    with TemporaryDirectory(dir=in_memory) as log_dir:
        config = partial(
            LaunchConfig,
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            rdzv_backend="static",
            rdzv_configs={"rank": 0},
            local_addr=LOCALHOST,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            shutdown_timeout=grace_s,
        )
        if grace_s is not None:
            # Not passed on by torch; the ranks look for the file.
            signal.signal(signal.SIGUSR1, lambda *_: folder.ask_to_end("SIGUSR1"))
            signal.signal(signal.SIGINT, partial(_interrupt, folder))
            config = partial(config, signals_to_handle="SIGTERM,SIGHUP,SIGQUIT")
        worker = ("-m", rank_start.__name__, worker_module, str(folder.path), *arguments)
        goes_on = True
        while goes_on:
            try:
                with own_store() as endpoint:
                    launch = config(run_id=str(uuid4()), rdzv_endpoint=endpoint)
                    elastic_launch(launch, sys.executable)(*worker)
                goes_on = False
            except ChildFailedError as error:
                if any(each.exitcode == OUTPUT_CLOSED for each in error.failures.values()):
                    raise RunFailedExit(OUTPUT_CLOSED) from None
                cause = _cause(folder, Path(log_dir), error.failures)
                if not cause.plans_again:
                    _show(cause, folder)
                    raise RunFailedExit(1) from None
                folder.put_failures_aside()
            except SignalException as signalled:
                if folder.has_ended:
                    raise RunFailedExit(0) from None
                name = "SIGINT" if INTERRUPTED in str(signalled) else signalled.sigval.name
                raise RunFailedExit(f"stopped by {name}") from None
        if folder.is_asked_to_end_by(INTERRUPTED):
            raise RunFailedExit(rank_start.BY_SIGINT)


def _interrupt(folder: RunFolder, *_: object) -> None:
    """The first Ctrl-C ends a run that has begun in order; any other ends all ranks at once."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    if not folder.has_begun or folder.is_asked_to_end_by(INTERRUPTED):
        raise SignalException(INTERRUPTED, signal.SIGKILL)
    folder.ask_to_end(INTERRUPTED)
    sys.stderr.write(
        "\nCtrl-C: this step is finished and a checkpoint is written. Ctrl-C again ends the "
        "run at once.\n"
    )


@contextmanager
def own_store() -> Iterator[str]:
    """Context with the store of one launch, which no other host reaches; its endpoint.

    Torch's rendezvous takes the store that this process has at the port, in place of one that
    would listen at every address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server((LOCALHOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        store = TCPStore(
            LOCALHOST,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    yield f"{LOCALHOST}:{port}"
    del store  # ends it


def _cause(folder: RunFolder, log_dir: Path, failures: Mapping[int, Any]) -> Failure:
    """The root cause, from what the ranks wrote and how the launcher saw each rank end."""
    ended = sorted(failures.items(), key=lambda item: item[1].timestamp)
    silent = [
        Failure(
            kind=FailureKind.GONE,
            ranks=(rank,),
            name=f"rank {rank} (process {failure.pid})",
            what=_ending(failure.exitcode),
            where="unknown: the process left no traceback",
            at_s=failure.timestamp,
        )
        for rank, failure in ended
    ]
    cause = root_cause(read_failures(folder, log_dir), silent)
    assert cause is not None
    return cause


def _show(cause: Failure, folder: RunFolder) -> None:
    """Show one panel."""
    WideConsole(stderr=True).print(crash_panel(cause, folder))


def _ending(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return f"ended by signal {-exit_code} (often the system, out of memory)"
    if exit_code < 0:
        return f"ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
    return f"ended with exit code {exit_code}"
