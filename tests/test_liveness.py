"""Who is accused, and who is not, from the heartbeats of all ranks alone."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardhet
from shardhet.comm import devices
from shardhet.comm.channel import progress
from shardhet.comm.failure import Failure, FailureKind, ProcessState
from shardhet.comm.liveness import ending, watch
from shardhet.comm.liveness.diagnosis import (
    LONG_FACTOR,
    MUTUAL_FACTOR,
    SECONDS_FOR_THE_GONE,
    SILENCE_OF_THE_GONE_S,
    SeenPeer,
    diagnose,
    diagnose_store,
    panel,
    standstill,
)
from shardhet.comm.liveness.ending import (
    EXIT_STATUS,
    GREETING_WITHIN_S,
    MOST_GREETING,
    OF_THIS_RANK,
    Connections,
    Ending,
    end_with_launcher,
    interface_towards,
    launcher_of,
)
from shardhet.comm.liveness.heartbeat import Heartbeat, OwnRank, activity_of, stack_of
from tests.worlds import run_ranks, run_ranks_expecting_failure, wait_until

PATIENCE_S = 30.0
LONGER_S = 31.0
LONG_S = LONG_FACTOR * PATIENCE_S + 1


def beat(rank: int, **changes: Any) -> Heartbeat:
    base = Heartbeat(
        rank=rank,
        name=f"rank {rank} (cpu)",
        host="alpha",
        pid=100 + rank,
        number=7,
        num_steps=5,
        step=5,
        doing="forward of unit 'layers.1'",
        is_waiting=False,
        is_long=False,
        stalled_s=0.1,
        timeout_s=PATIENCE_S,
        where="model.py:12",
    )
    return replace(base, **changes)


def seen(rank: int, *, silent_s: float = 0.0, process: Any = None, **changes: Any) -> SeenPeer:
    return SeenPeer(
        last=beat(rank, **changes),
        silent_s=silent_s,
        process=process or ProcessState.UNKNOWN,
    )


WAITING = beat(0, is_waiting=True, stalled_s=LONGER_S)


def fault(
    *peers: SeenPeer, own: Heartbeat = WAITING
) -> tuple[FailureKind, tuple[int, ...]] | None:
    failure = diagnose(own, {each.last.rank: each for each in peers})
    if failure is None:
        return None
    assert Failure.from_json(failure.to_json()) == failure
    assert failure.what.splitlines()[0][:40].strip() in panel(failure)
    return failure.kind, failure.ranks


def test_a_rank_without_heartbeats_is_accused_after_the_patience() -> None:
    assert fault(seen(1, silent_s=LONGER_S)) == (FailureKind.SILENT, (1,))
    assert fault(seen(1, silent_s=PATIENCE_S - 1)) is None


def test_a_rank_that_computes_without_progress_is_accused_and_no_other() -> None:
    waits = seen(2, is_waiting=True, stalled_s=LONGER_S)
    assert fault(seen(1, stalled_s=LONGER_S), waits) == (FailureKind.HUNG, (1,))


def test_of_several_that_stand_still_those_furthest_behind_are_accused() -> None:
    # On an accelerator, ranks that wait for their device may look as if they computed.
    ahead = seen(1, stalled_s=LONGER_S, num_steps=6)
    behind = [seen(rank, stalled_s=LONGER_S) for rank in (2, 3)]
    assert fault(ahead, *behind) == (FailureKind.HUNG, (2, 3))


@pytest.mark.parametrize(
    "own",
    [
        beat(0, is_waiting=False, stalled_s=LONG_S),
        beat(0, is_waiting=True, stalled_s=PATIENCE_S - 1),
        beat(0, is_waiting=True, stalled_s=LONGER_S, num_steps=0),  # set-up
        beat(0, is_waiting=True, stalled_s=LONGER_S, timeout_s=60.0),  # its steps are slow
    ],
)
def test_a_rank_that_does_not_wait_in_vain_accuses_nobody(own: Heartbeat) -> None:
    peers = [seen(1, silent_s=LONGER_S), seen(2, stalled_s=LONGER_S), seen(3, has_left=True)]
    assert fault(*peers, own=own) is None


def test_in_a_call_with_a_limit_the_patience_is_that_limit() -> None:
    own = beat(0, is_waiting=True, stalled_s=6.0, limit_s=5.0)
    assert fault(seen(1, stalled_s=6.0), own=own) == (FailureKind.HUNG, (1,))
    assert fault(seen(1, stalled_s=6.0), own=replace(own, num_steps=0)) == (
        FailureKind.HUNG,
        (1,),
    )
    assert fault(seen(1, stalled_s=6.0, is_long=True), own=own) is None
    assert fault(seen(1, stalled_s=4.0), own=own) is None
    own = replace(own, stalled_s=5.0 * LONG_FACTOR)
    is_long = seen(1, stalled_s=5.0 * LONG_FACTOR, is_long=True)
    assert fault(is_long, own=own) == (FailureKind.HUNG, (1,))


def test_a_peer_that_has_seen_slower_steps_is_believed() -> None:
    slow = seen(2, is_waiting=True, stalled_s=LONGER_S, timeout_s=60.0)
    assert fault(seen(1, stalled_s=LONGER_S), slow) is None


def test_a_rank_at_work_is_not_accused_and_protects_the_others() -> None:
    waits = seen(2, is_waiting=True, stalled_s=LONG_S)
    for at_work in (
        seen(1, stalled_s=PATIENCE_S - 1),
        seen(1, stalled_s=LONG_S - 2, is_long=True),
        seen(1, is_waiting=True, stalled_s=1.0),  # it made progress a moment ago
    ):
        own = beat(0, is_waiting=True, stalled_s=LONG_S)
        assert fault(at_work, waits, own=own) is None
    assert fault(seen(1, stalled_s=LONG_S, is_long=True), waits) == (FailureKind.HUNG, (1,))


def test_in_a_long_phase_signs_may_be_missing_unless_the_process_is_stopped() -> None:
    busy = {"silent_s": LONGER_S, "is_long": True}
    assert fault(seen(1, **busy)) is None  # it may hold the interpreter's lock
    stopped = seen(1, **busy, process=ProcessState.STOPPED)
    assert fault(stopped) == (FailureKind.SILENT, (1,))
    own = replace(WAITING, stalled_s=LONG_S)
    assert fault(seen(1, silent_s=LONG_S, is_long=True), own=own) == (FailureKind.SILENT, (1,))


def test_a_host_that_does_not_answer_has_no_longer_patience_in_a_long_phase() -> None:
    """As where the last sign came out of ``checkpoint.save``."""
    cut = seen(1, silent_s=LONGER_S, is_long=True, process=ProcessState.CUT)
    assert fault(cut) == (FailureKind.SILENT, (1,))
    assert fault(replace(cut, process=ProcessState.UNKNOWN)) is None
    assert fault(replace(cut, silent_s=PATIENCE_S - 1)) is None


def test_a_connection_that_times_out_is_one_to_a_host_that_does_not_answer() -> None:
    hub, (ours, theirs) = Connections(0), socket.socketpair()
    ours.setblocking(False)
    hub._of_rank[1] = ours
    hub.look()
    assert hub.ended == {}

    class Cut:
        def recv(self, num_bytes: int) -> bytes:
            raise TimeoutError

        def close(self) -> None:
            """Nothing to do."""

    hub._of_rank[1] = Cut()  # type: ignore[assignment]
    hub.look()
    assert (hub.ended, hub._of_rank) == ({1: ProcessState.CUT}, {})
    ours.close()
    theirs.close()


def test_silent_connections_take_few_files_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub, peer = Connections(0, interface=""), Connections(1)
    port = int(hub.address.split()[0])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    hub.look()
    assert len(hub._greeting) <= MOST_GREETING
    peer.connect(0, ["127.0.0.1"], hub.address)

    def is_connected() -> bool:
        hub.look()
        return bool(peer._of_rank)

    wait_until(is_connected, seconds=10)
    later_s = time.monotonic() + GREETING_WITHIN_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    hub.look()
    assert not hub._greeting
    for each in silent:
        each.close()
    hub.close()
    peer.close()


def test_a_process_that_is_gone_is_named_soon() -> None:
    own = replace(WAITING, stalled_s=SECONDS_FOR_THE_GONE)
    gone = seen(1, process=ProcessState.GONE, silent_s=SILENCE_OF_THE_GONE_S)
    assert fault(gone, own=own) == (FailureKind.GONE, (1,))
    assert fault(gone, own=replace(own, stalled_s=SECONDS_FOR_THE_GONE - 1)) is None
    # Its last sign, which may say that it leaves, has perhaps not been read.
    assert fault(seen(1, process=ProcessState.GONE), own=own) is None
    # In another container its number says nothing: it gives signs.
    assert fault(seen(1, process=ProcessState.GONE, silent_s=0.5), own=own) is None


def test_without_ipv6_a_rank_listens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    create, families = socket.create_server, []

    def refuses(address: Any, *, family: int, **others: Any) -> socket.socket:
        families.append(family)
        if family == refused or refused is None:
            raise OSError("address not available")
        return create(address, family=family, **others)

    monkeypatch.setattr(socket, "create_server", refuses)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    refused: int | None = socket.AF_INET6
    hub = Connections(0, interface="")
    assert families == [socket.AF_INET6, socket.AF_INET]
    assert hub.address
    hub.close()
    refused = None
    assert not Connections(0, interface="").address


def test_on_several_hosts_a_rank_listens_at_one_address_alone() -> None:
    assert interface_towards("127.0.0.1") == interface_towards(None) == ""
    assert interface_towards("no.such.host.invalid") == ""
    hub, peer = Connections(0, interface="127.0.0.2"), Connections(1)
    port = int(hub.address.split()[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    peer.connect(0, [], hub.address)

    def is_connected() -> bool:
        hub.look()
        return bool(peer._of_rank)

    wait_until(is_connected, seconds=10)
    hub.close()
    peer.close()


def after_a_look(connections: Connections) -> set[int]:
    connections.look()
    return {rank for rank, state in connections.ended.items() if state is ProcessState.GONE}


def test_a_connection_tells_of_the_end_of_a_process_on_another_host() -> None:
    hub = Connections(0, interface="")
    peers = {rank: Connections(rank) for rank in (1, 2)}
    stranger = Connections(3)
    port, secret = hub.address.split()
    for each in peers.values():
        assert each.address == ""
        each.connect(0, ["no.such.host.invalid", "127.0.0.1"], hub.address)
    stranger.connect(0, ["127.0.0.1"], f"{port} {secret[::-1]}")

    scanner = socket.create_connection(("127.0.0.1", int(port)))
    scanner.sendall(b"\xff\xfe 1\n")

    def are_connected() -> bool:
        hub.look()
        return len(hub._of_rank) == 2 and all(each._of_rank for each in peers.values())

    wait_until(are_connected, seconds=10)
    assert set(hub._of_rank) == {1, 2}
    child = os.fork()  # as a DataLoader's worker, which may outlive its parent
    if not child:
        time.sleep(20)
        os._exit(0)
    peers[2].close()
    wait_until(lambda: after_a_look(hub) == {2}, seconds=5)
    assert scanner.recv(1) == b""  # it was turned away
    scanner.close()
    hub.close()
    wait_until(lambda: after_a_look(peers[1]) == {0}, seconds=5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    peers[1].close()


def test_a_stopped_process_has_no_longer_patience_before_the_first_step() -> None:
    own = replace(WAITING, num_steps=0)
    assert fault(seen(1, silent_s=LONGER_S), own=own) is None  # it may be starting
    stopped = seen(1, silent_s=LONGER_S, process=ProcessState.STOPPED)
    assert fault(stopped, own=own) == (FailureKind.SILENT, (1,))


def test_a_process_in_a_debugger_is_never_accused() -> None:
    own = replace(WAITING, stalled_s=LONG_S)
    for traced in (
        seen(1, silent_s=LONG_S, process=ProcessState.TRACED),
        seen(1, stalled_s=LONG_S, is_debugged=True),
    ):
        assert fault(traced, seen(2, is_waiting=True, stalled_s=LONG_S), own=own) is None


def test_one_line_says_who_waits_for_whom_and_in_what() -> None:
    own = replace(WAITING, stalled_s=20.0)
    stopped = seen(1, silent_s=19.0, is_waiting=True, process=ProcessState.STOPPED)
    busy = seen(2, doing="loading the next batch")
    said = standstill(own, {1: stopped, 2: busy, 3: seen(3, is_waiting=True)})
    assert said == (
        "rank 0 (cpu) has made no progress for 20 s in forward of unit 'layers.1' of step 6, "
        "at model.py:12: it waits for others. rank 1 (cpu) is in forward of unit 'layers.1' of "
        "step 6, at model.py:12, and silent for 19 s: its process is stopped (SIGSTOP); rank 2 "
        "(cpu) is in loading the next batch of step 6, at model.py:12."
    )
    assert standstill(replace(own, is_waiting=False), {}).endswith("others may wait for it.")


def test_a_wait_is_told_of_after_a_third_of_the_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that are measured take turns, for as long as their patience says."""
    said: list[str] = []
    monkeypatch.setattr(watch, "_say", said.append)
    one = SimpleNamespace(_has_warned=False, _num_reads=1, _seen={}, _rank=0)
    for stalled_s, num_said in ((19.0, 0), (59.0, 0), (60.0, 1), (70.0, 1)):
        own = replace(WAITING, stalled_s=stalled_s, timeout_s=180.0)
        watch.Watch._warn_of_standstill(one, own)  # type: ignore[arg-type]
        assert len(said) == num_said


