"""Checkpoints that were changed after they were written: all are refused, none is executed."""

import json
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardhet.checkpoint import CheckpointError, load, save
from shardhet.checkpoint.format.files import digest_of_bytes
from shardhet.checkpoint.format.reading import SavedCheckpoint
from tests.checkpoint_cases import Odd, make_optimizer, train

NUM_MUTATIONS = 320


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and beside it another one."""
    folder = tmp_path_factory.mktemp("damage")
    torch.manual_seed(0)
    for name in ("whole", "other"):
        model = Odd(is_tied=name == "whole")
        optimizer = make_optimizer(model, "adamw")
        train(model, optimizer, range(1))
        save(model, optimizer, folder / name, extra={"seen": torch.arange(5), "epoch": 3})
    return folder / "whole"


def flip(rng: random.Random, path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)


def truncate(rng: random.Random, path: Path, other: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def extend(rng: random.Random, path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 9)))


def remove(rng: random.Random, path: Path, other: Path) -> None:
    path.unlink()


def swap(rng: random.Random, path: Path, other: Path) -> None:
    shutil.copy(other / path.name, path)


def mix(rng: random.Random, path: Path, other: Path) -> None:
    names = sorted(each.name for each in path.parent.iterdir() if each != path)
    path.write_bytes((path.parent / rng.choice(names)).read_bytes())


def zero(rng: random.Random, path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    filled = [i for i in range(start, len(content)) if content[i]] or [0]
    content[filled[0]] = 0
    path.write_bytes(content)


def foreign(rng: random.Random, path: Path, other: Path) -> None:
    path.write_bytes(pickle.dumps(Evil(path.parent / "executed")))


class Evil:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


MUTATIONS = (flip, flip, flip, truncate, extend, remove, swap, mix, zero, foreign)


def refused(folder: Path) -> str:
    """The message with which it is refused; fails if it is read."""
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        load(model, make_optimizer(model, "adamw"), folder)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was written"
    assert not (folder / "executed").exists()
    return str(raised.value)


def test_every_mutation_is_refused_and_names_the_file(whole: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in whole.iterdir())
    assert {".metadata", "manifest.json", "__0_0.distcp"} == set(names)
    for seed in range(NUM_MUTATIONS):
        rng = random.Random(f"damage {seed}")
        folder = tmp_path / f"mutation_{seed}"
        shutil.copytree(whole, folder)
        path, mutate = folder / rng.choice(names), rng.choice(MUTATIONS)
        mutate(rng, path, whole.parent / "other")
        what = f"{seed}: {mutate.__name__} {path.name}"
        same = path.exists() and path.read_bytes() == (whole / path.name).read_bytes()
        assert not same, what
        message = refused(folder)
        # A manifest of another checkpoint is whole itself: the others do not fit it.
        assert path.name in message or mutate is swap, f"{what}: {message}"
        shutil.rmtree(folder)


@pytest.fixture
def unsigned(whole: Path, tmp_path: Path) -> Path:
    """The same written by torch.distributed.checkpoint, which has no manifest."""
    model = Odd()
    load(model, make_optimizer(model, "adamw"), whole)
    folder = tmp_path / "unsigned"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    load(model, None, folder)
    return folder


def refused_of_torch(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        load(Odd(), None, folder)
    assert not (folder / "executed").exists()
    return str(raised.value)


def test_a_foreign_pickle_in_place_of_metadata_is_not_executed(unsigned: Path) -> None:
    (unsigned / ".metadata").write_bytes(pickle.dumps(Evil(unsigned / "executed")))
    message = refused_of_torch(unsigned)
    assert ".metadata" in message
    assert "pathlib" in message


def test_an_evil_object_saved_with_torch_is_not_executed(unsigned: Path) -> None:
    [path] = unsigned.glob("*.distcp")
    stored = SavedCheckpoint.open(unsigned).stored
    place = stored.tensors["model.offset"].chunks[0].place.bytes
    content = path.read_bytes()
    evil = pickle.dumps(Evil(unsigned / "executed")).ljust(place.numel, b"\0")
    path.write_bytes(content[: place.start] + evil + content[place.stop :])
    assert "model.offset" in refused_of_torch(unsigned)


@pytest.mark.parametrize("seed", range(4))
def test_metadata_of_torch_is_refused_or_read_but_never_fails_otherwise(
    unsigned: Path, seed: int
) -> None:
    content = (unsigned / ".metadata").read_bytes()
    rng = random.Random(seed)
    for _ in range(40):
        changed = bytearray(content)
        changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
        (unsigned / ".metadata").write_bytes(changed)
        with suppress(CheckpointError):
            load(Odd(), None, unsigned)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "..", ""])
def test_metadata_that_leads_out_of_the_folder_is_refused(unsigned: Path, name: str) -> None:
    metadata = pickle.loads((unsigned / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (unsigned / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "the file name" in refused_of_torch(unsigned)


def test_boxes_that_overlap_are_refused(unsigned: Path) -> None:
    metadata = pickle.loads((unsigned / ".metadata").read_bytes())
    described = metadata.state_dict_metadata["model.offset"]
    [index] = [each for each in metadata.storage_data if each.fqn == "model.offset"]
    size = described.chunks[0].sizes
    halves = [dcp.metadata.ChunkStorageMetadata(torch.Size([start]), torch.Size([n]))
              for start, n in ((0, size[0] - 1), (size[0] - 2, 1))]  # fmt: skip
    described.chunks = halves
    other = dcp.metadata.MetadataIndex("model.offset", halves[1].offsets)
    metadata.storage_data[other] = metadata.storage_data[index]
    (unsigned / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "overlap" in refused_of_torch(unsigned)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    assert "not a folder" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "manifest.json" in refused(tmp_path / "empty")
    (tmp_path / ".killed.unfinished").mkdir()
    assert "never completed" in refused(tmp_path / "killed")


def signed_anew(folder: Path, **changes: object) -> Path:
    """The manifest with other values and the digest that fits them."""
    path = folder / "manifest.json"
    document = {**json.loads(path.read_text()), **changes}
    del document["digest"]
    text = json.dumps(document, indent=1) + "\n"
    signed = {**document, "digest": digest_of_bytes(text.encode())}
    path.write_text(json.dumps(signed, indent=1) + "\n")
    return folder


@pytest.mark.parametrize(
    "change",
    [
        *({"step": step} for step in ("x", -7, 2**70, True, 1.0)),
        *({"world_size": world_size} for world_size in (-1, 0, "2")),
        {"version": 1},
        {"optimizer": 3},
        {"versions": {"torch": 2}},
        {"files": {"../../x": {"num_bytes": 1, "digest": "sha256:"}}},
        {"files": {"/dev/zero": {"num_bytes": 1, "digest": "sha256:"}}},
        {"files": {"__0_0.distcp": {"num_bytes": -1, "digest": "sha256:"}}},
        {"files": {"__0_0.distcp": {}}},
        *({"extra": {"$tensor": name}} for name in (5, [])),
        {"extra": {"$counter": 3}},
        {"extra": {"$dict": [[[1], 2]]}},
    ],
    ids=str,
)
def test_a_manifest_without_sense_is_refused_though_its_digest_fits(
    change: dict[str, object], tmp_path: Path
) -> None:
    save(Odd(), None, tmp_path / "saved", extra=3)
    folder = signed_anew(tmp_path / "saved", **change)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load(Odd(), None, folder)


def test_the_manifest_of_a_plain_module_has_no_step(tmp_path: Path) -> None:
    save(Odd(), None, tmp_path / "saved", extra=3)
    assert load(Odd(), None, signed_anew(tmp_path / "saved", step=None)) == 3
