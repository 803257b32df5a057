"""Worlds of ranks that stay alive between test cases, and take a case in milliseconds.

    result_per_rank = run_ranks(fn, world_size, *args)                      # fn(rank, *args)
    outcomes = run_ranks_expecting_failure(fn, world_size, *args, within_s=10.0)

``fn`` must be a module-level function: it travels to the ranks by name.  A test that is one
such call is written as what each rank does:

    @on_ranks(3)                              @ends_all_ranks(3, "what each error says")
    def test_x(rank: int) -> None: ...        def test_y(rank: int) -> None: ...

Life of a world.  pytest's process hosts the store and starts one process per rank, which
joins a gloo group and waits at a pipe.  A case is sent to all ranks at once; each answers
with one ``Outcome``.  A world in which every rank returned is kept for the next case of its
size; any other is killed, because its ranks may be in the middle of a collective.
Between cases its processes are stopped (``World.pause``).

    pytest  --case-->  rank 0 .. rank n-1     (pickle of function name and arguments)
            <-outcome- rank 0 .. rank n-1     (end of file: the process is gone)

The store lives here, as it lives in torchrun's agent, so that no dying rank takes it away.
"""

import atexit
import ctypes
import faulthandler
import gc
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

import pytest

HOST = "127.0.0.1"
GROUP_TIMEOUT_S = 60.0  # of every collective, where a case does not choose its own
START_TIMEOUT_S = 60.0  # the fork server imports torch once, on a busy machine slowly
DEATH_SLACK_S = 0.5  # a death is noticed after the fact, and peers fail within this of it
CASES_PER_COLLECTION = 20
# A world with more goes: a thread of each of gloo's groups wakes up a hundred times a second.
MOST_GROUPS = 8
PR_SET_PDEATHSIG = 1  # prctl(2)

# The fork server imports these once; each rank is then a fork of it: a clean process (no
# threads, nothing of pytest's) that starts in milliseconds. torch.optim imports torch._dynamo.
_CONTEXT = multiprocessing.get_context("forkserver")
_BASIC = (
    "torch.distributed.tensor",
    "torch._dynamo",
    "pytest",
    "scipy.optimize",
    "shardhet.extras.shared_host.transport",
    "shardhet.fsdp.module",
)
# Where they are installed; 3 s of a core for each rank that has to import them itself.
TRANSFORMERS = ("transformers.models.llama.modeling_llama", "transformers.trainer")
preloaded: list[str] = []  # more, for the test files that were collected
_test_modules: list[str] = []  # whose functions the ranks run