def test_where_steps_are_long_the_patience_is_five_of_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = OwnRank(0, torch.device("cpu"))
    before = progress.num_steps
    found = []
    for num_steps, passed_s in ((1, 60.0), (2, 4.0), (3, 10.0), (4, 1.0)):
        monkeypatch.setattr(progress, "num_steps", before + num_steps)
        found.append(own.look(passed_s, 15.0).timeout_s)
    assert found == [15.0, 20.0, 50.0, 50.0]  # the first step contains the set-up


def lose_the_launcher(rank: int, path: str, is_lost_first: bool) -> None:
    os.environ[OF_THIS_RANK] = "a file"
    if agent := os.fork():
        awaited = Path(path) if is_lost_first else Path(path).with_name("watched")
        while not awaited.exists():
            time.sleep(0.01)
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
    elif parent := os.fork():  # the agent
        time.sleep(60.0 * bool(parent))
    else:
        unfinished = Path(path).with_name("unfinished")
        unfinished.write_text(str(os.getpid()))
        agent = os.getppid()
        unfinished.rename(path)
        while is_lost_first and os.getppid() == agent:
            time.sleep(0.01)
        end_with_launcher()
        Path(path).with_name("watched").touch()
        time.sleep(60.0)
        os._exit(0)


@pytest.mark.parametrize("is_lost_first", [False, True])
def test_a_rank_ends_within_seconds_of_its_launcher(
    is_lost_first: bool, tmp_path: Path
) -> None:
    run_ranks(lose_the_launcher, 1, str(tmp_path / "pid"), is_lost_first, fresh_world=True)
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 10.0
    while ProcessState.of(pid) is not ProcessState.GONE:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_a_launcher_is_found_behind_a_shell(tmp_path: Path) -> None:
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 60; true"], env={**os.environ, OF_THIS_RANK: str(tmp_path)}
    )
    try:
        children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
        while not (text := children.read_text()):
            time.sleep(0.01)
        rank = int(text)
        assert launcher_of(rank) == launcher_of(shell.pid) == os.getpid()
        assert launcher_of(os.getpid()) is None
    finally:
        shell.kill()
        shell.wait()
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def test_a_program_that_has_ended_is_accused_only_if_nobody_is_at_work() -> None:
    left = seen(1, has_left=True, process=ProcessState.GONE)
    assert fault(left) == (FailureKind.GONE, (1,))
    assert fault(left, seen(2)) is None


