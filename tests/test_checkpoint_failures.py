"""Failures while a checkpoint is saved or loaded: one message, and the last one stays."""

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.testing._internal.two_tensor import TwoTensor

from shardhet import HetFSDP, Plan
from shardhet.checkpoint import CheckpointError, load, save, save_async
from shardhet.checkpoint.format import files
from shardhet.checkpoint.state import ranks
from tests.checkpoint_cases import (
    Lion,
    Odd,
    check_same,
    make_optimizer,
    train,
    whole_state,
    wrap,
)
from tests.selection import one_in, only
from tests.worlds import on_ranks, run_ranks, run_ranks_expecting_failure

WITHIN_S = 10.0
THREE = Plan.by_hand(
    microbatch_sizes=[2, 1, 0], rank_batch_sizes=[4, 2, 0], state_shares=[0.5, 0.3, 0.2]
)


def trained(seed: int = 0) -> tuple[HetFSDP, optim.Optimizer]:
    torch.manual_seed(seed)
    model = wrap(Odd().double(), THREE)
    optimizer = make_optimizer(model, "adamw")
    train(model, optimizer, range(2))
    return model, optimizer


def full_disk(path: Path) -> IO[bytes]:
    """A file of a disk without space."""
    path.touch()
    return Path("/dev/full").open("wb")


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as raised:
        call()
    return str(raised.value)


def all_refuse(model: HetFSDP, call: Callable[[], Any], *parts: str) -> None:
    """All ranks raise one message, which says all ``parts``; "a|b" is either."""
    message = message_of(call)
    assert set(model.exchange_objects(message)) == {message}
    for part in parts:
        assert any(each in message for each in part.split("|")), message


