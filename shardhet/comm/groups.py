"""The process groups and transports that a model communicates over, made once per group."""

import atexit
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha1
from importlib.metadata import entry_points
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from shardhet.comm import devices
from shardhet.comm.calls import SWITCH, Transport, meet, timeout_of, wants_gloo
from shardhet.comm.channel import Channel, Communicator, holders
from shardhet.comm.collectives import all_gather_uneven, reduce_scatter_uneven
from shardhet.comm.devices import BufferPool
from shardhet.comm.failure import end_waits
from shardhet.records.stages import TwoLevels

GROUPS_FOR_ONE = "SHARDHET_GROUPS_FOR_ONE"
# Read by torch when a communicator is made: messages run on a stream of its own, and would
# queue behind compute.
PRIORITY_OF_NCCL = "TORCH_NCCL_HIGH_PRIORITY"
# What torch 2.15 calls the "nccl" of before, whose use of streams is known (see ``nccl``).
KNOWN_NCCL = "nccl-legacy"


@atexit.register
def _let_go_of_groups() -> None:
    """End the threads of destroyed groups before the interpreter shuts down.

    A gloo group outlives ``destroy_process_group`` if a model still refers to it.  Its threads
    may then need the interpreter while it is being torn down, which aborts the process (seen
    in 4 of 16 runs with torch 2.13).
    """
    for holder in (each() for each in holders):
        for name in ("group", "computing", "levels", "gather", "reduce", "control"):
            if hasattr(holder, name):
                object.__setattr__(holder, name, None)
    _made_by_group.clear()
    _parts_by_group.clear()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Communicators:
    """The process groups that one HetFSDP communicates over, each with its own queue.

    Gathers and reductions have one group each, so that neither queues behind the other.
    Agreements between hosts travel over gloo, whatever the device is.
    """

    gather: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    # One for each of the three groups, if transports carry the traffic instead.
    transports: tuple[Transport, ...] | None = None

    def __post_init__(self) -> None:
        holders.append(ref(self, holders.remove))

    @classmethod
    def over(cls, group: dist.ProcessGroup | None, device: torch.device) -> "Communicators":
        """Return groups over the ranks of ``group``, made on first use and kept as long as it.

        Collective over ``group``.  Models that share ``group`` share the new groups too; a
        program that destroys the process group destroys them with it.

        A group of one rank sends nothing and gets none, unless ``GROUPS_FOR_ONE`` is set: so
        a single GPU can run what NCCL does, on its streams, with every wait.
        """
        is_alone = group is not None and group.size() == 1
        if group is None or (is_alone and not os.environ.get(GROUPS_FOR_ONE)):
            return cls(gather=None, reduce=None, control=None)
        made = _made_by_group.setdefault(group, {})
        kind = f"{devices.backend_of(group, device)} for {device.type}, {wants_gloo()}"
        if kind not in made:
            made[kind] = _make_groups(group, device)
        return replace(made[kind], control=made[kind].control or group)

    def channels(self, rank_by_position: tuple[int, ...], rank: int) -> list[Channel]:
        """The channels for gathers, reductions and agreements, with ranks by position."""
        groups = (self.gather, self.reduce, self.control)
        position = rank_by_position.index(rank)
        return [
            Channel(group, rank_by_position, position, transport)
            for group, transport in zip(groups, self.transports or (None,) * 3, strict=True)
        ]

    def break_connections(self) -> None:
        """Make every collective that a peer waits in, now or later, end with an error."""
        self.give_up()
        end_waits(self.with_parts())

    def give_up(self) -> None:
        """The same, of what transports carry."""
        for each in self.transports or ():
            each.give_up()

    def with_parts(self) -> Iterator[dist.ProcessGroup]:
        """All its groups, and those of some of their ranks that this rank is one of."""
        for group in (self.gather, self.reduce, self.control):
            if group is not None:
                yield from filter(None, _parts_by_group.get(group, {}).values())
                yield group