def test_ranks_that_all_wait_are_all_shown_after_twice_the_patience() -> None:
    peers = [seen(rank, is_waiting=True, stalled_s=LONG_S) for rank in (1, 2)]
    assert fault(*peers) is None
    own = replace(WAITING, stalled_s=MUTUAL_FACTOR * PATIENCE_S)
    assert fault(*peers, own=own) == (FailureKind.HUNG, ())


def test_a_store_that_does_not_answer_is_named_with_the_rank_that_holds_it() -> None:
    failure = diagnose_store(WAITING, LONGER_S, "rank 0", 0)
    assert failure is not None
    assert failure.ranks == (0,)
    assert failure.what.startswith("rank 0, which holds the rendezvous store, or the network")
    assert diagnose_store(WAITING, PATIENCE_S - 1, "rank 0", 0) is None
    assert diagnose_store(replace(WAITING, is_waiting=False), LONGER_S, "rank 0", 0) is None
    assert diagnose_store(replace(WAITING, num_steps=0), LONGER_S, "rank 0", 0) is None


@pytest.mark.parametrize(
    ("stalled_s", "has_ended", "is_busy"),
    [(100.0, False, False), (200.0, False, True), (200.0, True, False)],
)
def test_a_host_that_waits_for_its_accelerator_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, stalled_s: float, has_ended: bool, is_busy: bool
) -> None:
    stream = SimpleNamespace(query=lambda: has_ended)
    module = SimpleNamespace(current_stream=lambda device: stream)
    monkeypatch.setattr(devices, "module_of", lambda device: module)
    monkeypatch.setattr("shardhet.comm.liveness.heartbeat.local_device_spec", str)
    rank = OwnRank(0, torch.device("cuda", 0))
    rank.stalled_s = stalled_s
    assert rank._device_is_busy(timeout_s=300.0) is is_busy
    on_host = OwnRank(0, torch.device("cpu"))
    on_host.stalled_s = stalled_s
    assert not on_host._device_is_busy(timeout_s=300.0)


