"""The demo's commands, from a shell to a trained model; predicted and measured values."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from examples.demo import commands, measured_ratio
from shardhet import Cluster, Plan, Workload, find_plan, simulate
from shardhet.apps.run.prediction import Outcome, Prediction
from shardhet.checkpoint import Checkpoints
from shardhet.extras.compare import main as compare
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.scenario import Scenario
from shardhet.records.plan import PlannedUnit
from shardhet.training.peak_memory import DeviceUse
from tests.programs import run
from tests.warm import ROOT


@pytest.mark.campaign  # `make demo`; each of its commands has its own tests
def test_all_of_it_runs_and_stays_in_one_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = str(ROOT / "examples/demo.py")
    done = run([program, "--quick", "--out=demo"], tmp_path, within_s=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a step was predicted to take" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    demo = tmp_path / "demo"
    for file in ("measured/profile.json", "plan.json", "simulated.json"):
        assert (demo / file).is_file(), file
    assert json.loads((demo / "run/traces/rank0.json").read_text())["traceEvents"]
    plan = Plan.load(demo / "run/plan.json")
    with safe_open(demo / "run/model.safetensors", "pt") as model:
        numel = sum(model.get_tensor(name).numel() for name in model.keys())  # noqa: SIM118
    assert numel == sum(unit.numel for unit in plan.units)
    assert Checkpoints(demo / "run/checkpoints").latest() is not None
    lines = [json.loads(line) for line in (demo / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["predicted_step_time_s"] > 0 for line in lines if "step_time_s" in line)
    assert any("device3/predicted_memory_bytes" in line for line in lines)
    for i in range(4):  # rows, gradients and moments are known to the row
        looks = [line for line in lines if f"device{i}/kept_bytes" in line]
        kept = [line[f"device{i}/kept_bytes"] for line in looks]
        [said] = {line[f"device{i}/predicted_kept_bytes"] for line in looks}
        assert kept[-1] == pytest.approx(said, rel=1e-2)
    assert "rest of the peak" in done.stdout
    compare([str(demo / "run")])
    told = capsys.readouterr().out
    assert all(f"device {i} emulated" in told for i in range(4))


def test_the_ratio_to_even_sharding_is_measured(tmp_path: Path) -> None:
    for name, seconds, said in (("run", 1.0, 0.9), ("even", 1.5, 1.8)):
        (tmp_path / name).mkdir()
        lines = [{"step_time_s": 9.0 if i < 3 else seconds} for i in range(10)]
        lines[0]["predicted_step_time_s"] = said
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    told = "1000 ms a step, and 1500 ms with even sharding: 1.50 times as fast. Predicted: 2.00"
    assert told in measured_ratio(tmp_path)


def test_each_command_reads_what_an_earlier_one_writes() -> None:
    written: list[str] = []
    for _, command in commands(Path("demo"), 10):
        values = dict(each.split("=", 1) for each in command.split() if "=" in each)
        read = [values[key] for key in ("measured", "plan", "plan.path") if key in values]
        assert all(path in written for path in read if path.startswith("demo")), command
        written += [values[key] for key in ("out", "hydra.run.dir") if key in values]


DESCRIBED = Path(__file__).parent.parent / "conf/cluster/described/rtx4090_2x3090.yaml"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As if somebody had measured a small model there."""
    folder = tmp_path_factory.mktemp("measured")
    cluster = Cluster.load(DESCRIBED)
    workload = Workload.transformer(
        num_layers=4, width=256, num_heads=4, vocab_size=1000, seq_len=128
    )
    profile = derive_profile(cluster, workload)
    for name, record in (("cluster", cluster), ("workload", workload), ("profile", profile)):
        record.save(folder / f"{name}.json")
    find_plan(Scenario(cluster, workload, profile), global_batch_size=24).save(
        folder / "plan.json"
    )
    return folder


def test_a_prediction_is_the_simulated_step(measured: Path) -> None:
    plan = Plan.load(measured / "plan.json")
    prediction = Prediction.in_scenario(plan, Scenario.load(measured))
    cluster = Cluster.load(measured / "cluster.json")
    workload = Workload.load(measured / "workload.json")
    timeline = simulate(plan, Scenario(cluster, workload, derive_profile(cluster, workload)))
    assert prediction.step_time_s == timeline.step_time_s
    assert prediction.busy_shares == tuple(1 - timeline.idle_fraction(i) for i in range(3))


def test_a_plan_of_another_model_has_no_prediction(measured: Path) -> None:
    other = Plan.by_hand(microbatch_sizes=[8, 8, 8], state_shares=[0.4, 0.3, 0.3])
    with pytest.raises(ValueError, match="written by hand and names no units"):
        Scenario.load(measured).check_plan(other, name="plan.measured")
    other = replace(other, units=(PlannedUnit(fqn="head", numel=3),))
    with pytest.raises(ValueError, match="Measure this model on this cluster"):
        Scenario.load(measured).check_plan(other, name="plan.measured")


def test_an_outcome_is_told_by_its_median_without_the_first_steps(measured: Path) -> None:
    plan = Plan.load(measured / "plan.json")
    prediction, outcome = Prediction.in_scenario(plan, Scenario.load(measured)), Outcome()
    for ratio in (9.0, 9.0, 9.0, 1.0, 1.1, 1.2):
        outcome.step_times_s.append(ratio * prediction.step_time_s)
    use = DeviceUse(busy_share=0.5, waiting_share=0.4, peak_memory_bytes=2**20)
    outcome.looks.append([use] * 3)
    assert outcome.beside(prediction).endswith("(median of 6): +10.0%")
    assert outcome.table(plan, prediction).row_count == 3
