"""Which replica the nodes have together, and how its rows get to the ranks that need them."""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardhet.checkpoint.folder import Checkpoints
from shardhet.checkpoint.format import files
from shardhet.checkpoint.format.errors import CheckpointError
from shardhet.checkpoint.format.manifest import Manifest
from shardhet.checkpoint.format.metadata import BytesPlace
from shardhet.checkpoint.format.reading import SavedCheckpoint
from shardhet.checkpoint.loading import CALL
from shardhet.checkpoint.replicas.nodes import node_name
from shardhet.checkpoint.replicas.transfer import Sending, Stream, all_to_all_bytes
from shardhet.checkpoint.state.ranks import Ranks
from shardhet.comm.channel import Channel
from shardhet.records.nodes import Nodes

DamagedFile = tuple[int, str, str]  # position, digest of the manifest, name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What one node has of the replica of one step."""

    step: int
    digest: str  # of its manifest
    digest_by_file: Mapping[str, str]  # of all files, wherever they are
    here: frozenset[str]  # the files on this node that have their length


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeReplica:
    """The newest replica of which every file is somewhere."""

    step: int
    digest: str
    digest_by_file: Mapping[str, str]
    holders: Mapping[str, tuple[int, ...]]  # by file the positions whose node has it


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
    damaged_files: Collection[DamagedFile] = (),
) -> WholeReplica | None:
    """The newest step of which the nodes have all files together.

    Two nodes may have different replicas of one step, of which one was given up: only files
    of equal manifests count.

    Args:
        versions: of the node of each position.
        damaged_files: position, digest of the manifest, and file, of those that do not count.
    """
    by_version: dict[tuple[int, str], dict[int, Version]] = defaultdict(dict)
    for position, found in enumerate(versions):
        for version in found:
            by_version[version.step, version.digest][position] = version
    for step, digest in sorted(by_version, reverse=True):
        having = by_version[step, digest]
        wanted = next(iter(having.values())).digest_by_file
        holders = {
            file: tuple(
                position
                for position, version in having.items()
                if file in version.here and (position, digest, file) not in damaged_files
            )
            for file in wanted
        }
        if all(holders.values()):
            return WholeReplica(
                step=step, digest=digest, digest_by_file=wanted, holders=holders
            )
    return None


class DamagedReplicaError(CheckpointError):
    """Some files of a replica are not what was written, and no node has another copy.

    ``files`` are as ``choose`` takes them; the same on every rank.
    """

    def __init__(self, message: str, damaged_files: Collection[DamagedFile]) -> None:
        super().__init__(message)
        self.files = frozenset(damaged_files)


def find(
    folder: Path,
    ranks: Ranks,
    checkpoints: Checkpoints | None,
    channel: Channel | None,
    damaged_files: Collection[DamagedFile] = (),
) -> "ReplicaSource | None":
    """The newest replica that is whole; None if there is none.  Collective.

    None as well if ``checkpoints`` has a whole one of a later step.
    """
    looks = ranks.agree(lambda: (node_name(folder), versions_in(folder)), call=CALL)
    nodes = Nodes.of([name for name, _ in looks])
    choice = choose([found for _, found in looks], damaged_files)
    if choice is None:
        return None
    later = ranks.agree(
        lambda: _has_later(checkpoints, choice.step) if ranks.is_writer else None, call=CALL
    )
    if any(later):
        return None
    source = ReplicaSource(folder, choice, nodes, channel)
    source.prepare(ranks)
    return source


def _has_later(checkpoints: Checkpoints | None, step: int) -> bool:
    if checkpoints is None or not any(each > step for each in checkpoints.steps()):
        return False
    latest = checkpoints.latest()
    return latest is not None and latest.step > step