WAITS = "def wait(fifo):\n    return fifo.read_text()\n"


@pytest.mark.parametrize(
    ("owner", "is_waiting"),
    [("comm/channel.py", True), ("fsdp/step/calls.py", False), (None, False)],
)
def test_a_rank_that_reads_a_file_while_it_waits_is_waiting(
    owner: str | None, is_waiting: bool, tmp_path: Path
) -> None:
    # As the wait for a neighbour does, which looks into /proc whether its process is there.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    file = __file__ if owner is None else str(Path(shardhet.__file__).parent / owner)
    names: dict[str, Any] = {}
    exec(compile(WAITS, file, "exec"), names)
    thread = threading.Thread(target=names["wait"], args=(fifo,))
    thread.start()
    ids = frozenset({thread.ident or 0})
    while "pathlib.py" not in stack_of(ids):
        time.sleep(0.01)
    found = activity_of(ids)
    fifo.write_text("done")
    thread.join()
    assert found.is_waiting is is_waiting


def end_with_a_word_unwritten(rank: int, path: str) -> None:
    sys.stdout = Path(path).open("w")  # noqa: SIM115 -- the end of the process closes it
    sys.stdout.write("the last word\n")
    ending.GRACE_S = 0.0
    end = Ending("rank 0 stands still", is_at_fault=True, breaks_after_s=0.0)
    end.advance(1.0, is_waiting=True, stack="nowhere")


def test_what_a_program_has_printed_is_written_before_it_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "output"
    [outcome] = run_ranks_expecting_failure(end_with_a_word_unwritten, 1, str(path))
    assert outcome.exit_code == EXIT_STATUS
    assert path.read_text() == "the last word\n"
