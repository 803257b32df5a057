"""Which replica the nodes have together, and how its rows get to the ranks that need them."""

import logging
import socket
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

from shardhet.checkpoint.folder import Checkpoints
from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.checkpoint.format.manifest import Manifest
from shardhet.checkpoint.format.metadata import BytesPlace
from shardhet.checkpoint.format.reading import SavedCheckpoint
from shardhet.checkpoint.loading import CALL
from shardhet.checkpoint.replicas.transfer import Stream, all_to_all_bytes, of_files
from shardhet.checkpoint.state.ranks import Ranks
from shardhet.comm.channel import Channel
from shardhet.records.stages import Nodes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_name(folder: Path) -> str:
    """What ranks with the same replicas have in common: the machine and the folder."""
    boot_id = _BOOT_ID.read_text("ascii").strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot_id} {folder}"


DamagedFile = tuple[int, str, str]  # position, digest of the manifest, name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What one node has of the replica of one step."""

    step: int
    digest: str  # of its manifest
    digest_by_file: Mapping[str, str]  # of all files, wherever they are
    here: frozenset[str]  # the files on this node that have their length


# By file, the positions whose node has it.
Holders = Mapping[str, tuple[int, ...]]


def versions_in(folder: Path) -> list[Version]:
    """The replicas in the folder of a node; those whose description is damaged are skipped."""
    found = []
    for step in files.steps_in(folder):
        path = files.step_path(folder, step)
        try:
            manifest = Manifest.load(path)
        except (CheckpointError, OSError) as error:
            logger.warning("skipped a replica: %s", error)
            continue
        here = {
            file
            for file, facts in manifest.files.items()
            if (path / file).is_file() and (path / file).stat().st_size == facts.num_bytes
        }
        found.append(
            Version(
                step=step,
                digest=files.digest_of_bytes(manifest.to_json().encode("ascii")),
                digest_by_file={file: facts.digest for file, facts in manifest.files.items()},
                here=frozenset(here),
            )
        )
    return found


def choose(
    versions: Sequence[Sequence[Version]],
    damaged: Collection[DamagedFile] = (),
) -> tuple[Version, Holders] | None:
    """The newest version of which the nodes have all files together, and who has which.

    Two nodes may have different replicas of one step, of which one was given up: only files
    of equal manifests count.

    Args:
        versions: of the node of each position.
        damaged: position, digest of the manifest, and file, of those that do not count.
    """
    by_version: dict[tuple[int, str], dict[int, Version]] = defaultdict(dict)
    for position, found in enumerate(versions):
        for version in found:
            by_version[version.step, version.digest][position] = version
    for step, digest in sorted(by_version, reverse=True):
        having = by_version[step, digest]
        any_of_them = next(iter(having.values()))
        holders = {
            file: tuple(
                position
                for position, version in having.items()
                if file in version.here and (position, digest, file) not in damaged
            )
            for file in any_of_them.digest_by_file
        }
        if all(holders.values()):
            return any_of_them, holders
    return None


def find(
    folder: Path, ranks: Ranks, checkpoints: Checkpoints | None, channel: Channel | None
) -> "ReplicaSource | None":
    """The newest replica that is whole; None if there is none.  Collective.

    Every node reads all of its files and compares them with their digests; damaged ones do not
    count.  None as well if ``checkpoints`` has a whole one of a later step.
    """
    looks = ranks.agree(lambda: (node_name(folder), versions_in(folder)), call=CALL)
    nodes, versions = Nodes.of([name for name, _ in looks]), [found for _, found in looks]
    choice, damaged = choose(versions), set[DamagedFile]()
    while choice is not None:
        bad = ranks.agree(partial(_damaged_in, folder, *choice, nodes, ranks), call=CALL)
        more = set().union(*bad) - damaged
        if not more:
            break
        damaged |= more
        choice = choose(versions, damaged)
    if choice is None:
        return None
    step = choice[0].step
    later = ranks.agree(lambda: ranks.is_writer and _has_later(checkpoints, step), call=CALL)
    if any(later):
        return None
    source = ReplicaSource(folder, step, choice[1], channel)
    source.prepare(ranks)
    return source