class ReplicaSource:
    """A replica that the nodes have together."""

    is_one_folder = False

    def __init__(
        self, folder: Path, choice: WholeReplica, nodes: Nodes, channel: Channel | None
    ) -> None:
        self.step = choice.step
        self._choice = choice
        self._nodes = nodes
        self._channel = channel
        self._path = files.step_path(folder, choice.step)
        self._holders = dict(choice.holders)  # but for those whose file is damaged
        self._verified: set[tuple[int, str]] = set()  # nodes and files
        self._description: tuple[bytes, bytes]
        self._num_bytes = [0, 0]  # read here, sent by other nodes

    def prepare(self, ranks: Ranks) -> None:
        """Get what describes the replica.  Collective."""
        is_first = ranks.position == self._holders[files.METADATA][0]
        [self._description] = [
            found
            for found in ranks.agree(
                lambda: self._read_description() if is_first else None, call=CALL
            )
            if found is not None
        ]

    def _read_description(self) -> tuple[bytes, bytes]:
        return (
            (self._path / files.MANIFEST).read_bytes(),
            (self._path / files.METADATA).read_bytes(),
        )

    def open(self, ranks: Ranks) -> SavedCheckpoint:
        """What every rank was told of the replica; files are verified when they are needed."""
        return SavedCheckpoint.described(self._path, *self._description)

    def fetch(self, saved: SavedCheckpoint, places: Sequence[BytesPlace], ranks: Ranks) -> None:
        """Verify the files that are needed, and exchange the bytes that ranks' nodes lack.

        Raises ``DamagedReplicaError`` on every rank if all copies of a file are damaged.
        """
        needed = sorted(set(places), key=lambda place: (place.file, place.bytes.start))
        self._verify(sorted({place.file for place in needed}), ranks)
        wanted = [p for p in needed if ranks.position not in self._holders[p.file]]
        self._num_bytes[0] += sum(p.bytes.numel for p in needed)
        received_bytes = sum(p.bytes.numel for p in wanted)
        self._num_bytes[0] -= received_bytes
        self._num_bytes[1] += received_bytes
        asked: list[list[BytesPlace]] = ranks.exchange(wanted, call=CALL)
        outgoing: dict[int, Sending] = {}
        incoming: dict[int, _Incoming] = {}
        for requester, each in enumerate(asked):
            for sender, part in self._by_sender(requester, each).items():
                if sender == ranks.position:
                    outgoing[requester] = Sending(
                        [(saved.folder / place.file, place.bytes) for place in part]
                    )
                if requester == ranks.position:
                    incoming[sender] = _Incoming(part)
        if self._channel is not None:
            all_to_all_bytes(
                self._channel,
                {i: Stream(each.num_bytes, each.move) for i, each in outgoing.items()},
                {i: Stream(each.num_bytes, each.move) for i, each in incoming.items()},
            )

        def end() -> None:
            for each in outgoing.values():
                each.close()

        ranks.agree(end, call=CALL)
        for received in incoming.values():
            saved.content_by_place |= received.contents()

    def _verify(self, names: Sequence[str], ranks: Ranks) -> None:
        """Compare the files that are read, here or for others, with their digests.

        Each node reads those that it has and that anybody needs of it, its ranks by turns; a
        damaged one counts no longer, and the next holder is asked.
        """
        while True:
            needed: list[Sequence[str]] = ranks.exchange(names, call=CALL)
            used = {
                (self._nodes.node_by_position[self._sender(requester, name)], name)
                for requester, each in enumerate(needed)
                for name in each
            } - self._verified
            found = ranks.agree(partial(self._damaged, used, ranks), call=CALL)
            self._verified |= used
            bad = {pair for each in found for pair in each}
            if not bad:
                return
            for node, name in bad:
                left = [
                    p for p in self._holders[name] if self._nodes.node_by_position[p] != node
                ]
                self._holders[name] = tuple(left)
            lost = sorted(name for _, name in bad if not self._holders[name])
            if lost:
                damaged_files = {
                    (position, self._choice.digest, name)
                    for node, name in bad
                    for position in self._nodes.positions(node)
                }
                raise DamagedReplicaError(
                    f"{self._path}: {', '.join(lost)}: damaged on every node that has it.",
                    damaged_files,
                )

    def _damaged(self, used: Collection[tuple[int, str]], ranks: Ranks) -> set[tuple[int, str]]:
        """Of this rank's share of its node's used files, those that are damaged."""
        node = self._nodes.node_by_position[ranks.position]
        neighbours = self._nodes.positions(node)
        names = sorted(name for each, name in used if each == node)
        wrong = set()
        for name in names[neighbours.index(ranks.position) :: len(neighbours)]:
            try:
                is_right = files.fits(self._path / name, self._choice.digest_by_file[name])
            except OSError:
                is_right = False
            if not is_right:
                logger.warning("%s: damaged; requesting another copy", self._path / name)
                wrong.add((node, name))
        return wrong

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


class _Incoming:
    """Memory for places that another node sends, one after the other."""

    def __init__(self, places: Sequence[BytesPlace]) -> None:
        self._places = places
        self.num_bytes = sum(place.bytes.numel for place in places)
        self._memory = memoryview(bytearray(self.num_bytes))
        self._filled = 0

    def move(self, memory: memoryview) -> None:
        """Take the next bytes."""
        self._memory[self._filled : self._filled + len(memory)] = memory
        self._filled += len(memory)

    def contents(self) -> dict[BytesPlace, memoryview]:
        """The bytes of each place."""
        found, start = {}, 0
        for place in self._places:
            found[place] = self._memory[start : start + place.bytes.numel]
            start += place.bytes.numel
        return found