def patience() -> float:
    """By how much a limit of time is longer on a machine with more to do than it has cores."""
    return min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def wait_until(is_so: Callable[[], bool], *, seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def preload(*modules: str) -> None:
    """Have ranks and programs start with ``modules`` imported.

    For the top of a test file: it has no effect once the first of them has started.
    """
    preloaded.extend(module for module in modules if module not in preloaded)
    _set_preload()


def preload_tests(modules: Sequence[str]) -> None:
    """Have ranks start with these test files imported, which each would import itself.

    It has no effect once the first of them has started.
    """
    _test_modules[:] = modules
    _set_preload()


def _set_preload() -> None:
    modules = [*_BASIC, *preloaded, *_test_modules]
    _CONTEXT.set_forkserver_preload(["tests.unfrozen", *modules, "tests.frozen"])


_set_preload()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one rank in one case: returned, raised, exited or hung."""

    rank: int
    value: Any = None  # what fn returned
    exception_name: str | None = None  # the type's name
    message: str = ""  # str(exception)
    traceback: str = ""
    exit_code: int | None = None  # the process ended without a word; negative: by that signal
    hung_at: str | None = None  # the stack of a rank that was still running
    duration_s: float = 0.0
    ended_at_s: float = 0.0  # by the monotonic clock, which all processes share
    num_groups: int = 0  # process groups that the rank has now
    is_watched: bool = False  # whether its peers are still watched for signs of life

    @property
    def has_returned(self) -> bool:
        return self.exception_name is None and self.exit_code is None and self.hung_at is None

    def is_within(self, seconds: float) -> bool:
        """Whether it took less, on a machine as busy as this one."""
        return self.duration_s < seconds * patience()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float = 10.0,
    fresh_world: bool = False,
) -> list[Any]:
    """What ``fn(rank, *args)`` returned on each rank; fails with the first rank to fail.

    Once a rank has failed, the others get ``grace_s`` before they are killed.  Limits of time
    are those of an idle machine (``patience``).
    ``fresh_world`` is for cases that leave a world unfit for others though they return.
    """
    outcomes = _run(
        fn, args, world_size, timeout_s=timeout_s, grace_s=grace_s, fresh_world=fresh_world
    )
    if not all(outcome.has_returned for outcome in outcomes):
        pytest.fail(_describe_failure(outcomes), pytrace=False)
    return [outcome.value for outcome in outcomes]


def run_ranks_expecting_failure(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    within_s: float = 10.0,
    leaves_on_failure: bool = False,
) -> list[Outcome]:
    """What became of each rank, in rank order, where at least one must fail.

    Fails if a rank is still running after ``within_s``: that is the silent hang.  A rank that
    raises stays alive and silent, so that its peers must learn of it from the library; with
    ``leaves_on_failure`` its process ends, as a script's would, and gloo tells the peers.
    """
    outcomes = _run(
        fn,
        args,
        world_size,
        timeout_s=within_s,
        grace_s=within_s,
        leaves_on_failure=leaves_on_failure,
    )
    if any(outcome.hung_at is not None for outcome in outcomes):
        pytest.fail(_describe_failure(outcomes), pytrace=False)
    if all(outcome.has_returned for outcome in outcomes):
        pytest.fail(f"all {world_size} ranks returned; a failure was expected", pytrace=False)
    return outcomes


def on_ranks(world_size: Any = None, **how: Any) -> Callable[[Any], Any]:
    """A decorator of a test ``fn(rank, ...)``, which then runs on every rank.

    ``world_size`` is a number, or a function of the test's arguments; without it, it is the
    argument of that name, or that of the argument ``plan``.
    """
    return partial(_as_test, world_size, partial(run_ranks, **how))


def ends_all_ranks(world_size: Any, *parts: str, check: Any = None, **how: Any) -> Any:
    """As ``on_ranks``, for a test that no rank survives: all errors say all of ``parts``.

    The argument ``says`` of a test is one more of them; "a|b" is either.  ``check`` gets the
    outcomes and the parts instead.
    """

    def start(fn: Any, number: int, *call: Any) -> None:
        outcomes = run_ranks_expecting_failure(fn, number, *call, **how)
        words = (*parts, *([call[-1]["says"]] if "says" in call[-1] else []))
        if check is not None:
            check(outcomes, *words)
            return
        for outcome in outcomes:
            assert not outcome.has_returned, outcome
            assert outcome.is_within(max(10.0, how.get("within_s", 0.0))), outcome
            for part in words:
                assert any(each in outcome.message for each in part.split("|")), outcome

    return partial(_as_test, world_size, start)


def _as_test(world_size: Any, start: Callable[..., Any], fn: Any) -> Callable[..., None]:
    @wraps(fn)
    def test(**params: Any) -> None:
        number = world_size(**params) if callable(world_size) else world_size
        number = number or params.get("world_size") or params["plan"].world_size
        start(_in_rank, number, fn.__module__, fn.__name__, params)

    signature = inspect.signature(fn)
    _, *own = signature.parameters.values()
    test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    test.in_rank = fn  # type: ignore[attr-defined]
    return test


def _in_rank(rank: int, module: str, name: str, params: dict[str, Any]) -> Any:
    return getattr(import_module(module), name).in_rank(rank, **params)


def rank_cache() -> dict[Any, Any]:
    """This rank's own dict, kept between the cases of a world (for communicators, say)."""
    if _rank_cache is None:
        raise RuntimeError("rank_cache() was called outside a rank. Call it in run_ranks' fn.")
    return _rank_cache


def workers_allowed() -> Any:
    """A context in which a rank of a test, which ends with its parent, may have workers."""
    return mock.patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One function to call on every rank, and what to do if it raises."""

    call: bytes  # pickle of (fn, args), opened inside the case's own try
    leaves_on_failure: bool
    test: str  # as pytest names it and where it is, for programs that the ranks start


class World:
    """``world_size`` processes in one gloo group, each waiting for the next case."""

    def __init__(self, world_size: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.world_size = world_size
        self.last_case = "start-up"
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="shardhet-world-")
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._is_paused = False
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve,
                args=(rank, world_size, self._store.port, theirs, self._stack_file(rank)),
                name=f"rank {rank} of {world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()  # else our own copy would keep the end of file from us
            self._processes.append(process)
            self._connections.append(ours)
        started = self._collect(timeout_s=START_TIMEOUT_S, grace_s=1.0)
        if not all(outcome.has_returned for outcome in started):
            self.kill()
            pytest.fail(f"no world: {_describe_failure(started)}", pytrace=False)

    @property
    def pids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        *,
        timeout_s: float,
        grace_s: float,
        leaves_on_failure: bool = False,
    ) -> list[Outcome]:
        """Each rank's outcome, in rank order; if one has not returned, kill this world."""
        self._check_ranks_are_alive()
        self.last_case = fn.__qualname__
        # Plain pickle: multiprocessing's own would send tensors as shared memory, which
        # ends with the process that made it.
        case = _Case(
            call=pickle.dumps((fn, args)),
            leaves_on_failure=leaves_on_failure,
            test=os.environ.get("PYTEST_CURRENT_TEST", ""),
        )
        request = pickle.dumps(case)
        for connection in self._connections:
            try:
                connection.send_bytes(request)
            except OSError:  # this rank has just died; its end of file says so below
                continue
        return self._collect(timeout_s=timeout_s, grace_s=grace_s)

    def pause(self) -> None:
        """Stop idle ranks, whose threads of gloo would wake up a hundred times a second."""
        if not self._is_paused:
            self._signal(signal.SIGSTOP)
            self._is_paused = True

    def resume(self) -> None:
        """Let them go on."""
        if self._is_paused:
            self._signal(signal.SIGCONT)
            self._is_paused = False

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        """Let idle ranks go: they leave at the end of file."""
        self.resume()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=2.0)
        self.kill()

    def kill(self) -> None:
        """End all ranks, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._stacks.cleanup()

    def _check_ranks_are_alive(self) -> None:
        codes = {r: p.exitcode for r, p in enumerate(self._processes) if not p.is_alive()}
        if codes:
            pytest.fail(
                f"ranks died after their last case, {self.last_case!r}, had returned; "
                f"exit codes {codes}",
                pytrace=False,
            )

    def _collect(self, *, timeout_s: float, grace_s: float) -> list[Outcome]:
        started_at_s = from_s = time.monotonic()
        has_failed = False
        rank_by_connection = {c: rank for rank, c in enumerate(self._connections)}
        outcome_by_rank: dict[int, Outcome] = {}
        while rank_by_connection:
            left_s = from_s + timeout_s * patience() - time.monotonic()
            ready = wait(list(rank_by_connection), max(0.0, left_s))
            if not ready and left_s <= 0:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = rank_by_connection.pop(connection)
                outcome_by_rank[rank] = outcome = self._receive(rank, started_at_s)
                if not outcome.has_returned and not has_failed:
                    has_failed, from_s, timeout_s = True, time.monotonic(), grace_s
        for rank in rank_by_connection.values():
            outcome_by_rank[rank] = self._hung(rank, started_at_s)
        return [outcome_by_rank[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, started_at_s: float) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            ended_at_s = time.monotonic()
            process = self._processes[rank]
            process.join(timeout=5.0)
            return Outcome(
                rank=rank,
                exit_code=process.exitcode if process.exitcode is not None else -1,
                duration_s=ended_at_s - started_at_s,
                ended_at_s=ended_at_s - DEATH_SLACK_S,
            )
        return outcome

    def _hung(self, rank: int, started_at_s: float) -> Outcome:
        pid, stack = self._processes[rank].pid, Path(self._stack_file(rank))
        if pid is not None and stack.exists():  # it has told faulthandler where to write
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.1)
        text = stack.read_text() if stack.exists() else ""
        threads = [
            thread for thread in text.split("\n\n") if "_leave_with_parent" not in thread
        ]
        return Outcome(
            rank=rank,
            hung_at="\n\n".join(threads) or "an unknown place",
            duration_s=time.monotonic() - started_at_s,
            ended_at_s=time.monotonic(),
        )

    def _stack_file(self, rank: int) -> str:
        return f"{self._stacks.name}/rank{rank}"


_world_by_size: dict[int, World] = {}


def _run(
    fn: Callable[..., Any],
    args: Sequence[Any],
    world_size: int,
    *,
    timeout_s: float,
    grace_s: float,
    fresh_world: bool = False,
    leaves_on_failure: bool = False,
) -> list[Outcome]:
    """Each rank's outcome; the world goes back to the pool only if every rank returned."""
    world = None if fresh_world else _world_by_size.pop(world_size, None)
    if world is None:
        world = World(world_size)
    world.resume()
    is_reusable = False
    try:
        outcomes = world.run(
            fn,
            args,
            timeout_s=timeout_s,
            grace_s=grace_s,
            leaves_on_failure=leaves_on_failure,
        )
        is_reusable = not fresh_world and all(
            outcome.has_returned
            and outcome.num_groups <= MOST_GROUPS
            and not outcome.is_watched  # who is stopped gives no sign
            for outcome in outcomes
        )
    finally:  # also when pytest-timeout interrupts us here
        if is_reusable:
            world.pause()
            _world_by_size[world_size] = world
        else:
            world.kill()
    return outcomes


