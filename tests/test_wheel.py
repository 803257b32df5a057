"""An installed wheel trains from another directory, with its own conf/."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.worlds import patience

ROOT = Path(__file__).parent.parent


@pytest.mark.campaign  # half a minute; what the wheel brings stays
def test_an_installed_wheel_trains_from_anywhere(tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    site_dir, work_dir = tmp_path / "site", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(site_dir)
    work_dir.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "shardhet.apps.main", "train"),
            *("debug=quick", "model.width=16", "data.seq_len=8", "num_steps=2"),
            *("data.num_eval_samples=2", "cluster.device=CPU", "cluster.num_ranks=1"),
        ],
        cwd=work_dir,
        env={**os.environ, "PYTHONPATH": str(site_dir)},
        capture_output=True,
        text=True,
        timeout=100 * patience(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [run_dir] = (work_dir / "runs").iterdir()
    json.loads((run_dir / "run.json").read_text())
    assert not (site_dir / "conf").exists()
    assert (site_dir / "shardhet" / "conf" / "train.yaml").is_file()


def test_the_wheel_brings_the_console_script_and_all_that_the_package_reads(
    tmp_path: Path,
) -> None:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [name] = [name for name in names if name.endswith("entry_points.txt")]
        assert "shardhet = shardhet.apps.main:main" in archive.read(name).decode()
    assert not any(name.startswith("conf/") for name in names)
    for folder, brought in (("conf", "shardhet/conf"), ("shardhet", "shardhet")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"{brought}/{path.relative_to(ROOT / folder)}" in names, path
