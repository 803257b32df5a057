"""``shardhet plan`` and ``shardhet simulate`` as typed: what they say, write and refuse."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shardhet.apps.cli.quantities import counted, percent
from shardhet.apps.plan import SPEC
from shardhet.apps.plan import main as plan_main
from shardhet.apps.planning.answering import _of_few_rounds
from shardhet.apps.planning.inputs import load, read_request
from shardhet.apps.planning.report import MOST_SIMULATED
from shardhet.apps.planning.sentences import form_lines
from shardhet.apps.planning.what_if import WhatIfQuery, forms
from shardhet.apps.simulate import main as simulate_main
from shardhet.config.compose import conf_dir
from shardhet.config.models import DecoderConf
from shardhet.config.planning import PlannerConf, SimulateConf
from shardhet.planner.stages.bound import together_s
from shardhet.profiler.here import FoundCard
from shardhet.records.cluster import Cluster, DeviceSpec
from shardhet.records.plan import Plan, RankPlan
from shardhet.records.shown import recomputed
from shardhet.records.workload import Workload
from tests.selection import one_in
from tests.test_imports import ROOT

DESCRIBED = conf_dir() / "cluster" / "described"
QUICK = ["what_if_s=0", "model=gpt_125m"]


def with_cards(*arguments: str) -> list[str]:
    """With a cluster, if none is named."""
    hardware = ("cluster=", "cards=", "measured=", "network=")
    is_named = any(each.startswith(hardware) for each in arguments)
    return [*arguments] if is_named else ["cluster=rtx4090_2x3090", *arguments]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    plan_main(with_cards(*arguments))
    return " ".join(capsys.readouterr().out.split())


def refused(
    capsys: pytest.CaptureFixture[str], *arguments: str, command: object = plan_main
) -> tuple[int, str]:
    """The exit code and what stands on stderr."""
    assert callable(command)
    with pytest.raises(SystemExit) as raised:
        command(with_cards(*arguments))
    code = raised.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


def test_of_very_many_rounds_only_the_first_ones_are_simulated() -> None:
    few = Plan.by_hand(microbatch_sizes=[3], num_microbatches=[1], state_shares=[1.0])
    many = replace(few, num_rounds=10 * MOST_SIMULATED, last_round_size=1)
    assert _of_few_rounds(few) is few
    assert _of_few_rounds(many) == replace(few, num_rounds=MOST_SIMULATED)


@pytest.mark.parametrize("name", one_in(12, sorted(p.stem for p in DESCRIBED.glob("*.yaml"))))
def test_every_described_cluster_has_a_plan(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, f"cluster={name}", "global_batch_size=256", *QUICK)
    assert "predicted step" in text


def test_units_that_cross_in_two_levels_are_counted_not_their_patterns() -> None:
    workload = Workload.transformer(
        num_layers=4, width=64, num_heads=2, seq_len=32, vocab_size=128, hidden_width=128
    )
    rank = RankPlan(microbatch_sizes=(1,), state_share=1.0)
    plan = Plan(ranks=(rank,), two_level_units=("blocks.*",))
    assert "Rows of 4 of the units cross" in " ".join(form_lines(plan, workload))


def test_devices_compute_no_parts_of_samples() -> None:
    """Of one sample, one device computes all, and the hint about stages counts so."""
    shape = {"width": 2048, "num_layers": 2, "num_heads": 8, "num_kv_heads": 8}
    model = DecoderConf(**shape, hidden_width=4096, usual_seq_len=2048)
    cluster = Cluster.load(DESCRIBED / "rtx4090_2x3090.yaml").only((1, 2))
    scenario = PlannerConf(model=model).derived(cluster, "decoder").scenario
    assert together_s(scenario, 1) == together_s(scenario, 2)
    assert together_s(scenario, 3) > 1.5 * together_s(scenario, 2)


def test_what_the_optimizer_keeps_is_a_key() -> None:
    model = DecoderConf(width=64, num_layers=2, num_heads=2, num_kv_heads=2, hidden_width=64)
    cluster = Cluster.load(DESCRIBED / "rtx4090_2x3090.yaml")
    adam, sgd = (
        PlannerConf(model=model, num_moments=each).derived(cluster, "decoder").scenario
        for each in (None, 0)
    )
    assert adam.workload.state_bytes_per_element == 16
    assert sgd.workload.state_bytes_per_element == 8
    seconds = [each.profile.devices[0].optimizer_seconds_per_element for each in (adam, sgd)]
    assert seconds[1] < seconds[0] / 2


def test_small_quantities_are_said_as_one_of_them() -> None:
    assert [counted(1, "sample"), counted(2, "sample")] == ["1 sample", "2 samples"]
    assert [percent(each) for each in (0.0021, 0.0099, 0.17)] == ["0.2%", "1.0%", "17%"]


def test_hosts_whose_stated_memory_is_the_limit_are_told_what_they_lack(tmp_path: Path) -> None:
    path = tmp_path / "cards.yaml"
    path.write_text(
        "version: 1\nnodes:\n"
        "- {host: a, host_memory_bytes: 16 GiB, devices: [{kind: L4}, {kind: RTX 4090}]}\n"
        "- {host: b, host_memory_bytes: 8 GiB, devices: [{kind: RTX 3090}]}\n"
        "between_nodes: InfiniBand HDR\n"
    )
    request = read_request(SPEC, [f"cluster={path}", "model=llama_7b", "global_batch_size=4"])
    assert request is not None
    conf, inputs = load(SPEC, request, PlannerConf)
    demands = conf.to_constraints(inputs.scenario.cluster.devices)
    asked = WhatIfQuery(conf=conf, inputs=inputs, constraints=demands, best=None)
    [larger] = [each for each in forms(asked) if each.change.startswith("more memory of hosts")]
    told = re.fullmatch(
        r"which keeps (\S+) GiB on a \(16.0 stated\) and (\S+) GiB on b \(8.0 stated\).",
        larger.reach(0.0)[1],
    )
    assert told is not None
    assert float(told[1]) > 16
    assert float(told[2]) > 8


def test_what_fewer_devices_or_float16_would_give_is_what_these_plans_reach(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ("cluster=two_sites", "model=gpt_125m", "global_batch_size=256")
    text = said(capsys, *line)
    assert "leave_out=auto: without region east (device" in text
    for key in ("leave_out=auto", "precision=FP16", "max_stages=4"):
        told = re.search(rf"{key} +. +(\S+) +. +\+", text)
        assert told is not None
        value = told[1]
        text_with_key = said(capsys, *line, "what_if_s=0", key)
        assert f": {value} samples/s, " in text_with_key


def test_what_hosts_would_give_is_what_the_plan_with_the_key_reaches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    limits = [f"limits.{i}.memory_gib=1.5" for i in range(3)]
    line = ("model=gpt_125m", "global_batch_size=16", "what_if_s=0")
    code, text = refused(capsys, *line, *limits)
    assert code == 1
    told = re.search(r"\noptimizer_on_host=true has a plan: (\S+) samples/s", text)
    assert told is not None
    text = said(capsys, *line, *limits, "optimizer_on_host=true")
    assert f": {told[1]} samples/s, " in text


def test_pictures_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    said(capsys, *QUICK, f"out={tmp_path}/plan.json", f"picture={picture}")
    assert picture.stat().st_size > 5000
    simulate_main(
        with_cards(f"{tmp_path}/plan.json", "model=gpt_125m", f"picture={tmp_path}/s.svg")
    )
    assert (tmp_path / "s.svg").stat().st_size > 5000


def test_without_matplotlib_a_picture_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, text = refused(capsys, "picture=plan.png")
    assert code == 2
    assert "pip install 'shardhet[plots]'" in text


@pytest.mark.parametrize(
    "name, schema, main",
    [("planner", PlannerConf, plan_main), ("simulate", SimulateConf, simulate_main)],
)
def test_every_key_is_explained_in_help(
    name: str, schema: type, main: object, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = OmegaConf.load(conf_dir() / f"{name}.yaml")
    defaults = OmegaConf.to_container(OmegaConf.structured(schema), enum_to_str=True)
    assert isinstance(defaults, dict)
    for key, value in defaults.items():
        assert key in ("cluster", "model") or listed[key] == value
    assert callable(main)
    main(["--help"])
    text = capsys.readouterr().out
    assert all(f"{key}: " in text for key in listed if key != "defaults")
    main(["--cfg", "job", "cluster=h100_a100_20"])
    assert "H100" in capsys.readouterr().out


WITHOUT_TORCH = """
import resource, sys

