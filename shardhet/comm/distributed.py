"""Who is who among the processes, what they agree on, and how one failure ends them all."""

import atexit
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from shardhet.comm.shared_host.neighbours import (
    LostPeerError,
    Neighbours,
    is_running,
    timeout_of,
)
from shardhet.records.cluster import DeviceSpec
from shardhet.records.plan import Plan

SECONDS_TO_HEAR_THE_CAUSE = 3.0
SECONDS_BETWEEN_LOOKS = 0.05
# To a call that ranks make right after another one they made together, and that is often
# made by rank zero alone by mistake.
SECONDS_FOR_ALL_TO_COME = 30.0
COLLECTIVE_CALLS = (
    "model(...)",
    "model.backward",
    "clip_grad_norm_",
    "state_dict",
    "load_state_dict",
    "exchange",
    "torch.nn.utils.get_total_norm",
    "p.grad.norm",
    "p.grad.sum",
    "p.grad.mean",
    "p.grad.max",
    "p.grad.min",
    "GradScaler",
    "gather_units",
    "unit_by_unit",
)


# All records that keep process groups alive, see _let_go_of_groups.
_holders: list["ref[Channel | Communicators]"] = []


@atexit.register
def _let_go_of_groups() -> None:
    """End the threads of destroyed groups before the interpreter ends.

    A gloo group that outlives ``destroy_process_group``, because a model still refers to it,
    has threads that may want the interpreter while it is torn down, which aborts the process
    (seen in 4 of 16 runs with torch 2.13).
    """
    for holder in (each() for each in _holders):
        for name in ("group", "gather", "reduce", "control"):
            if hasattr(holder, name):
                object.__setattr__(holder, name, None)
    _made_by_group.clear()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Channel:
    """A process group in plan order: position ``i`` is played by ``rank_by_position[i]``.

    ``group`` is None where there is only one process.
    """

    group: dist.ProcessGroup | None
    rank_by_position: tuple[int, ...]  # ranks within ``group``
    position: int  # this process's own
    neighbours: Neighbours | None = None  # the same processes, if they share memory

    def __post_init__(self) -> None:
        _holders.append(ref(self, _holders.remove))

    @classmethod
    def of_world(cls) -> Self:
        """All ranks in their own order, over the default group: no plan is needed for it."""
        assert dist.group.WORLD is not None, "init_process_group comes first"
        ranks = tuple(range(dist.get_world_size()))
        return cls(dist.group.WORLD, ranks, dist.get_rank())

    @property
    def world_size(self) -> int:
        """How many processes speak through it."""
        return len(self.rank_by_position)

    def exchange(
        self, values: Sequence[float], within_s: float | None = None
    ) -> list[list[float]]:
        """Every process's ``values``, by position.  Blocks until all have called it.

        Travels over the host (gloo), so no accelerator waits for it.  Raises
        ``TimeoutError`` where they do not come ``within_s`` (None: the group's timeout).
        """
        rows: list[list[float]] = self.gather_rows(
            torch.tensor(values, dtype=torch.float64), within_s
        ).tolist()
        return rows

    def enter(
        self, call: str, values: Sequence[float] = (), *, within_s: float | None = None
    ) -> list[list[float]]:
        """Every process's ``values`` (at most three), once all have entered the same call.

        Raises ``RuntimeError`` on all of them where they have not, and ``TimeoutError`` where
        some do not come ``within_s``.
        """
        row = [float(COLLECTIVE_CALLS.index(call)), *values, 0.0, 0.0, 0.0]
        try:
            rows = self.exchange(row[:4], within_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"{call}: not all ranks have called it, and this one has waited "
                f"({error}). It is a call that all ranks make together: make it on every "
                "rank, outside of `if rank == 0`."
            ) from error
        names = [COLLECTIVE_CALLS[int(row[0])] for row in rows]
        if len(set(names)) > 1:
            raise RuntimeError(
                f"ranks are in different calls: {names} in plan order. Each of these is a call "
                f"that all ranks make together; make them in the same order on every rank."
            )
        return [row[1 : 1 + len(values)] for row in rows]

    def gather_rows(self, row: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        """Every process's ``row``, [n], stacked by position to [world_size, n]."""
        if self.group is None:
            return row[None]
        if self.neighbours is not None and row.device.type == "cpu":
            rows = self.neighbours.exchange(row.tolist(), within_s)
            ordered = [rows[rank] for rank in self.rank_by_position]
            return torch.tensor(ordered, dtype=row.dtype)
        gathered = [torch.empty_like(row) for _ in self.rank_by_position]
        started_at_s = time.monotonic()
        try:
            if within_s is None:
                dist.all_gather(gathered, row, group=self.group)
            else:
                gather = dist.all_gather(gathered, row, group=self.group, async_op=True)
                gather.wait(timedelta(seconds=within_s))
        except RuntimeError as error:
            if within_s is not None and time.monotonic() - started_at_s >= within_s:
                raise TimeoutError(f"for {within_s:g} s") from error
            raise LostPeerError(str(error)) from error
        return torch.stack([gathered[rank] for rank in self.rank_by_position])

    def exchange_objects(self, value: Any) -> list[Any]:
        """Every process's ``value`` (anything picklable), by position."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(gathered, value, group=self.group)
        except RuntimeError as error:
            raise LostPeerError(str(error)) from error
        return [gathered[rank] for rank in self.rank_by_position]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Communicators:
    """The process groups that one HetFSDP speaks through, each with its own queue.

    Gathers and reductions have a group each, so that one does not wait in line behind the
    other; agreements between hosts travel over gloo whatever the device is.
    """

    gather: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    # For each of the three, where all processes of the group share a host's memory.
    neighbours: tuple[Neighbours, ...] | None = None

    def __post_init__(self) -> None:
        _holders.append(ref(self, _holders.remove))

    @classmethod
    def over(cls, group: dist.ProcessGroup | None, device: torch.device) -> Self:
        """Groups over the ranks of ``group``, made on first use and kept as long as it lives.

        Collective over ``group``.  Models that share a group share them; the program that
        destroys the process group destroys them with it.
        """
        if group is None or group.size() == 1:
            return cls(gather=None, reduce=None, control=None)
        made = _made_by_group.setdefault(group, {})
        if device.type not in made:
            made[device.type] = _make_groups(group, device)
        gather, reduce, control, neighbours = made[device.type]
        return cls(
            gather=gather, reduce=reduce, control=control or group, neighbours=neighbours
        )

    def channels(self, seats: tuple[int, ...], rank: int) -> list[Channel]:
        """For gathers, for reductions and for agreements, in the order of ``seats``."""
        groups = (self.gather, self.reduce, self.control)
        position = seats.index(rank)
        return [
            Channel(group, seats, position, neighbours)
            for group, neighbours in zip(groups, self.neighbours or (None,) * 3, strict=True)
        ]

    def break_connections(self) -> None:
        """End every collective that any peer waits in, now or later, with an error."""
        for each in self.neighbours or ():
            each.give_up()
        for group in (self.gather, self.reduce, self.control):
            if group is not None:
                _break(group)


# None for the control group where the given group can serve: the value must not keep its key.
_Groups = tuple[
    dist.ProcessGroup,
    dist.ProcessGroup,
    dist.ProcessGroup | None,
    tuple[Neighbours, ...] | None,
]
_made_by_group: WeakKeyDictionary[dist.ProcessGroup, dict[str, _Groups]] = WeakKeyDictionary()


def _make_groups(group: dist.ProcessGroup, device: torch.device) -> _Groups:
    backend = group._get_backend(device).name()
    ranks = dist.get_process_group_ranks(group)
    timeout = timeout_of(group, device)

    def new_group(backend: str) -> dist.ProcessGroup:
        return dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True
        )

    gather, reduce = new_group(backend), new_group(backend)
    if backend == "gloo":
        is_on_host = device.type == "cpu"
        return gather, reduce, None, Neighbours.meet(group, 3) if is_on_host else None
    for each in (gather, reduce):
        # NCCL wants all ranks in a communicator's first call; later ones may be of pairs.
        dist.all_reduce(torch.zeros(1, device=device), group=each)
    return gather, reduce, new_group("gloo"), None


def _break(group: dist.ProcessGroup) -> None:
    if dist.get_backend(group) != "gloo":
        with suppress(RuntimeError):
            group.abort()
        return
    # gloo's abort() leaves point-to-point waits alone; a receive that times out closes the
    # connections to all peers, and their waits end at once (measured with torch 2.13).  One
    # from a peer that is gone already fails at once and closes nothing, so all are tried.
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, 2**31 - 1).wait(timedelta(milliseconds=1))


class Lifeline:
    """How a failure on one rank becomes the same message on every rank, within seconds.

    The rank that fails writes what happened into the rendezvous store and then breaks its
    connections.  Peers find their collectives ended, break their own connections so that
    ranks further away learn of it, and look the cause up in the store.  Where nobody wrote
    one, the ranks that do not sign off are those that died.
    """

    def __init__(
        self, communicators: Communicators, channel: Channel, names: Sequence[str]
    ) -> None:
        self.doing = "starting"  # what this rank is at; part of its message
        self._communicators = communicators
        self._channel = channel
        self._names = tuple(names)  # by position
        self._is_broken = False
        if channel.group is not None:
            process = json.dumps([socket.gethostname(), os.getpid()])
            self._store.set(f"shardhet_process_{channel.position}", process)

    @contextmanager
    def guard(self, doing: str | None = None) -> Iterator[None]:
        """Around everything that other ranks may wait for."""
        self.doing = doing or self.doing
        try:
            yield
            self.doing = "the program around HetFSDP"
        except LostPeerError as error:
            raise RuntimeError(self._hear_the_cause(error)) from error
        except Exception as error:
            self._announce(error)
            raise

    def _announce(self, error: Exception) -> None:
        name = self._names[self._channel.position]
        error.add_note(f"{name} failed in {self.doing}.")
        if self._channel.group is None or self._is_broken:
            return
        self._is_broken = True
        message = f"{name} failed in {self.doing}: {type(error).__name__}: {error}"
        with suppress(RuntimeError):
            self._store.compare_set("shardhet_failure", "", message)
        self._communicators.break_connections()

    def _hear_the_cause(self, error: LostPeerError) -> str:
        if not self._is_broken:
            self._is_broken = True
            self._communicators.break_connections()
        try:
            return self._look_up_the_cause(error)
        except RuntimeError:  # the store is gone, and with it the process that kept it
            return (
                "The process that keeps the rendezvous store is gone while this rank was in "
                f"{self.doing} ({error}). Look at the log and exit code of the rank or "
                "launcher that was started first."
            )

    def _look_up_the_cause(self, error: LostPeerError) -> str:
        store = self._store
        store.set(f"shardhet_signed_off_{self._channel.position}", "1")
        deadline = time.monotonic() + SECONDS_TO_HEAR_THE_CAUSE
        while time.monotonic() < deadline:
            if store.check(["shardhet_failure"]):
                cause = store.get("shardhet_failure").decode()
                return f"{cause}\nAll ranks stop. Mend the cause on that rank and start again."
            time.sleep(SECONDS_BETWEEN_LOOKS)
        silent = [
            name
            for position, name in enumerate(self._names)
            if not store.check([f"shardhet_signed_off_{position}"])
            and not self._is_known_to_run(position)
        ]
        if not silent:
            return f"The ranks lost each other in {self.doing}: {error}. Check the network."
        return (
            f"{', '.join(silent)} ended without a message while this rank was in "
            f"{self.doing}. Look at its exit code and log: killed, out of memory, or cut off."
        )

    def _is_known_to_run(self, position: int) -> bool:
        """Whether the rank is a living process of this host, busy with something else."""
        host, pid = json.loads(self._store.get(f"shardhet_process_{position}"))
        return host == socket.gethostname() and is_running(pid)

    @property
    def _store(self) -> Any:  # a rendezvous store; torch does not export its type
        assert self._channel.group is not None
        return self._channel.group.get_group_store()


@dataclass(frozen=True, slots=True)
class Members:
    """The processes of a plan, each in the seat that its device fits."""

    gather: Channel
    reduce: Channel
    control: Channel
    lifeline: Lifeline

    @classmethod
    def meet(
        cls,
        group: dist.ProcessGroup | None,
        plan: Plan,
        *,
        device: torch.device,
        device_spec: DeviceSpec | None,
    ) -> Self:
        """Find out who plays which device of ``plan``.  Collective over ``group``.

        Raises ``ValueError`` on every rank where plans differ or devices do not fit.
        """
        communicators = Communicators.over(group, device)
        ranks = tuple(range(1 if group is None else group.size()))
        rank = 0 if group is None else group.rank()
        *_, hello = communicators.channels(ranks, rank)
        with Lifeline(communicators, hello, [f"rank {r}" for r in ranks]).guard():
            announced = hello.exchange_objects(device_spec or local_device_spec(device))
            check_same_on_all_ranks(plan.to_json(), what="plan", channel=hello)
            seats = match_devices([each.device for each in plan.ranks], announced)
        gather, reduce, control = communicators.channels(seats, rank)
        names = [f"rank {r} ({announced[r]})" for r in seats]
        return cls(
            gather=gather,
            reduce=reduce,
            control=control,
            lifeline=Lifeline(communicators, control, names),
        )


def default_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``group``, else that of all processes; None where this is the only one."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def local_device_spec(device: torch.device) -> DeviceSpec:
    """What this process's device is, asked of the driver (or of the system for a CPU)."""
    host = socket.gethostname()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceSpec(
            host=host,
            kind=properties.name,
            memory_capacity_bytes=properties.total_memory,
            uuid=str(properties.uuid),
        )
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceSpec(host=host, kind=device.type, memory_capacity_bytes=num_bytes)


def match_devices(
    planned: Sequence[DeviceSpec], announced: Sequence[DeviceSpec]
) -> tuple[int, ...]:
    """For each planned device the rank that plays it, whatever order the ranks came in.

    A rank keeps the position of its own number where nothing speaks against it.  Raises
    ``ValueError`` with a table where the devices found do not fit the plan.
    """
    if len(planned) != len(announced):
        raise ValueError(
            f"The plan is for {len(planned)} devices but {len(announced)} ranks were started.\n"
            f"{_device_table(planned, announced)}\n"
            f"Start {len(planned)} ranks or make a plan for {len(announced)} devices."
        )
    position_by_rank: dict[int, int] = {}

    def place(position: int, tried: set[int]) -> bool:  # one augmenting path (Kuhn 1955)
        others = [rank for rank in range(len(announced)) if rank != position]
        for rank in (position, *others):
            if rank in tried or not planned[position].accepts(announced[rank]):
                continue
            tried.add(rank)
            if rank not in position_by_rank or place(position_by_rank[rank], tried):
                position_by_rank[rank] = position
                return True
        return False

    if not all(place(position, set()) for position in range(len(planned))):
        raise ValueError(
            f"The devices found do not fit the plan.\n{_device_table(planned, announced)}\n"
            f"Run the planner on this cluster, or start the ranks on the planned devices."
        )
    return tuple(sorted(position_by_rank, key=lambda rank: position_by_rank[rank]))


def _device_table(planned: Sequence[DeviceSpec], announced: Sequence[DeviceSpec]) -> str:
    rows = [f"  planned {i}: {spec}" for i, spec in enumerate(planned)]
    rows += [f"  rank {i}: {spec}" for i, spec in enumerate(announced)]
    return "\n".join(rows)


def check_same_on_all_ranks(value: Any, *, what: str, channel: Channel) -> None:
    """Raise ``ValueError`` on every rank unless ``value`` (JSON) is equal on all of them.

    The message names the ranks that differ from the majority and the first difference.
    """
    values = [json.dumps(each, sort_keys=True) for each in channel.exchange_objects(value)]
    usual = max(values, key=values.count)  # the first where several are as frequent
    odd = [i for i, each in enumerate(values) if each != usual]
    if odd:
        ranks = [channel.rank_by_position[i] for i in odd]
        shown = _first_difference(usual, values[odd[0]])
        raise ValueError(
            f"{what}: not the same on all ranks. Ranks {ranks} have {shown[1]} where the "
            f"others have {shown[0]}. Give every rank the same {what}."
        )


def _first_difference(a: str, b: str, context: int = 60) -> tuple[str, str]:
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    start = max(0, start - context // 2)
    return a[start : start + context], b[start : start + context]
