"""Replicas: the state that survives any one node, without a checkpoint.

SHARDHET_REPLICA_CASES=100 draws more cases than the ordinary twelve.
"""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from shardhet.checkpoint import CheckpointError, Checkpoints, Replicas
from shardhet.checkpoint.format import files as checkpoint_files
from shardhet.checkpoint.format.writing import Report
from shardhet.checkpoint.replicas import replicas as replicas_module
from shardhet.checkpoint.replicas.source import Version, choose, versions_in
from shardhet.checkpoint.replicas.transfer import Copying
from shardhet.comm.liveness.watch import watch_ranks
from shardhet.records.stages import Nodes, backup_positions, relays
from tests.checkpoint_cases import (
    OPTIMIZERS,
    State,
    check_same,
    draw_plan,
    make_optimizer,
    train,
    whole_state,
    wrap,
)
from tests.checkpoint_cases import Odd as Model
from tests.selection import one_in
from tests.test_stillness import stop_here
from tests.worlds import run_ranks, run_ranks_expecting_failure

NUM_CASES = int(os.environ.get("SHARDHET_REPLICA_CASES", "12"))
BAR = 1e-9  # of losses, relative: other plans add in another order


def model_of(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def folder_of(root: str, node: int) -> Path:
    return Path(root) / f"node{node}"


def save_under(
    rank: int, seed: int, world_size: int, nodes: list[int], kind: str, root: str
) -> tuple[State | None, list[float]]:
    """Replicas after steps 1 and 2; the state of step 2, and the losses after it."""
    plan = draw_plan(random.Random(f"saves {seed}"), world_size)
    model = wrap(model_of(seed), plan)
    optimizer = make_optimizer(model, kind)
    replicas = Replicas(folder_of(root, nodes[rank]))
    for step in range(2):
        train(model, optimizer, [step])
        replicas.save(model, optimizer, extra={"seed": seed, "noise": torch.arange(3)})
    state = whole_state(model, optimizer)
    losses = train(model, optimizer, range(2, 4))  # while copies are on their way
    replicas.wait(model)
    return (state if rank == 0 else None), losses


def load_under(
    rank: int, seed: int, world_size: int, nodes: list[int], kind: str, root: str
) -> tuple[State | None, list[float], str | None]:
    plan = draw_plan(random.Random(f"loads {seed}"), world_size)
    module = model_of(seed)
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.zero_()
    model = wrap(module, plan)
    optimizer = make_optimizer(model, kind)
    found = Replicas(folder_of(root, nodes[rank])).load_latest(model, optimizer)
    assert found is not None
    assert found.step == model.step == 2
    assert found.extra["seed"] == seed
    assert found.extra["noise"].tolist() == [0, 1, 2]
    state = whole_state(model, optimizer)
    losses = train(model, optimizer, range(2, 4))
    return (state if rank == 0 else None), losses, found.came_from


def test_rows_are_carried_by_a_computing_rank_of_the_node_if_there_is_one() -> None:
    nodes = Nodes.of(["a", "a", "b", "b", "b", "c"])
    assert relays(nodes, [True] * 6) == (0, 1, 2, 3, 4, 5)
    assert relays(nodes, [True, False, False, True, True, False]) == (0, 0, 3, 3, 4, 4)
    assert relays(nodes, [False, False, True, False, False, False]) == (2,) * 6


@pytest.mark.parametrize("seed", one_in(12, range(NUM_CASES)))
def test_the_loss_of_any_node_loses_no_step(seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"replicas {seed}")
    world_size = rng.randint(2, 4)
    num_nodes = rng.randint(2, world_size)
    nodes = [*range(num_nodes), *(rng.randrange(num_nodes) for _ in range(world_size))]
    nodes = nodes[:world_size]
    rng.shuffle(nodes)
    kind = list(OPTIMIZERS)[seed % len(OPTIMIZERS)]
    saved = run_ranks(save_under, world_size, seed, world_size, nodes, kind, str(tmp_path))
    lost = rng.randrange(num_nodes)
    shutil.rmtree(folder_of(str(tmp_path), lost))
    # The lost node comes back empty in a third of the cases; in others ranks move elsewhere.
    left = [node for node in nodes if node != lost]
    if seed % 3 == 0:
        left = nodes
    elif seed % 3 == 1:
        left = [*left, num_nodes]  # a node that was not there
    loaded = run_ranks(load_under, len(left), seed, len(left), left, kind, str(tmp_path))
    assert saved[0][0] is not None
    assert loaded[0][0] is not None
    check_same(saved[0][0], loaded[0][0])
    for mine, theirs in zip(loaded[0][1], saved[0][1], strict=True):
        assert mine == pytest.approx(theirs, rel=BAR)
    assert loaded[0][2] is not None
    assert loaded[0][2].startswith("replicas: ")


def test_only_the_newest_version_stays_and_takes_two_copies(tmp_path: Path) -> None:
    run_ranks(save_under, 3, 1, 3, [0, 1, 2], "adamw", str(tmp_path))
    kept = []
    for node in range(3):
        [version] = versions_in(folder_of(str(tmp_path), node))
        assert version.step == 2
        assert [each.name for each in folder_of(str(tmp_path), node).iterdir()] == [
            "step_00000002"
        ]
        kept += [name for name in version.here if name.endswith(".distcp")]
    assert sorted(kept) == sorted(2 * list(set(kept)))


def load_in_vain(rank: int, root: str, nodes: list[int]) -> bool:
    model = wrap(model_of(1), draw_plan(random.Random(0), len(nodes)))
    optimizer = make_optimizer(model, "adamw")
    return Replicas(folder_of(root, nodes[rank])).load_latest(model, optimizer) is None


def test_two_lost_nodes_lose_the_replica_and_say_so(tmp_path: Path) -> None:
    run_ranks(save_under, 3, 1, 3, [0, 1, 2], "adamw", str(tmp_path))
    for node in (0, 1):
        shutil.rmtree(folder_of(str(tmp_path), node))
    assert run_ranks(load_in_vain, 1, str(tmp_path), [2]) == [True]


def test_a_damaged_file_is_taken_from_the_other_node(tmp_path: Path) -> None:
    saved = run_ranks(save_under, 2, 3, 2, [0, 1], "adamw", str(tmp_path))
    for path in folder_of(str(tmp_path), 0).rglob("*.distcp"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    loaded = run_ranks(load_under, 2, 3, 2, [0, 1], "adamw", str(tmp_path))
    check_same(saved[0][0], loaded[0][0])


def test_a_file_that_is_damaged_on_every_node_makes_the_replica_none(tmp_path: Path) -> None:
    run_ranks(save_under, 2, 3, 2, [0, 1], "adamw", str(tmp_path))
    name = max(tmp_path.rglob("*.distcp"), key=lambda path: path.stat().st_size).name
    for path in tmp_path.rglob(name):
        path.write_bytes(path.read_bytes()[:-9] + b"damaged..")
    assert run_ranks(load_in_vain, 2, str(tmp_path), [0, 1]) == [True, True]


def save_then_checkpoint(rank: int, root: str) -> None:
    model = wrap(model_of(5), draw_plan(random.Random("saves 5"), 2))
    optimizer = make_optimizer(model, "adamw")
    train(model, optimizer, range(1))
    Replicas(folder_of(root, rank)).save(model, optimizer)
    train(model, optimizer, range(1, 2))
    Checkpoints(f"{root}/stored").save(model, optimizer)


def load_later(rank: int, root: str) -> bool:
    model = wrap(model_of(5), draw_plan(random.Random("saves 5"), 2))
    optimizer = make_optimizer(model, "adamw")
    replicas, checkpoints = Replicas(folder_of(root, rank)), Checkpoints(f"{root}/stored")
    return replicas.load_latest(model, optimizer, checkpoints=checkpoints) is None


def test_a_later_checkpoint_is_preferred(tmp_path: Path) -> None:
    run_ranks(save_then_checkpoint, 2, str(tmp_path))
    assert run_ranks(load_later, 2, str(tmp_path)) == [True, True]


def save_without_room(rank: int, root: str) -> None:
    replicas_module._free_bytes = lambda folder: 1000 if folder.name == "node1" else 2**40
    save_under(rank, 1, 2, [0, 1], "adamw", root)


def test_no_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    for outcome in run_ranks_expecting_failure(save_without_room, 2, str(tmp_path)):
        assert outcome.exception_name == "CheckpointError"
        assert "node1" in outcome.message
        assert "replicas.folder" in outcome.message
    assert not list(tmp_path.rglob("*.distcp"))


def save_with_a_full_disk(rank: int, root: str, nodes: list[int]) -> str:
    """The second version fails in the copy that rank one writes."""
    model = wrap(model_of(1), draw_plan(random.Random("saves 1"), 2))
    optimizer = make_optimizer(model, "adamw")
    replicas = Replicas(folder_of(root, nodes[rank]))
    train(model, optimizer, range(1))
    replicas.save(model, optimizer)
    replicas.wait(model)
    train(model, optimizer, range(1, 2))
    if rank == 1:
        whole = checkpoint_files.open_new

        def refuse(path: Path) -> object:
            if path.name.startswith("__0_"):
                raise OSError(28, "No space left on device", str(path))
            return whole(path)

        checkpoint_files.open_new = refuse  # type: ignore[assignment]
    replicas.save(model, optimizer)
    try:
        with pytest.raises(CheckpointError, match="No space left") as raised:
            replicas.wait(model)
    finally:
        if rank == 1:
            checkpoint_files.open_new = whole
    found = replicas.load_latest(model, optimizer)
    assert found is not None
    assert found.step == 1
    return str(raised.value)


def test_a_full_disk_keeps_the_version_before(tmp_path: Path) -> None:
    messages = run_ranks(save_with_a_full_disk, 2, str(tmp_path), [0, 1])
    assert messages[0] == messages[1]


def clear_all(rank: int, root: str) -> None:
    model = wrap(model_of(1), draw_plan(random.Random("saves 1"), 2))
    Replicas(folder_of(root, rank)).clear(model)


def test_clear_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(save_under, 2, 1, 2, [0, 1], "adamw", str(tmp_path))
    run_ranks(clear_all, 2, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_keepers_are_on_other_nodes_and_level_what_nodes_hold() -> None:
    rng = random.Random(0)
    for _ in range(300):
        size = rng.randint(1, 12)
        nodes = Nodes.of([str(rng.randint(0, 4)) for _ in range(size)])
        num_bytes = [rng.choice([0, 10, 1000, rng.randrange(10**6)]) for _ in range(size)]
        free = [10**9] * size
        found = backup_positions(nodes, num_bytes, free)
        if len(nodes) == 1:
            assert found == [None] * size
            continue
        held = [0] * len(nodes)
        for i, keeper in enumerate(found):
            assert keeper is not None
            assert nodes.node_by_position[keeper] != nodes.node_by_position[i]
            held[nodes.node_by_position[keeper]] += num_bytes[i]
            held[nodes.node_by_position[i]] += num_bytes[i]
        own = [sum(num_bytes[i] for i in nodes.positions(n)) for n in range(len(nodes))]
        # Only what must be elsewhere lifts a node above the even level.
        assert max(held) <= max(2 * sum(num_bytes) / len(nodes) + max(num_bytes), 2 * max(own))


def test_versions_of_another_history_are_not_mixed() -> None:
    def version(step: int, digest: str, *here: str) -> Version:
        names = {"a": f"{digest} a", "b": f"{digest} b", ".metadata": "m", "plan.json": "p"}
        present = frozenset({*here, ".metadata", "plan.json"})
        return Version(step=step, digest=digest, digest_by_file=names, here=present)

    old, new = version(4, "old", "a"), version(4, "new", "b")
    before = version(3, "one", "a", "b")
    assert choose([[old], [new]]) is None
    found = choose([[old, before], [new]])
    assert found is not None
    assert (found[0].step, found[1]["a"]) == (3, (0,))
    found = choose([[old, before], [before]], {(0, "one", "b")})
    assert found is not None
    assert (found[0].step, found[1]["b"]) == (3, (1,))
    assert choose([[old, before], [new]], {(0, "one", "b")}) is None


def stop_while_copies_are_sent(rank: int, root: str) -> None:
    watch_ranks(hang_timeout_s=2.0)
    model = wrap(model_of(1), draw_plan(random.Random(0), 3))
    optimizer = make_optimizer(model, "adamw")
    train(model, optimizer, range(1))
    replicas = Replicas(folder_of(root, rank))
    if rank == 1:
        write = Copying._write

        def stop_and_write(copying: Copying) -> Report | None:
            stop_here(for_s=25.0)
            return write(copying)

        Copying._write = stop_and_write  # type: ignore[method-assign]
    replicas.save(model, optimizer)
    replicas.wait(model)


def test_a_rank_that_is_stopped_while_it_writes_is_named_by_those_that_wait(
    tmp_path: Path,
) -> None:
    outcomes = run_ranks_expecting_failure(
        stop_while_copies_are_sent, 3, str(tmp_path), within_s=40.0
    )
    for outcome in (outcomes[0], outcomes[2]):
        assert "rank 1 (cpu" in outcome.message, outcome
        assert "has given no sign of life" in outcome.message
        assert outcome.is_within(20.0)  # before it is killed


@pytest.mark.parametrize(
    ("is_in_memory", "has_version", "room", "fits"),
    [
        (False, True, 30, True),
        (False, True, 29, False),
        (False, False, 60, True),
        (False, False, 59, False),
        (True, True, 50, True),  # the copies of 20 are in memory, too, until they are written
        (True, True, 49, False),
    ],
)
def test_room_for_all_versions_and_copies(
    is_in_memory: bool, has_version: bool, room: int, fits: bool
) -> None:
    offers = [
        replicas_module.Offer(
            node=f"host boot {node}",
            num_bytes=num_bytes,
            free_bytes=room,
            is_in_memory=is_in_memory,
            has_version=has_version,
            is_writer=node == 0,
        )
        for node, num_bytes in enumerate((20, 10))
    ]
    nodes = Nodes.of([offer.node for offer in offers])
    if fits:
        assert replicas_module._check_room(offers, nodes, [1, 0]) == (30, 30)
        return
    with pytest.raises(CheckpointError, match=r"has room for"):
        replicas_module._check_room(offers, nodes, [1, 0])