@atexit.register
def _close_worlds() -> None:
    while _world_by_size:
        _, world = _world_by_size.popitem()
        world.close()


def _describe_failure(outcomes: Sequence[Outcome]) -> str:
    """Who failed first and how, then whoever died or hung."""
    world_size = len(outcomes)
    parts = []
    raised = [outcome for outcome in outcomes if outcome.exception_name is not None]
    died = [outcome for outcome in outcomes if outcome.exit_code is not None]
    hung = [outcome for outcome in outcomes if outcome.hung_at is not None]
    if raised:
        first = min(raised, key=lambda outcome: outcome.ended_at_s)
        word = "failed first" if _is_first(first, died) else "failed too"
        parts.append(f"rank {first.rank} of {world_size} {word}:\n{first.traceback}")
    if died:
        codes = {outcome.rank: outcome.exit_code for outcome in died}
        deaths = f"ranks died without a traceback; exit codes {codes}"
        parts.insert(1 if raised and _is_first(first, died) else 0, deaths)
    if hung:
        waited_s = max(outcome.duration_s for outcome in hung)
        ranks = [outcome.rank for outcome in hung]
        parts.append(f"ranks {ranks} were still running after {waited_s:.1f} s")
        parts += [f"rank {outcome.rank} was at:\n{outcome.hung_at}" for outcome in hung]
    return "\n".join(parts)


