"""Training a plan with stages from a command line: curves, checkpoints, traces, refusals."""

import json
from pathlib import Path

import pytest

from tests.programs import run
from tests.test_train import ALONE, QUICK, losses, metrics

MODEL = (
    "model.width=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.hidden_width=16",
    "data.seq_len=8",
    "cluster.device=CPU",
    "precision=FP64",
    *QUICK,
)
FLAT = ("plan=by_hand", "plan.microbatch_sizes=[2,1,3]", "plan.num_rounds=2")
TWO = (
    "plan=by_hand",
    "plan.microbatch_sizes=[1,3,4]",
    "plan.num_rounds=3",
    "plan.state_shares=[0.2,0.8,1]",
    'plan.stages=[{units:[embedding,"blocks.0"],num_ranks:2},'
    '{units:["blocks.1",head],num_ranks:1}]',
)
THREE = (
    "plan=by_hand",
    "plan.microbatch_sizes=[6,6,6]",
    "plan.num_rounds=2",
    'plan.stages=[{units:[embedding],num_ranks:1},{units:["blocks.*"],num_ranks:1},'
    "{units:[head],num_ranks:1,in_flight:1}]",
)


def train(tmp_path: Path, name: str, *keys: str) -> Path:
    done = run([*ALONE, *MODEL, *keys, f"run_dir={name}"], tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path / name


@pytest.mark.campaign  # six launches; without any, tests of checkpoints of pipelines have it
def test_a_run_in_stages_is_that_of_any_plan_and_goes_on_under_others(tmp_path: Path) -> None:
    flat = train(tmp_path, "flat", *FLAT)
    keys = ("trace=true", "trace_steps.first_step=2", "trace_steps.num_steps=1")
    keys += ("replicas.every=2", f"replicas.folder={tmp_path}/replicas")
    staged = train(tmp_path, "staged", *TWO, "checkpoint.every=3", *keys)
    expected = losses(flat)
    assert losses(staged) == pytest.approx(expected, rel=1e-9)
    [last], [of_flat] = (
        [each["held_out_loss"] for each in metrics(path) if "held_out_loss" in each]
        for path in (staged, flat)
    )
    assert last == pytest.approx(of_flat, rel=1e-9)
    for rank, (stage, unit) in enumerate([(0, "blocks.0"), (0, "embedding"), (1, "head")]):
        trace = json.loads((staged / "traces" / f"rank{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count(f"stage {stage}: forward of round 2") == 1
        assert names.count(f"stage {stage}: backward of round 0") == 1
        assert names.count(f"backward {unit} [0]") == 3
        assert names.count("wait_stage root") == 3
    for name, plan in (("goes on flat", FLAT), ("goes on in three", THREE)):
        resume = f"resume={staged}/checkpoints/step_00000003"
        assert losses(train(tmp_path, name, *plan, resume)) == pytest.approx(
            expected[3:], rel=1e-9
        )
