"""``shardhet train``, ``measure``, ``doctor`` where every rank has an emulated accelerator."""

import json
from pathlib import Path

import pytest

from tests.programs import FEW_TEXTS, SHARDHET, SMALL_MODEL, run
from tests.selection import one_in
from tests.warm import ROOT

QUICK = ("debug=quick", *FEW_TEXTS, "data.num_eval_samples=2", "optim.lr=1e-3")


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
