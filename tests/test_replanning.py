"""A rank that is out of memory lowers its budget, and the run plans again and goes on."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardhet.apps.launch.memory_limits import LowersLimit, OwnMemoryLimit, PlansAgainError
from shardhet.apps.launch.run_folder import RunFolder
from shardhet.comm.failure import LostPeerError
from shardhet.comm.peers import Shortage, is_out_of_memory
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import DeviceSpec
from shardhet.training.peak_memory import PeakMemory
from tests.programs import SHARDHET, TORCHRUN, run
from tests.test_rebalancing import measured_decoder
from tests.test_train import losses
from tests.test_worker import SHORT_TEXT, write_pages

MIB = 2**20
BATCH, NUM_STEPS, CHECKPOINT_EVERY, FULL_FROM_STEP = 16, 5, 2, 3
MEMORY_MIB = 64  # of each device
LEFT_MIB = 30  # beside what it stores; the first plan needs 44, another one 17
ROUNDING = 1e-9  # of losses in float64
# From a step on, rank 1 has less memory: something else takes all but a part of what is left.
FILLED_RANK = """
import os

if os.environ.get("RANK") == "1":
    import torch
    import shardhet.training.trainer

    take_step, held = shardhet.training.trainer.Trainer.train_step, []

    def fill(trainer, **options):
        if trainer.model.step >= {step} and not held:
            try:
                while True:  # of what is mapped and free, too
                    held.append(torch.empty(2**18, dtype=torch.uint8))
            except RuntimeError:
                del held[-{left_mib} * 4 :]
        return take_step(trainer, **options)

    shardhet.training.trainer.Trainer.train_step = fill
"""


@pytest.mark.parametrize(
    ("allocated", "asked", "predicted", "limit"),
    [
        (100, 0, None, 90),
        (100, 0, 80, 72),  # other things took the rest
        (80, 0, 100, 72),  # the device has less than was thought
        (100, 25, 100, 72),  # a quarter more was needed than predicted
        (100, 100, 500, 90),
        (0, 10, 10, 0),
    ],
)
def test_the_budget_is_what_fitted_less_what_was_not_predicted_and_a_tenth(
    allocated: int, asked: int, predicted: int | None, limit: int
) -> None:
    short = Shortage(allocated_bytes=allocated, asked_bytes=asked, predicted_bytes=predicted)
    assert short.limit_bytes == limit


def test_what_torch_says_was_asked_for_is_read() -> None:
    on_card = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has"
    )
    assert Shortage.of(on_card, 10).asked_bytes == 1.5 * 2**30
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert Shortage.of(refused.value, 10).asked_bytes == 2**60
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    heard = RuntimeError(str(refused.value))
    heard.__cause__ = LostPeerError("connection reset")
    assert not is_out_of_memory(heard)  # of another rank


def test_the_limit_is_of_the_device_whatever_its_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    card = DeviceSpec(host="a", kind="k", uuid="card/7")
    own_limit = OwnMemoryLimit(folder, card, local_rank=1)
    hook = LowersLimit(own_limit, 3, PeakMemory(torch.device("cpu")))
    with pytest.raises(
        PlansAgainError, match=r"rank 3 \(k on a \(card/7\)\) was out of"
    ) as own:
        hook.end(torch.OutOfMemoryError("Tried to allocate 2.00 MiB."))
    limit = OwnMemoryLimit(folder, replace(card, host="b"), local_rank=0).read()
    assert limit is not None
    assert limit.why == str(own.value)
    assert limit.nbytes > 0
    for other in (DeviceSpec(host="a", kind="k"), replace(card, uuid="card/8")):
        assert OwnMemoryLimit(folder, other, local_rank=1).read() is None
    hook.end(ValueError("another"))


def described(tmp_path: Path) -> tuple[str, ...]:
    """Keys of a run on two devices whose memory matters, and that was measured."""
    text = write_pages(tmp_path / "text")
    for page in text.iterdir():
        page.write_text(f"{page.name} is a page of a book. " * 40)
    keys = (*SHORT_TEXT, f"data.path={text}", "model.width=128", "model.num_layers=2")
    keys += ("data.seq_len=128", "precision=FP64", "cluster.kinds=[any,any]")
    keys += (f"num_steps={NUM_STEPS}", "cluster.device=CPU", "data.num_eval_samples=4")
    scenario = measured_decoder(tmp_path, keys)
    [node] = scenario.cluster.nodes
    devices = tuple(
        replace(each, memory_capacity_bytes=MEMORY_MIB * MIB) for each in node.devices
    )
    cluster = replace(scenario.cluster, nodes=(replace(node, devices=devices),))
    replace(scenario, cluster=cluster).save(tmp_path / "measured")
    keys += (f"cluster.memory_mib=[{MEMORY_MIB},{MEMORY_MIB}]", "plan=measured")
    keys += (f"plan.measured={tmp_path}/measured", f"plan.global_batch_size={BATCH}")
    return (*keys, f"checkpoint.every={CHECKPOINT_EVERY}")


def fill_rank_one(folder: Path) -> None:
    program = FILLED_RANK.format(step=FULL_FROM_STEP, left_mib=LEFT_MIB)
    (folder / "sitecustomize.py").write_text(program)


def goes_on(
    tmp_path: Path, launcher: Sequence[str], keys: Sequence[str], **variables: str
) -> str:
    """A run with a rank that is filled; what it has printed, once it has gone on."""
    folder = tmp_path / "filled"
    folder.mkdir()
    fill_rank_one(folder)
    arguments = [*launcher, *keys, "on_oom=REPLAN", f"hydra.run.dir={folder}/run"]
    within_s = 400.0 if variables else 100.0
    done = run(arguments, folder, within_s=within_s, is_cold=bool(variables), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = run([*SHARDHET, "train", *keys, f"run_dir={tmp_path}/alone"], tmp_path)
    assert expected.returncode == 0, expected.stderr
    assert losses(folder / "run") == pytest.approx(losses(tmp_path / "alone"), rel=ROUNDING)
    [limit] = (folder / "run/memory_limits").iterdir()
    nbytes = json.loads(limit.read_text())["nbytes"]
    measured = Scenario.load(tmp_path / "measured")
    assert nbytes < measured.cluster.memory_budget_bytes(1)
    return done.stdout


@pytest.mark.campaign  # a run that is started again, and one beside it
def test_a_run_that_is_out_of_memory_goes_on_with_less(tmp_path: Path) -> None:
    printed = goes_on(tmp_path, [*SHARDHET, "train"], described(tmp_path))
    assert "rank 1 (any 64 MiB" in printed
    assert "was out of memory in " in printed
    assert f"goes on after step {CHECKPOINT_EVERY}, from" in printed
    assert "from now on" in printed


@pytest.mark.campaign
def test_torchrun_starts_a_run_again_that_was_out_of_memory(tmp_path: Path) -> None:
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    printed = goes_on(
        tmp_path,
        [*launcher, "-m", "shardhet.apps.train"],
        described(tmp_path),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    assert f"goes on after step {CHECKPOINT_EVERY}, from" in printed