@pytest.mark.parametrize(
    ("bad_rank", "name"),
    only(
        [(1, ".distcp"), (0, "manifest.json")],
        [(i, ".distcp") for i in (0, 1)]
        + [(0, name) for name in (".metadata", "plan.json", "manifest.json")],
    ),
)
@on_ranks(3)
def test_a_full_disk_keeps_the_previous_checkpoint(
    rank: int, tmp_path: Path, bad_rank: int, name: str
) -> None:
    model, optimizer = trained()
    last = tmp_path / "last"
    save(model, optimizer, last, extra="earlier")
    before = whole_state(model, optimizer)
    train(model, optimizer, range(2, 3))

    def open_new(path: Path) -> Any:
        return full_disk(path) if path.name.endswith(name) else usual(path)

    usual = files.open_new
    with mock.patch.object(files, "open_new", open_new if rank == bad_rank else usual):
        says = f"rank {bad_rank}: ", "No space left on device", name
        all_refuse(model, lambda: save(model, optimizer, last, extra="later"), *says)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last"]  # space is free again
    assert load(model, optimizer, last) == "earlier"
    check_same(whole_state(model, optimizer), before)
    save(model, optimizer, last, extra="later")  # once there is space
    assert load(model, optimizer, last) == "later"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "No space left on device. Free space or choose another disk;"),
        (errno.EROFS, "Read-only file system. Choose a folder that this user may write to;"),
        (errno.EACCES, "Permission denied. Choose a folder that this user may write to;"),
        (errno.ENOENT, "No such file or directory. Choose a folder that all ranks share,"),
        (errno.EIO, "Input/output error. See whether that disk works,"),
    ],
)
def test_the_remedy_is_that_of_what_the_system_says(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> IO[bytes]:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(files, "open_new", refused)
    module = nn.Linear(2, 2)
    assert said in message_of(lambda: save(module, None, tmp_path / "checkpoint"))


def test_arguments_in_the_place_of_others_are_named(tmp_path: Path) -> None:
    module: Any = nn.Linear(2, 2)
    optimizer: Any = optim.SGD(module.parameters())
    path: Any = tmp_path / "checkpoint"
    orders = [(path, module, optimizer), (module, path, optimizer), (optimizer, module, path)]
    for call, name in ((save, "save"), (save_async, "save"), (load, "load")):
        for order in orders:
            with pytest.raises(
                TypeError, match=rf"checkpoint.{name}\(model, optimizer, path\)"
            ):
                call(*order)
    assert not path.exists()


@on_ranks(3)
def test_a_folder_that_cannot_be_made_is_said_on_every_rank(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    file = tmp_path / "file"
    file.touch()
    all_refuse(model, lambda: save(model, optimizer, file / "it"), "rank 0: ", str(file))


@on_ranks(3)
def test_a_folder_of_other_files_is_not_replaced(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("all of it")
    all_refuse(model, lambda: save(model, optimizer, tmp_path), "is not a checkpoint")
    assert thesis.read_text() == "all of it"


class Averaging(Lion):
    """Keeps a mean for each row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["row_mean"] = param.grad.new_zeros(len(param), 1, 1)


class Odder(Lion):
    """Keeps an object, on one rank."""

    rank = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if self.rank == 1:
                self.state[param]["history"] = [1, 2]


class InParts(Lion):
    """Keeps tensors of a class of their own, as torchao's 8-bit optimizers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            own = torch.zeros(param.shape)
            self.state[param]["mean"] = TwoTensor(own, own)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Averaging, "Averaging: state 'row_mean'"),
        (Odder, "rank 1: Odder: state 'history'"),
        (InParts, "is of type TwoTensor"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(3)
def test_states_of_another_shape_are_refused_before_anything_is_written(
    rank: int, tmp_path: Path, kind: type[Lion], found: str
) -> None:
    torch.manual_seed(0)
    model = wrap(Odd().double(), THREE)
    Odder.rank = rank
    optimizer = kind(param for param in model.parameters() if param.requires_grad)
    train(model, optimizer, range(1))
    none = tmp_path / "none"
    all_refuse(model, lambda: save(model, optimizer, none), found, "optimizer=None")
    assert not list(tmp_path.iterdir())
    model.exchange([])  # all have looked
    save(model, None, tmp_path / "model alone")


@on_ranks(3)
def test_what_ranks_disagree_on_is_named(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    same = tmp_path / "same"
    own = tmp_path / str(rank)
    all_refuse(model, lambda: save(model, optimizer, own), "path: positions 0 and 1")
    optimizer.param_groups[0]["lr"] = 0.1 * rank
    all_refuse(model, lambda: save(model, optimizer, same), "groups: positions 0 and 1")
    foreign = optim.SGD(nn.Linear(2, 2).parameters())
    all_refuse(model, lambda: save(model, foreign, same), "not one of the model's")
    odd, says = {"a": [object()]}, "rank 0: extra['a'][0] is of type object"
    all_refuse(model, lambda: save(model, None, same, extra=odd), says)
    assert not list(tmp_path.iterdir())


@on_ranks(1)
def test_parameters_that_are_gathered_are_not_saved(rank: int, tmp_path: Path) -> None:
    model = wrap(Odd().double(), Plan.even(1, microbatch_size=6))
    with model.unit_by_unit():
        model.module.blocks[0].inner.register_forward_pre_hook(
            lambda *_: save(model, None, tmp_path / "gathered")
        )
        with pytest.raises(CheckpointError, match=r"outside of model\.unit_by_unit"):
            model.module.blocks[0](torch.zeros(1, 5, dtype=torch.float64))
    assert not list(tmp_path.iterdir())


def save_on_rank_zero_alone(rank: int, folder: Path) -> None:
    model, optimizer = trained()
    ranks.SECONDS_FOR_ALL_TO_COME = 1.0
    if rank == 0:
        save(model, optimizer, folder / "alone")
    time.sleep(2)
    train(model, optimizer, range(1))


def test_a_save_on_one_rank_alone_does_not_hang(tmp_path: Path) -> None:
    outcomes = run_ranks_expecting_failure(save_on_rank_zero_alone, 3, tmp_path)
    assert "checkpoint.save: not all ranks have called it" in outcomes[0].message
    assert all(outcome.is_within(WITHIN_S) for outcome in outcomes)


def save_the_previous(rank: int, folder: Path) -> None:
    save(*trained(), folder / "last", extra="earlier")


def die_while_others_save(rank: int, folder: Path, is_async: bool) -> None:
    torch.manual_seed(1)
    model = wrap(Odd().double(), THREE)
    optimizer = make_optimizer(model, "adamw")
    if rank == 1:
        files.open_new = lambda path: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
    if is_async:
        save_async(model, optimizer, folder / "last").wait()
    else:
        save(model, optimizer, folder / "last")


def load_and_save_again(rank: int, folder: Path) -> str:
    model, optimizer = trained(seed=1)
    extra: str = load(model, optimizer, folder / "last")
    save(model, optimizer, folder / "last")
    return extra


@pytest.mark.campaign  # a save that is killed stays
@pytest.mark.parametrize("is_async", one_in(2, [True, False]))
def test_a_rank_that_is_killed_ends_all_and_keeps_the_previous(
    tmp_path: Path, is_async: bool
) -> None:
    run_ranks(save_the_previous, 3, tmp_path)
    outcomes = run_ranks_expecting_failure(die_while_others_save, 3, tmp_path, is_async)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert "ended without a message" in outcome.message, outcome.traceback
        assert outcome.is_within(WITHIN_S)
    assert (tmp_path / ".last.unfinished").is_dir()
    assert run_ranks(load_and_save_again, 3, tmp_path) == ["earlier"] * 3
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


class KilledAt:
    """Kills this process right before its n-th change of the file system."""

    def __init__(self, number: int) -> None:
        self.left = number

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return call(*args, **kwargs)

        return wrapped


def save_and_be_killed(folder: Path, number: int) -> None:
    model = nn.Linear(2, 2)
    killed = KilledAt(number)
    for owner, name in (
        (os, "fsync"),
        (os, "unlink"),
        (os, "rmdir"),
        (Path, "rename"),
        (Path, "mkdir"),
        (files, "open_new"),
        (files.DigestingFile, "write"),
    ):
        setattr(owner, name, killed.before(getattr(owner, name)))
    save(model, None, folder / "last", extra=number)
    os._exit(0)


def kill_at_every_step(rank: int, folder: Path) -> int:
    """How many steps a save has; after each the folder holds a whole checkpoint."""
    model = nn.Linear(2, 2)
    save(model, None, folder / "last", extra=-1)
    newest = -1
    for number in range(1000):
        child = os.fork()
        if child == 0:
            save_and_be_killed(folder, number)
        _, status = os.waitpid(child, 0)
        found = load(model, None, folder / "last")
        assert found in (newest, number), f"{number}: {found}"
        newest = found
        if os.WIFEXITED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            assert newest == number
            assert [each.name for each in folder.iterdir()] == ["last"]
            return number
    return -1


def test_a_save_that_is_killed_anywhere_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    [num_steps] = run_ranks(kill_at_every_step, 1, tmp_path)
    assert num_steps > 20


@on_ranks(3)
def test_what_one_rank_finds_all_ranks_say(rank: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    whole, bad = tmp_path / "whole", tmp_path / "bad"
    save(model, optimizer, whole, extra=torch.arange(3))
    before = whole_state(model, optimizer)
    if rank == 0:
        shutil.copytree(whole, bad)
        path = bad / "__2_0.distcp"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    model.exchange([0.0])
    train(model, optimizer, range(1))
    after = whole_state(model, optimizer)
    says = "__2_0.distcp: its content does not fit its digest"
    all_refuse(model, lambda: load(model, optimizer, bad), says)
    here = whole if rank != 1 else tmp_path / "nowhere"
    says = "nowhere: it does not exist"
    all_refuse(model, lambda: load(model, optimizer, here), "rank 1: ", says)
    check_same(whole_state(model, optimizer), after)
    extra: Tensor = load(model, optimizer, whole)
    assert torch.equal(extra, torch.arange(3))
    check_same(whole_state(model, optimizer), before)


def test_the_disk_takes_a_file_while_it_is_written_and_its_errors_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BYTES_BEFORE_WRITEBACK", 10)
    content = bytes(range(256)) * 100
    file = files.DigestingFile(tmp_path / "good")
    for start in range(0, len(content), 7):
        file.write(content[start : start + 7])
    file.finish()
    assert (tmp_path / "good").read_bytes() == content
    assert file.digest == files.digest_of_bytes(content)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    for end in ("finish", "abandon"):
        file = files.DigestingFile(tmp_path / end)
        file.write(content)
        if end == "abandon":
            file.abandon()
            continue
        with pytest.raises(CheckpointError, match=r"finish: .*input/output error"):
            file.finish()
        assert file.failure is not None
