"""What the demo has trained is stopped half-way and goes on with a device fewer."""

import re
from pathlib import Path

import pytest

from experiments.recovery.goes_on import losses_of
from shardhet import find_plan
from shardhet.apps.launch.run_folder import RunFolder
from tests.programs import SHARDHET, run
from tests.test_rebalancing import measured_decoder
from tests.test_worker import SHORT_TEXT, write_pages

NUM_STEPS = 300  # of 10 to 25 ms: it is told to end at half of them, and must hear it


@pytest.mark.campaign  # tests of resuming have it in small
def test_its_loss_continues_on_fewer_devices(tmp_path: Path) -> None:
    text = write_pages(tmp_path / "text")
    keys = (
        *SHORT_TEXT,
        f"data.path={text}",
        f"num_steps={NUM_STEPS}",
        "cluster.kinds=[any,any]",
        "precision=FP64",
    )
    demo = tmp_path / "demo"
    setting = measured_decoder(tmp_path, keys)
    setting.save(demo / "measured")
    find_plan(setting, global_batch_size=8).save(demo / "plan.json")
    plan = ("plan=file", f"plan.path={demo}/plan.json", f"plan.measured={demo}/measured")
    trained = run([*SHARDHET, "train", *keys, *plan, f"hydra.run.dir={demo}/run"], tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    done = run(["-m", "experiments.recovery.goes_on", "demo"], tmp_path, within_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Device 1 (any) is removed" in done.stdout
    whole, stopped, goes_on = (
        losses_of(RunFolder(demo / name)) for name in ("run", "stopped", "goes_on")
    )
    assert list({**stopped, **goes_on}) == list(range(1, NUM_STEPS + 1))
    assert not stopped.keys() & goes_on.keys()
    assert NUM_STEPS // 2 <= max(stopped) < NUM_STEPS
    assert {**stopped, **goes_on} == pytest.approx(whole, rel=1e-9)
    [apart] = re.findall(r"are at most (\S+) apart", done.stdout)
    assert float(apart) < 1e-9
    again = run(["-m", "experiments.recovery.goes_on", "demo"], tmp_path)
    assert "exists. Remove it." in again.stderr
    resume = (f"resume={demo}/goes_on/checkpoints", f"hydra.run.dir={demo}/finished")
    finished = run([*SHARDHET, "train", *keys, *plan, *resume], tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"nothing to do: {NUM_STEPS} steps are taken" in finished.stdout
