"""shardhet inspect and shardhet export."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardhet.apps import checkpoint_export, checkpoint_inspect
from shardhet.checkpoint import Checkpoints, save
from tests.checkpoint_cases import Odd
from tests.test_checkpoint_failures import trained
from tests.worlds import run_ranks


def save_under_three_ranks(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = trained()
    save(model, optimizer, folder / "saved", extra={"loader": [1, 2]})
    whole: dict[str, torch.Tensor] = model.state_dict()
    return whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("apps")
    state, *_ = run_ranks(save_under_three_ranks, 3, folder)
    return folder / "saved", state


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    status = 0
    try:
        checkpoint_inspect.main(arguments)
    except SystemExit as leaves:
        status = int(leaves.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_inspect_says_what_is_in_it(
    saved: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, _ = inspected(capsys, str(saved[0]), "--tensors")
    assert status == 0
    for said in (
        "step         2",
        "3 ranks",
        f"torch {torch.__version__}",
        "AdamW",
        "step, exp_avg, exp_avg_sq",
        "3 devices, 6 samples a step, shares 50.0%, 30.0%, 20.0%",
        "group 1",
        "lr 0.02",
        "loader",
        "head.weight [11, 5] float64",
        "Complete: all 6 files match their digests.",
    ):
        assert said in text, f"{said!r} is not in\n{text}"


def test_inspect_lists_a_folder_of_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path = tmp_path / "checkpoints"  # in the folder of a run
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(Odd(), None, step=step)
    for path in (tmp_path, tmp_path.parent):
        assert inspected(capsys, str(path))[0] == 0
    (checkpoints.path_of(1) / ".metadata").unlink()
    status, text, _ = inspected(capsys, str(tmp_path))
    assert status == 1
    assert "step_00000001  broken" in text
    assert "step_00000002  whole" in text


def test_inspect_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, text = inspected(capsys, str(tmp_path / "nowhere"))
    assert status == 2
    assert "Give the folder of a checkpoint" in text
    save(Odd(), None, tmp_path / "bad")
    file = tmp_path / "bad" / "__0_0.distcp"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    status, _, text = inspected(capsys, str(tmp_path / "bad"))
    assert status == 1
    assert f"{file}: its content does not fit its digest" in text


def test_inspect_reads_what_torch_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"model": Odd().state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    status, text, _ = inspected(capsys, str(tmp_path / "dcp"))
    assert status == 0
    assert "another program" in text
    assert "cannot be verified" in text


def test_export_writes_the_whole_model(
    saved: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "model.safetensors"
    checkpoint_export.main([str(saved[0]), "--to", "safetensors", "--out", str(out)])
    assert f"written to {out}" in capsys.readouterr().out
    found = load_file(out)
    assert found.keys() == saved[1].keys()
    for name, tensor in saved[1].items():
        assert torch.equal(found[name], tensor), name
    plain = Odd().double()
    plain.load_state_dict(found)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_torchs_own_converter_reads_it_too(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    out = tmp_path / "converted.pt"
    dcp_to_torch_save(saved[0], out)
    found = torch.load(out, weights_only=True)
    for name, tensor in saved[1].items():
        assert torch.equal(found["model"][name], tensor), name
    assert found["optim"]["param_groups"][1]["lr"] == 0.02


def test_export_refuses_what_it_cannot_do(
    saved: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken = tmp_path / "taken"
    taken.touch()

    def refused(path: Path, to: str, out: Path, status: int) -> str:
        with pytest.raises(SystemExit) as raised:
            checkpoint_export.main([str(path), "--to", "safetensors", "--out", str(out)])
        assert raised.value.code == status
        return capsys.readouterr().err

    assert "taken exists" in refused(saved[0], "safetensors", taken, 2)
    assert "is not a folder" in refused(saved[0], "safetensors", tmp_path / "a" / "b", 2)
    assert "Nothing was exported" in refused(tmp_path, "safetensors", tmp_path / "b", 1)
    step = tmp_path / "run" / "checkpoints" / "step_00000002"
    shutil.copytree(saved[0], step)
    for above in (step.parent, step.parent.parent):
        assert f"there is {step}. Name" in refused(above, "safetensors", tmp_path / "b", 1)
    if Path("/proc/self").exists():
        for to in checkpoint_export.FORMATS:
            assert "Nothing was exported" in refused(saved[0], to, Path("/proc/x"), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken"]
