"""``shardhet train``, ``measure``, ``doctor`` where every rank has an emulated accelerator."""

import json
from pathlib import Path

import pytest

from tests.programs import FEW_TEXTS, SHARDHET, SMALL_MODEL, run
from tests.selection import for_campaign, one_in
from tests.warm import ROOT

QUICK = ("debug=quick", *FEW_TEXTS, "data.num_judged_samples=2", "optim.lr=1e-3")
every_size = pytest.mark.parametrize("num_ranks", one_in(3, [2, 1, 4]))


def put_accelerators(folder: Path) -> None:
    """Let every rank of the programs that start in ``folder`` have one."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tests.emulated.everywhere\n"
    (folder / "sitecustomize.py").write_text(code)


def run_on_accelerators(folder: Path, *arguments: str, **environment: str) -> str:
    """What the program prints."""
    put_accelerators(folder)
    done = run([*SHARDHET, *arguments], folder, within_s=200.0, **environment)
    logs = "".join(path.read_text() for path in folder.rglob("rank*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout


def losses_of(folder: Path) -> list[float]:
    [path] = folder.glob("runs/*/metrics.jsonl")
    entries = [json.loads(line) for line in path.open()]
    return [entry["loss"] for entry in entries if "loss" in entry]


@pytest.mark.parametrize(
    ("num_ranks", "precision"),
    one_in(6, [(2, "FP16"), (1, "FP32"), (2, "FP32"), (4, "FP32"), (1, "BF16"), (4, "BF16")]),
)
def test_training_runs_from_start_to_end(
    tmp_path: Path, num_ranks: int, precision: str
) -> None:
    on_accelerators, on_hosts = tmp_path / "accelerators", tmp_path / "hosts"
    training = ["train", *SMALL_MODEL, *QUICK, f"cluster.num_ranks={num_ranks}"]
    training += [
        f"precision={precision}",
        "checkpoint.every=2",
        "checkpoint.in_background=true",
    ]
    for folder in (on_accelerators, on_hosts):
        folder.mkdir()
    output = run_on_accelerators(on_accelerators, *training)
    assert f"on {num_ranks} device" in output
    assert "emulated" in output
    assert run([*SHARDHET, *training], on_hosts).returncode == 0
    # Sums of gradients in float32 may be added in another order.
    expected = losses_of(on_hosts)
    assert losses_of(on_accelerators) == pytest.approx(expected, rel=1e-5)


@pytest.mark.campaign  # training stays
@pytest.mark.parametrize("program", [for_campaign("train"), "doctor"])
def test_gloo_carries_what_is_on_accelerators_if_it_is_asked_to(
    tmp_path: Path, program: str
) -> None:
    """As for GPUs of two makers."""
    if program == "doctor":
        output = run_on_accelerators(tmp_path, "doctor", "--ranks=2", SHARDHET_TRANSPORT="gloo")
        assert "have the losses of one process" in output
        return
    folders = [tmp_path / name for name in ("gloo", "nccl")]
    training = ["train", *SMALL_MODEL, *QUICK, "cluster.num_ranks=3"]
    for folder in folders:
        folder.mkdir()
        transport = "gloo" if folder.name == "gloo" else "auto"
        run_on_accelerators(folder, *training, f"transport={transport}")
    over_gloo, over_nccl = map(losses_of, folders)
    assert over_gloo == pytest.approx(over_nccl, rel=1e-6)


@pytest.mark.campaign  # tests of measuring have it without a launch
@every_size
def test_a_profile_is_measured(tmp_path: Path, num_ranks: int) -> None:
    measuring = ["measure", *SMALL_MODEL, f"cluster.num_ranks={num_ranks}"]
    measuring += ["max_microbatch_size=1", "num_repeats=3", "time_limit_s=5"]
    assert "emulated" in run_on_accelerators(tmp_path, *measuring)


@pytest.mark.campaign  # training stays
@every_size
def test_ranks_are_checked(tmp_path: Path, num_ranks: int) -> None:
    output = run_on_accelerators(tmp_path, "doctor", "--ranks", str(num_ranks))
    assert "have the losses of one process" in output