# The control group is None if the given group can serve: the value must not keep its key alive.
_made_by_group: WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicators]] = (
    WeakKeyDictionary()
)
# Of ranks that compute, of those of one node, or of two stages, None on the others; by the
# group that they are a part of, their purpose and ranks.
_Parts = dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None]
_parts_by_group: WeakKeyDictionary[dist.ProcessGroup, _Parts] = WeakKeyDictionary()


def _make_groups(group: dist.ProcessGroup, device: torch.device) -> Communicators:
    backend = _backend_of_all(group, device)
    count_alike(group, device)
    gather, reduce = (new_group(group, device, backend=backend) for _ in range(2))
    if backend == "gloo":
        is_on_host = devices.is_on_host(device)
        transports = meet(group, 3) if is_on_host else None
        return Communicators(gather, reduce, None, transports)
    for each in (gather, reduce):
        _connect(each, device)
    return Communicators(gather, reduce, new_group(group, device, backend="gloo"))


def _backend_of_all(group: dist.ProcessGroup, device: torch.device) -> str:
    """What carries tensors on ``device``: gloo if it is wanted on any rank.  Collective."""
    backend, host = devices.backend_of(group, device), torch.device("cpu")
    if backend == "gloo":
        return backend
    if not devices.carries(group, host):
        if wants_gloo():
            raise ValueError(
                f"{SWITCH}=gloo: but the process group is made for {backend} alone. Call "
                "dist.init_process_group('gloo'); with HetTrainer, set ddp_backend='gloo' in "
                "the training arguments."
            )
        return backend
    is_wanted = torch.tensor([int(wants_gloo())])
    dist.all_reduce(is_wanted, dist.ReduceOp.MAX, group=group)
    return "gloo" if is_wanted.item() else backend