def _is_first(outcome: Outcome, others: Sequence[Outcome]) -> bool:
    return all(outcome.ended_at_s <= other.ended_at_s for other in others)


# Below: what runs in a rank's process.

_rank_cache: dict[Any, Any] | None = None


def _serve(
    rank: int, world_size: int, store_port: int, connection: Connection, stack_path: str
) -> NoReturn:
    """Join the world, then answer one case after the other until the pipe ends."""
    import threading
    from multiprocessing import forkserver

    from torch.distributed import distributed_c10d

    from shardhet.comm.channel import progress

    # A rank that is stopped cannot see that pytest is gone; the fork server, its parent, does,
    # unless a rank keeps it alive.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = server._forkserver_address = None
    global _rank_cache
    _rank_cache = {}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's, which then ends us
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    stack_file = Path(stack_path).open("w")  # noqa: SIM115 -- open until the process ends
    outcome = _attempt(rank, partial(_join, rank, world_size, store_port, stack_file))
    connection.send_bytes(pickle.dumps(outcome))
    num_cases = 0
    while True:
        try:
            case: _Case = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        outcome = _attempt(rank, partial(_call, rank, case))
        outcome = replace(
            outcome,
            num_groups=len(distributed_c10d._world.pg_map),
            is_watched=progress.is_watched,
        )
        connection.send_bytes(_pickled(outcome))
        if case.leaves_on_failure and not outcome.has_returned:
            os._exit(1)
        num_cases += 1
        if num_cases % CASES_PER_COLLECTION == 0:
            gc.collect()


def _leave_with_parent() -> None:
    """End this process when pytest's is gone, even in the middle of a case."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _join(rank: int, world_size: int, store_port: int, stack_file: IO[str]) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    faulthandler.enable()  # a crash leaves its stack on stderr
    faulthandler.register(signal.SIGUSR1, file=stack_file)
    torch.set_num_threads(1)
    store = TCPStore(HOST, store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S * patience()),
    )
    from shardhet import watch_ranks

    watch_ranks(hang_timeout_s=0)  # tests that want a watch say so
    gc.collect()
    gc.freeze()  # torch's own objects are never garbage: later collections skip them


def _call(rank: int, case: _Case) -> Any:
    import torch

    os.environ["PYTEST_CURRENT_TEST"] = case.test
    fn, args = pickle.loads(case.call)  # may import the test's module, so before the seeds
    torch.manual_seed(0)
    random.seed(0)
    return fn(rank, *args)


def _attempt(rank: int, action: Callable[[], Any]) -> Outcome:
    started_at_s = time.monotonic()
    try:
        with warnings.catch_warnings():
            # pytest's own filter stops at its process
            warnings.simplefilter("error", FutureWarning)
            value = action()
    except BaseException as error:
        ended_at_s = time.monotonic()
        return Outcome(
            rank=rank,
            exception_name=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc(),
            duration_s=ended_at_s - started_at_s,
            ended_at_s=ended_at_s,
        )
    ended_at_s = time.monotonic()
    return Outcome(
        rank=rank, value=value, duration_s=ended_at_s - started_at_s, ended_at_s=ended_at_s
    )


def _pickled(outcome: Outcome) -> bytes:
    """The outcome as bytes; a value that cannot travel is that rank's failure."""
    try:
        return pickle.dumps(outcome)
    except Exception:
        failure = _attempt(outcome.rank, partial(pickle.dumps, outcome.value))
        return pickle.dumps(failure)