sys.modules["torch"] = None
from shardhet.apps.plan import main

main(["cluster=two_regions_128", "model=llama_7b", "global_batch_size=512"])
used = resource.getrusage(resource.RUSAGE_SELF)
print("SECONDS", used.ru_utime + used.ru_stime)
"""


@pytest.mark.campaign  # fewer are, too
def test_128_devices_are_planned_for_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "128 devices of 4 kinds" in done.stdout
    # A guard only, in CPU seconds: experiments/planner measures the time.
    assert float(done.stdout.split("SECONDS")[1]) < 20


def test_a_cluster_that_is_not_named_is_what_is_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            plan_main([*QUICK, *arguments])
        return capsys.readouterr().err

    assert "torch sees no GPU on this machine. Name the cards, as in cards='4090" in refusal()
    assert "cluster.x=1: of no cluster. Name one of conf/" in refusal("cluster.x=1")
    card = DeviceSpec(host="a", kind="Tesla T4", memory_capacity_bytes=15 * 2**30)
    monkeypatch.setattr(
        "shardhet.profiler.here.cards_here", lambda: [FoundCard(device=card)] * 2
    )
    plan_main([*QUICK, "leave_out=never"])
    told = capsys.readouterr()
    assert "2 devices of 1 kind" in told.out
    assert "Tesla T4" in told.out


def test_units_are_named_by_the_last_part_of_their_names() -> None:
    rank = RankPlan(microbatch_sizes=(1,), state_share=1, recomputed_units=("*.0", "*head"))
    adapted = ["base.model.layers.0", "base.model.layers.1", "base.model.head"]
    assert recomputed(rank, adapted) == "1 of 2 layers, head"
    assert recomputed(rank, ["en.layers.0", "de.layers.0"]) == "en.layers, de.layers"


def test_a_model_is_described_once_for_all_that_is_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[str] = []
    whole = DecoderConf.to_workload

    def counted(conf: DecoderConf, *, param_dtype: str, **samples: int | None) -> Workload:
        described.append(param_dtype)
        return whole(conf, param_dtype=param_dtype, **samples)

    monkeypatch.setattr(DecoderConf, "to_workload", counted)
    said(capsys, *QUICK, "max_stages=2", "global_batch_size=8")
    assert described == ["bfloat16"]