def new_group(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    backend: str,
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """A new group of the same processes, or of ``ranks`` of ``group`` (all of which call).

    It waits for ``timeout``, or as long as ``group`` does with tensors on ``device``.  Every
    group is made here, and nothing but its own ranks has to call: see ``count_alike`` and
    ``_without_splitting``.
    """
    if backend == "nccl":
        os.environ.setdefault(PRIORITY_OF_NCCL, "1")
        named = entry_points(group="torch.distributed.backends").names
        backend = KNOWN_NCCL if KNOWN_NCCL in named else backend
    world_ranks = dist.get_process_group_ranks(group)
    size = len(world_ranks if ranks is None else ranks)
    with _without_splitting(size), _named_by_count():
        made = dist.new_group(
            world_ranks if ranks is None else [world_ranks[rank] for rank in ranks],
            timeout=timeout or timeout_of(group, device),
            backend=backend,
            use_local_synchronization=True,
        )
    assert isinstance(made, dist.ProcessGroup)  # the caller is one of its ranks
    return made


def side_channel(channel: Channel) -> Channel:
    """A new channel among the same processes, over gloo, for one thread besides the main one.

    Collective.  A message on it never comes between those of another channel.
    """
    group = channel.group
    if group is None:
        return Channel(None, channel.rank_by_position, channel.position)
    host = torch.device("cpu")
    count_alike(group, host)
    # One rank's disk may take hours longer than another's.  A peer that ends breaks it at once.
    new = new_group(group, host, backend="gloo", timeout=timedelta(days=7))
    made = Channel(new, channel.rank_by_position, channel.position)
    _side_channels.add(made)
    return made


_side_channels: WeakSet[Channel] = WeakSet()


def part_of(
    channel: Channel,
    positions: Sequence[int],
    *,
    purpose: str,
    control: Channel,
    device: torch.device,
) -> Channel | None:
    """A channel of its own among ``positions`` of ``channel``; None on the other ranks.

    Its group is made on first use and kept as long as that of ``channel``.  Collective.
    """
    group = channel.group
    if group is None:
        return channel if channel.position in positions else None
    ranks = tuple(sorted(channel.rank_by_position[i] for i in positions))
    part, is_new = _part_with(group, [ranks], purpose, control=control, device=device)
    if part is None:
        return None
    if is_new and devices.backend_of(part, device) == "nccl":
        dist.all_reduce(torch.zeros(1, device=device), group=part)
    places = [ranks.index(r) if r in ranks else -1 for r in channel.rank_by_position]
    return Channel(part, tuple(places), channel.position)


def _part_with(
    group: dist.ProcessGroup,
    parts: Iterable[tuple[int, ...]],
    purpose: str = "",
    *,
    control: Channel,
    device: torch.device,
) -> tuple[dist.ProcessGroup | None, bool]:
    """The group, like ``group``, of that of its ``parts`` with this rank, None on other ranks;
    and whether any of the groups is new.  Collective.

    Parts have no rank in common.  Groups are made on first use, and kept as long as ``group``.
    """
    made = _parts_by_group.setdefault(group, {})
    new = sorted(ranks for ranks in {*parts} if (purpose, ranks) not in made)
    if new:
        assert control.group is not None
        count_alike(control.group, torch.device("cpu"))
        made.update(dict.fromkeys((purpose, ranks) for ranks in new))
        # The others make one too: torch names a group by how many its ranks have made.
        others = tuple(sorted({*range(group.size())}.difference(*new)))
        own = next((ranks for ranks in new if group.rank() in ranks), others)
        backend = "gloo" if own is others else devices.backend_of(group, device)
        part = new_group(group, device, backend=backend, ranks=own)
        if own is not others:
            made[purpose, own] = part
    mine = (found for ranks in parts if (found := made[purpose, ranks]) is not None)
    return next(mine, None), bool(new)


def count_alike(group: dist.ProcessGroup, device: torch.device) -> None:
    """Have the ranks of ``group`` name the groups that they make next alike.  Collective.

    A group over part of the world, which only its ranks make, is named by its ranks and by how
    many groups a process has made (``_named_by_count``).  Ranks that were not in an earlier one
    have made fewer: they would wait in the next one under another name, for ever.
    """
    world = dist.distributed_c10d._world
    host = torch.device("cpu")
    number = torch.tensor(
        [world.group_count], device=host if devices.carries(group, host) else device
    )
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    world.group_count = int(number)


@contextmanager
def _named_by_count() -> Iterator[None]:
    """Have torch name a group by its ranks and by how many groups this process has made.

    Before 2.15 it takes the number of groups that there are now.  A group that takes the place
    of one that is gone then has its name, and finds the addresses of that one in the store.
    """
    c10d, name = dist.distributed_c10d, "_hash_ranks_to_str"
    given = getattr(c10d, name, None)
    if given is None:
        yield
        return

    def name_of(ranks: Sequence[int]) -> str:
        number, c10d._world.group_count = c10d._world.group_count, c10d._world.group_count + 1
        return sha1(f"{list(ranks)} {number}".encode(), usedforsecurity=False).hexdigest()

    setattr(c10d, name, name_of)
    try:
        yield
    finally:
        setattr(c10d, name, given)


@contextmanager
def _without_splitting(num_ranks: int) -> Iterator[None]:
    """Make ``dist.new_group`` over part of the world a matter of that part alone.

    If the world is bound to a device, NCCL makes new communicators by splitting the world's,
    for which all of its ranks would have to call.
    """
    world = dist.group.WORLD
    assert world is not None
    bound = world.bound_device_id
    if bound is None or num_ranks == world.size():
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def among_computing(
    channel: Channel,
    relay_by_position: Sequence[int],
    *,
    control: Channel,
    device: torch.device,
) -> Channel:
    """``channel`` with a communicator of the positions that compute, if others only store.

    A position whose relay is -1 has no part in its collectives, and no rows.  Collective.
    Only NCCL, whose collectives need all ranks of a communicator, has use for it.
    """
    positions = tuple(i for i, relay in enumerate(relay_by_position) if i == relay)
    group = channel.group
    is_nccl = group is not None and devices.backend_of(group, device) == "nccl"
    if group is None or not is_nccl or len(positions) == channel.world_size:
        return replace(channel, computing=None)
    ranks = tuple(sorted(channel.rank_by_position[i] for i in positions))
    part, is_new = _part_with(group, [ranks], control=control, device=device)
    carried = tuple((relay,) if relay >= 0 else () for relay in relay_by_position)
    computing = Communicator(positions, carried, channel.ranks_among(positions), part)
    channel = replace(channel, computing=computing)
    if is_new:
        splits = [int(relay >= 0) for relay in relay_by_position]
        _run_once(channel, splits, positions, device)
    return channel


def in_two_levels(
    channel: Channel, geometry: TwoLevels | None, *, control: Channel, device: torch.device
) -> Channel:
    """``channel`` for collectives in two levels, on a communicator of NCCL for each node.

    Collective.  Without ``geometry``, or over gloo, it has one level.
    """
    group = channel.group
    if geometry is None or group is None or devices.backend_of(group, device) != "nccl":
        return replace(channel, levels=None)
    nodes = {
        tuple(sorted(channel.rank_by_position[i] for i in geometry.node_peers(position)))
        for position in geometry.positions
    }
    parts = sorted(ranks for ranks in nodes if len(ranks) > 1)
    mine, is_new = _part_with(group, parts, control=control, device=device)
    positions, here = geometry.positions, channel.position
    near = channel.ranks_among(geometry.node_peers(here) if here in positions else ())
    levels = Communicator(positions, geometry.node_leaders, near, mine)
    channel = replace(channel, levels=levels)
    if is_new:
        _run_once(channel, [1] * channel.world_size, positions, device)
    return channel


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Run every pattern of collective of a step once.  Collective over ``group``.

    NCCL connects ranks, and allocates buffers for it, when a pattern is first used.  Otherwise
    that happens in the first backward, when memory is full, and after it was measured.  NCCL
    also needs all ranks in a communicator's first call.  Messages between all pairs, which only
    whole state dicts need, are left out: they took 3.3 GB of each of eight H100 (NVIDIA/nccl,
    issue 1685).
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    size = group.size()
    channel = Channel(group, tuple(range(size)), group.rank())
    for splits in ([1] * size, [2, *[1] * (size - 1)], [0, *[1] * (size - 1)]):
        _run_once(channel, splits, range(size), device)


def _run_once(
    channel: Channel, splits: Sequence[int], computing: Sequence[int], device: torch.device
) -> None:
    shard = torch.zeros(splits[channel.position], device=device)
    whole = torch.zeros(sum(splits), device=device) if channel.position in computing else None
    gather = all_gather_uneven(whole, shard, splits, channel=channel, receivers=computing)
    gather.wait()
    scratch = BufferPool()
    reduce = reduce_scatter_uneven(
        shard, whole, splits, channel=channel, contributors=computing, scratch=scratch
    )
    reduce.wait()


def break_all_connections() -> None:
    """Make every collective of this process end with an error, and those of its peers."""
    groups: list[dist.ProcessGroup | None] = []
    for made in list(_made_by_group.values()):
        for communicators in list(made.values()):
            communicators.give_up()
            groups += communicators.with_parts()
    groups += [channel.group for channel in list(_side_channels)]
    end_waits(group for group in (*groups, dist.group.WORLD) if group is not None)


def break_connections(channel: Channel) -> None:
    """Make every wait of ``channel`` end with an error, here and on its peers."""
    if channel.group is not None:
        end_waits([channel.group])


def default_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return ``group``, or else the group of all processes; None if this is the only one."""
    launched = os.environ.get("WORLD_SIZE", "1")  # by torchrun and its like
    if group is None and launched != "1" and not dist.is_initialized():
        raise RuntimeError(
            f"{launched} ranks were started but this one has not met the others. Call "
            "torch.distributed.init_process_group() first."
        )
    return dist.group.WORLD if group is None and dist.is_initialized() else group