def _damaged_in(
    folder: Path, version: Version, holders: Holders, nodes: Nodes, ranks: Ranks
) -> set[DamagedFile]:
    """Of this rank's share of the files that its node has, those that are damaged there."""
    neighbours = nodes.positions(nodes.node_by_position[ranks.position])
    names = sorted(name for name, at in holders.items() if ranks.position in at)
    wrong = set[DamagedFile]()
    for name in names[neighbours.index(ranks.position) :: len(neighbours)]:
        path = files.step_path(folder, version.step) / name
        try:
            is_right = files.fits(path, version.digest_by_file[name])
        except OSError:
            is_right = False
        if not is_right:
            logger.warning("%s: damaged; another copy counts, if there is one", path)
            wrong |= {(position, version.digest, name) for position in neighbours}
    return wrong


def _has_later(checkpoints: Checkpoints | None, step: int) -> bool:
    if checkpoints is None or not any(each > step for each in checkpoints.steps()):
        return False
    latest = checkpoints.latest()
    return latest is not None and latest.step > step


class ReplicaSource:
    """A replica that the nodes have together."""

    is_one_folder = False

    def __init__(
        self, folder: Path, step: int, holders: Holders, channel: Channel | None
    ) -> None:
        self.step, self._path = step, files.step_path(folder, step)
        self._holders, self._channel = holders, channel
        self._description: Sequence[bytes]
        self._num_bytes = [0, 0]  # read here, sent by other nodes

    def prepare(self, ranks: Ranks) -> None:
        """Get what describes the replica.  Collective."""
        is_first = ranks.position == self._holders[files.METADATA][0]
        wanted = (files.MANIFEST, files.METADATA) if is_first else ()
        found = ranks.agree(
            lambda: [(self._path / name).read_bytes() for name in wanted], call=CALL
        )
        [self._description] = filter(None, found)

    def open(self, ranks: Ranks) -> SavedCheckpoint:
        """What every rank was told of the replica."""
        return SavedCheckpoint.described(self._path, *self._description)

    def fetch(self, saved: SavedCheckpoint, places: Sequence[BytesPlace], ranks: Ranks) -> None:
        """Exchange the bytes that ranks' nodes lack."""
        needed = sorted(set(places), key=lambda place: (place.file, place.bytes.start))
        wanted = [p for p in needed if ranks.position not in self._holders[p.file]]
        self._num_bytes[0] += sum(p.bytes.numel for p in needed)
        received_bytes = sum(p.bytes.numel for p in wanted)
        self._num_bytes[0] -= received_bytes
        self._num_bytes[1] += received_bytes
        asked: list[list[BytesPlace]] = ranks.exchange(wanted, call=CALL)
        outgoing: dict[int, Stream] = {}
        incoming: dict[int, Stream] = {}
        received: list[tuple[list[BytesPlace], BytesIO]] = []
        for requester, each in enumerate(asked):
            for sender, part in self._by_sender(requester, each).items():
                if sender == ranks.position:
                    outgoing[requester] = of_files(
                        (saved.folder / place.file, place.bytes) for place in part
                    )
                if requester == ranks.position:
                    memory, num_bytes = BytesIO(), sum(place.bytes.numel for place in part)
                    incoming[sender] = Stream(num_bytes, memory.write)
                    received.append((part, memory))
        if self._channel is not None:
            all_to_all_bytes(self._channel, outgoing, incoming)

        def check() -> None:
            for each in outgoing.values():
                each.check()

        ranks.agree(check, call=CALL)
        for part, memory in received:
            content = memory.getbuffer()
            for place in part:
                saved.content_by_place[place] = content[: place.bytes.numel]
                content = content[place.bytes.numel :]

    def _sender(self, requester: int, name: str) -> int:
        """Who gives a rank a file, or part of it: itself, or one of those that have it."""
        holders = self._holders[name]
        return requester if requester in holders else holders[requester % len(holders)]

    def _by_sender(
        self, requester: int, places: Sequence[BytesPlace]
    ) -> dict[int, list[BytesPlace]]:
        """Which position sends which places; those of a node take turns."""
        found: dict[int, list[BytesPlace]] = defaultdict(list)
        for place in places:
            found[self._sender(requester, place.file)].append(place)
        return found

    def told(self, ranks: Ranks) -> str:
        """Where the state came from, over all ranks.  Collective."""
        rows = ranks.exchange(self._num_bytes, call=CALL)
        sums = [sum(column) for column in zip(*rows, strict=True)]
        here, elsewhere = (f"{each / 2**20:,.1f} MiB" for each in sums)
        return f"replicas: {here} from the node that needed it, {elsewhere} from other nodes"
