"""``shardhet plan`` and ``shardhet simulate`` as typed: what they say, write and refuse."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shardhet.apps.cli.quantities import counted, percent
from shardhet.apps.plan import DOOR
from shardhet.apps.plan import main as plan_main
from shardhet.apps.planning.inputs import load, read_request
from shardhet.apps.planning.sentences import form_lines
from shardhet.apps.planning.what_if import Asked, forms
from shardhet.apps.simulate import main as simulate_main
from shardhet.config.compose import conf_dir
from shardhet.config.models import DecoderConf, SampleShape
from shardhet.config.planning import PlannerConf, SimulateConf
from shardhet.planner.stages.bound import together_s
from shardhet.pricing.derive import derive_profile
from shardhet.profiler.here import FoundCard
from shardhet.records.cluster import Cluster, DeviceSpec
from shardhet.records.plan import HoldsFor, Plan, RankPlan
from shardhet.records.shown import recomputed
from shardhet.records.workload import Workload
from tests.selection import for_campaign, one_in
from tests.test_imports import ROOT

DESCRIBED = conf_dir() / "cluster" / "described"
QUICK = ["what_if_s=0", "model=gpt_125m"]
EVERYTHING = ["explain=true", "baselines=true"]


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


def test_a_plan_for_several_hosts_says_what_to_start_on_each(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = ("cluster=lab", "leave_out=never", "max_rounds=1", "global_batch_size=16")
    text = said(capsys, *keys, *QUICK, f"out={tmp_path}/plan.json")
    for host, num in (("a100", 2), ("v100", 4)):
        assert (
            f"on {host}: torchrun --nnodes=2 --nproc-per-node={num} --rdzv-backend=c10d "
            f"--rdzv-endpoint=a100:29500 -m shardhet.apps.train plan=file "
            f"plan.path={tmp_path}/plan.json ..."
        ) in text


def test_a_plan_is_shown_with_its_reasons_and_its_rivals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = said(capsys, *EVERYTHING, f"out={tmp_path}/plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.global_batch_size == 64
    assert plan.holds_for == HoldsFor(
        param_dtype="bfloat16", tokens_per_sample=2048, num_moments=2
    )
    assert "llama_1b: 1,100,048,384 parameters in 24 units, bfloat16; 3 devices" in text
    assert "Times are derived: within a factor of 1.4 for nine of ten blocks" in text
    assert "they were not measured" in text
    for words in ("even sharding (stock FSDP)", "compute only", "memory only"):
        assert words in text
    assert "What limits it: compute, which takes longest on NVIDIA GeForce RTX 4090." in text
    assert "memory of NVIDIA GeForce RTX 3090 | 1 GiB more each" in text
    assert "NVIDIA GeForce RTX 4090 | one more" in text
    assert "No plan that was looked at is predicted to be 0.01% faster" in text
    assert "A step has 8 rounds of 8 samples" in text
    assert "| one round |" in text


def test_one_more_is_told_where_links_are_stated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A host with a single device states no link inside it."""
    path = tmp_path / "cards.yaml"
    path.write_text(
        """
version: 1
nodes:
- {host: big, devices: [{kind: NVIDIA GeForce RTX 4090}]}
- {host: small, link: {latency_s: 2.0e-05, bandwidth_bytes_per_s: 12.0e+9},
   devices: [{kind: NVIDIA GeForce RTX 3060, count: 2}]}
between_nodes: {latency_s: 5.0e-05, bandwidth_bytes_per_s: 1.25e+9}
""",
        encoding="utf-8",
    )
    text = said(capsys, f"cluster={path}", "model=gpt_125m", "explain=true")
    assert "NVIDIA GeForce RTX 3060 | one more" in text
    assert "NVIDIA GeForce RTX 4090 | 10 % faster" in text
    assert "NVIDIA GeForce RTX 4090 | one more" not in text


@pytest.mark.parametrize(
    ("key", "expected", "unexpected"),
    [
        ("max_rounds=1", "in quarters; one round", "1 to"),
        ("max_rounds=3", "1 to 3 equal rounds", "divide"),
        ("max_rounds=9", "1 to 8 equal rounds, or more (up to 9) that divide", "more that"),
        ("max_microbatch_size=4", "microbatches of up to 4 samples", "2,048 samples"),
        ("limits.0.batch=32", " and meets the demands is", "looked at is"),
    ],
)
def test_what_was_shown_is_said_of_the_plans_that_were_asked_for(
    key: str, expected: str, unexpected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (key, "leave_out=never", "explain=true", *QUICK)
    shown = said(capsys, *line).partition("No plan")[2]
    assert expected in shown.partition(". ")[0]
    assert unexpected not in shown.partition(". ")[0]


def test_where_an_even_plan_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("limits.0.memory_gib=8", "max_rounds=1", "baselines=true", "what_if_s=0")
    text = said(capsys, *keys)
    assert "| even sharding (stock FSDP) | does not fit |" in text


@pytest.mark.parametrize("name", one_in(12, sorted(p.stem for p in DESCRIBED.glob("*.yaml"))))
def test_every_described_cluster_has_a_plan(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, f"cluster={name}", "global_batch_size=256", *QUICK)
    assert "predicted step" in text


def test_stages_are_named_where_links_take_most_of_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ("leave_out=never", "model=gpt_125m")
    assert re.search(r"stages +. max_stages=4 +. ", said(capsys, "cluster=office", *line))
    # Neither beside limits, which stages have none of, nor where there is little to gain.
    assert "max_stages" not in said(capsys, "cluster=office", "limits.0.batch=1", *line)
    assert "max_stages" not in said(capsys, *line)


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
    setting = PlannerConf(model=model).derived(cluster, "decoder").setting
    assert together_s(setting, 1) == together_s(setting, 2)
    assert together_s(setting, 3) > 1.5 * together_s(setting, 2)


def test_limits_and_equal_devices_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = f"out={tmp_path}/plan.json"
    said(capsys, "limits.0.memory_gib=8", "limits.*3090.recompute=true", *QUICK, out)
    plan = Plan.load(tmp_path / "plan.json")
    assert all(rank.recomputed_units == ("*",) for rank in plan.ranks[1:])
    said(capsys, "equal=[[0,1,2]]", "global_batch_size=63", *QUICK, out)
    plan = Plan.load(tmp_path / "plan.json")
    assert len({rank.microbatch_sizes for rank in plan.ranks}) == 1
    assert len({rank.state_share for rank in plan.ranks}) == 1
    said(capsys, "limits.2.share=0", "limits.1.batch=5", *QUICK, out)
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.ranks[2].state_share == 0
    assert plan.ranks[1].rank_batch_size == 5
    said(capsys, "limits.1.exact_share=0.5", *QUICK, out)
    assert Plan.load(tmp_path / "plan.json").ranks[1].state_share == pytest.approx(0.5)


def test_how_much_of_the_memory_a_plan_may_use_is_a_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "usable_memory_fraction=0.8", *QUICK)
    assert text.count("of 19.2 (24 on the card)") == 2  # a row for each kind


def test_what_the_optimizer_keeps_is_a_key() -> None:
    model = DecoderConf(width=64, num_layers=2, num_heads=2, num_kv_heads=2, hidden_width=64)
    cluster = Cluster.load(DESCRIBED / "rtx4090_2x3090.yaml")
    adam, sgd = (
        PlannerConf(model=model, num_moments=each).derived(cluster, "decoder").setting
        for each in (None, 0)
    )
    assert adam.workload.state_bytes_per_element == 16
    assert sgd.workload.state_bytes_per_element == 8
    seconds = [each.profile.devices[0].optimizer_seconds_per_element for each in (adam, sgd)]
    assert seconds[1] < seconds[0] / 2


@pytest.mark.campaign  # tests of leaving devices out plan for some
def test_measured_files_are_planned_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cluster = Cluster.load(DESCRIBED / "rtx4090_2x3090.yaml")
    workload = Workload.transformer(
        num_layers=2, width=64, num_heads=2, vocab_size=100, seq_len=16
    )
    cluster.save(tmp_path / "cluster.json")
    workload.save(tmp_path / "workload.json")
    derive_profile(cluster, workload).save(tmp_path / "profile.json")
    text = said(capsys, f"measured={tmp_path}", "what_if_s=0", f"out={tmp_path}/plan.json")
    assert f"{tmp_path.name}: {workload.numel:,} parameters" in text
    assert "Of no use" not in text
    nothing = ("limits.2.batch=0", "limits.2.share=0", "explain=true")
    unused = said(capsys, f"measured={tmp_path}", *nothing)
    assert "Unused devices: 2. They compute and store nothing, and collectives run" in unused
    assert "leave no device idle, or only the 1 that is idle here; microbatches" in unused
    simulate_main([f"{tmp_path}/plan.json", f"measured={tmp_path}"])
    assert "takes" in capsys.readouterr().out
    for key, value in (("model", "small"), ("num_moments", 0)):
        code, text = refused(capsys, f"measured={tmp_path}", f"{key}={value}")
        assert code == 2
        assert f"{key}: it has no effect beside measured" in text
    (tmp_path / "profile.json").write_text('{"version": 3}')
    code, text = refused(capsys, f"measured={tmp_path}")
    assert code == 2
    assert "profile.json: field 'devices' is missing" in text


def test_cards_of_two_vendors_are_said_to_meet_over_gloo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = (*QUICK, "global_batch_size=2", "leave_out=never", "network=10GbE")
    two = "cards=7900 XTX | 3090"
    text = said(capsys, two, *asked)
    assert "GPUs of AMD and of NVIDIA meet over gloo alone (transport=gloo), which" in text
    assert "max_stages=4" not in text
    assert "AMD" not in said(capsys, "cards=4090 | 3090", *asked)
    _, text = refused(capsys, two, "max_stages=2", *asked)
    assert "meet over gloo alone, with which no stages are trained. Drop max_stages" in text


def test_how_long_a_number_of_tokens_takes_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "for_tokens=10M", "what_if_s=0")
    assert "24,010 tokens/s" in text
    assert "10M tokens take 7 minutes" in text
    prices = ("price_per_kwh=0.3", "price_per_hour=2")
    text = said(capsys, "for_tokens=10B", "what_if_s=0", *prices)
    assert "10B tokens take 115.7 hours (4.8 days), and at most 133.0 kWh by the limits" in text
    assert "They cost 271.3" in text
    code, text = refused(capsys, "for_tokens=many")
    assert code == 2
    assert "for_tokens: 'many' is no number. Write 10M" in text


def test_small_quantities_are_said_as_one_of_them() -> None:
    assert [counted(1, "sample"), counted(2, "sample")] == ["1 sample", "2 samples"]
    assert [percent(each) for each in (0.0021, 0.0099, 0.17)] == ["0.2%", "1.0%", "17%"]


def test_float16_is_planned_for_where_every_device_has_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = ("leave_out=never", "model=gpt_125m")
    text = said(capsys, "cluster=l4_a6000_p40_p100", "precision=FP16", *job)
    assert "in 14 units, float16; 8 devices" in text
    assert "precision=FP16: it" not in text
    text = said(capsys, "cluster=a10g_v100_t4_64", *job)
    assert re.search(r"float16 +. precision=FP16 +. [\d.,]+ +. \+\d", text)
    assert "FP16" not in said(capsys, "cluster=rtx4090_2x3090", *job)
    own = tmp_path / "old.yaml"
    own.write_text(
        "version: 1\n"
        "kinds: [{kind: Old, memory_capacity_bytes: 8000000000, source: a datasheet,\n"
        "  memory_bandwidth_bytes_per_s: 2.0e+11, peak_flops_per_s: {float32: 4.0e+12}}]\n"
        "nodes: [{host: a, devices: [{kind: Old}]}]\n"
    )
    for precision in ("FP16", "BF16"):
        code, text = refused(capsys, f"cluster={own}", f"precision={precision}")
        assert code == 2
        assert f"{precision} but it is not described of Old. Set precision=FP32, or" in text


REFUSALS = {
    "network=10GbE": "network: it has no effect without cards. Drop it, or give cards.",
    "cards=4090 cluster=office": "cluster: it has no effect beside cards. Drop one of them.",
    "cards=4090|3090 network=fast": "between_nodes is 'fast' but must be the name of a link",
    "cluster=gpu[01-02]": "cluster: choose one of a100_a10g_v100_t4_64",
    "globl_batch_size=3": "Did you mean global_batch_size?",
    "global_batch_size=0": "global_batch_size: 0 but it must be at least 1",
    "global_batch_size=abc": "'abc' of type 'str' could not be converted to Integer",
    "cluster=nowhere": "cluster: choose one of a100_a10g_v100_t4_64",
    "cluster=demo_4": "cluster: demo_4 describes no hardware. Choose one of a100_a10g_v100",
    "cluster=absent.yaml": "cluster_file: 'absent.yaml' does not exist",
    "measured=/nowhere": "Pass the one that shardhet measure out=... has written",
    "model.num_heads=3": "model.num_kv_heads: 4 but it must divide num_heads 3",
    "seq_len=0": "seq_len: 0 but it must be at least 1",
    "cluster=a10g_v100_t4_64 precision=BF16": "not described of Tesla V100-SXM2-16GB, Tesla T4."
    " Set precision=FP16 or FP32, or leave",
    "limits.9.batch=0": "limits.9: no such device. Give a position from 0 to 2",
    "limits.0.bath=0": "a limit has memory_gib, batch, microbatch, share, exact_share",
    "limits.0.batch=-1": "limits.0.batch: -1 but it must be at least 0",
    "limits.0.batch=1 limits.*4090.share=0": "is limited by another key too",
    "limits={0:{batch:1}}": "write one key after the other",
    "equal=[[0,5]]": "equal names device 5 but the cluster has devices 0 to 2",
    "out=/nowhere/plan.json": "out: the folder of '/nowhere/plan.json' does not exist",
    "out=/proc/plan.json": "out: '/proc/plan.json': /proc may not be written to (No such file",
    "setting_out=/proc/x": "setting_out: '/proc/x': /proc may not be written to",
    "picture=plan.txt": "must end in .png, .svg or .pdf",
    "cluster.nodes.0.link.latency_s=-1": "latency_s is -1.0 but must be finite and at least 0",
    "compute_fraction=0": "compute_fraction: 0.0 but it must be above 0",
    "global_batch_size=64.5": "Write a whole number: 64, not 64.0, 1e3 or 64k.",
    "global_batch_size=1e3": "Write a whole number: 64, not 64.0, 1e3 or 64k.",
    "global_batch_size=64GB": "Write a whole number: 64, not 64.0, 1e3 or 64k.",
    "global_batch_size=-4": "global_batch_size: -4 but it must be at least 1",
    "batch_size=64": "batch_size: no such key; the configuration has baselines",
    "--global_batch_size=64": "keys have no dashes. Write global_batch_size=64.",
    "global_batch_size:64": "1 file given (global_batch_size:64; keys are written",
    "global_batch_size 64": "2 files given (global_batch_size, 64; keys are written",
    "leave_out=yes": "leave_out: 'yes' but it must be one of ask, auto, never",
    "leave_out=[1,2]": "Write one word, without brackets.",
    "context_groups=true max_stages=2": "together with context_groups is not planned for",
    "context_groups=true equal=[[0,1]]": "together with equal is not planned for",
    "tolerance=2": "tolerance: 2.0 but it must lie between 0 and 1",
    "tolerance=-0.1": "tolerance: -0.1 but it must be at least 0",
    "tolerance=1%": "Write a plain number, without a unit: 0.5, not 50%.",
    "explain=maybe": "Write true or false.",
    "precision=bf16": "Did you mean BF16?",
    "precision=fp16": "Did you mean FP16?",
    "precision=half": "expected one of [AUTO, FP32, BF16, FP16]",
    "model=lama_1b": "Did you mean llama_1b?",
    "model=llama-1b": "Did you mean llama_1b?",
    "model.num_layer=3": "Did you mean model.num_layers?",
    "model.num_layers=0": "model.num_layers: 0 but it must be at least 1",
    "model.num_layers=two": "Write a whole number: 64, not 64.0, 1e3 or 64k.",
    "cluster=rtx4090": "Did you mean rtx4090_2x3090?",
    "hosts=[laptop]": "hosts: 'laptop' fits none of desktop. Write patterns such as desktop",
    "hosts=desktop": "Write a list, in brackets and quotes: 'hosts=[west-*]'",
    "measured=README.md": "measured: 'README.md' is not a folder",
    "measured=conf": "does not exist. Pass the path of a file.",
    "measured=conf model=tiny": "model: it has no effect beside measured",
    "limits.0.memory_gib=0": "limits.0.memory_gib: 0.0 but it must be above 0",
    "limits.0.memory_gib=24GB": "limits.0.memory_gib=24GB: Value '24GB'",
    "limits.0.share=1.5": "limits.0.share: 1.5 but it must lie between 0 and 1",
    "limits.0.exact_share=50": "limits.0.exact_share: 50.0 but it must lie between 0 and 1",
    "limits.0.share=0.1 limits.0.exact_share=0.2": "Drop one of them.",
    "limits.0.batch=100": "the batches that limits give sum to 100, but global_batch",
    "limits.0.exact_share=0.7 limits.1.exact_share=0.7": "sum to 1.4 but may be at most 1",
    "limits.*5090.batch=0": "kind or pattern of it: NVIDIA GeForce RTX 4090",
    "limits.-1.batch=0": "Give a position from 0 to 2",
    "limits.0=0": "limits.0=0: it names no limit",
    "limits.batch=0": "limits.batch=0: it names no limit",
    "equal=[0,1]": "'equal=[[0,1],[2,3]]'",
    "equal=[[0,1],[1,2]]": "equal names devices [1] more than once",
    "equal=0,1": "Write a list in brackets and quotes: 'equal=[[0,1],[2,3]]'",
    "max_microbatch_size=0": "max_microbatch_size: 0 but it must be at least 1",
    "max_microbatch_size=big": "Write a whole number",
    "usable_memory_fraction=1.5": "usable_memory_fraction: 1.5 but it must lie between 0 and 1",
    "link_fraction=37": "link_fraction: 37.0 but it must lie between 0 and 1",
    "compute_fraction=50%": "Write a plain number, without a unit: 0.5, not 50%.",
    "seq_len=2k": "Write a whole number",
    "vocab_size=-1": "vocab_size: -1 but it must be at least 1",
    "out=": "out: '' is not a file name",
    "out=conf": "out: 'conf' is not a file name",
    "setting_out=README.md": "setting_out: 'README.md': ",
    "picture=plan": "picture: 'plan' must end in .png, .svg or .pdf",
    "cluster.nodes.0.link.bandwidth_bytes_per_s=12": "bandwidth_bytes_per_s is 12.0 but",
}


def test_enough_mistakes_are_tried() -> None:
    assert len(REFUSALS) >= 60


@pytest.mark.parametrize("line", one_in(5, REFUSALS))
def test_what_is_wrong_is_named_with_the_fix(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = refused(capsys, *line.split())
    assert code == 2
    assert REFUSALS[line] in text
    assert "Traceback" not in text


def test_where_no_plan_exists_the_nearest_miss_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = refused(capsys, "model=tiny", "global_batch_size=1000000", "max_rounds=1")
    assert code == 1
    assert "a round has 1,000,000 samples, of which one device may compute" in text
    code, text = refused(capsys, "model=llama_13b")
    assert code == 1
    assert "the state of 196.31 GiB (193.95 GiB, and copies that collectives make) does" in text


def test_hosts_whose_stated_memory_is_the_limit_are_told_what_they_lack(tmp_path: Path) -> None:
    path = tmp_path / "cards.yaml"
    path.write_text(
        "version: 1\nnodes:\n"
        "- {host: a, host_memory_bytes: 16 GiB, devices: [{kind: L4}, {kind: RTX 4090}]}\n"
        "- {host: b, host_memory_bytes: 8 GiB, devices: [{kind: RTX 3090}]}\n"
        "between_nodes: InfiniBand HDR\n"
    )
    request = read_request(DOOR, [f"cluster={path}", "model=llama_7b", "global_batch_size=4"])
    assert request is not None
    conf, inputs = load(DOOR, request, PlannerConf)
    demands = conf.to_demands(inputs.setting.cluster.devices)
    asked = Asked(conf=conf, inputs=inputs, demands=demands, best=None)
    [larger] = [each for each in forms(asked) if each.change.startswith("more memory of hosts")]
    told = re.fullmatch(
        r"which keeps (\S+) GiB on a \(16.0 stated\) and (\S+) GiB on b \(8.0 stated\).",
        larger.reach(0.0)[1],
    )
    assert told is not None
    assert float(told[1]) > 16
    assert float(told[2]) > 8


@pytest.mark.campaign  # a search for the largest batch, which has its own tests
def test_a_batch_that_fits_in_no_round_is_told_the_largest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = refused(capsys, "global_batch_size=5000", "max_rounds=1")
    assert code == 1
    assert "Lower global_batch_size to " in text


@pytest.mark.campaign  # two searches
def test_what_the_memory_of_hosts_would_give_is_said_where_nothing_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = ("model=llama_7b", "global_batch_size=16", "what_if_s=0")
    code, text = refused(capsys, *line)
    assert code == 1
    assert "\noptimizer_on_host=true has a plan: " in text
    text = said(
        capsys, *line, "explain=true", "optimizer_on_host=true", f"out={tmp_path}/plan.json"
    )
    assert all(rank.optimizer_on_host for rank in Plan.load(tmp_path / "plan.json").ranks)
    assert "the optimizer steps in the memory of the host (optimizer_on_host), because" in text
    assert "how much it has is not stated (host_memory_bytes)" in text


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


def test_even_state_is_compared_with_though_a_limit_allows_less(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, *QUICK, "limits.0.share=0", "baselines=true")
    assert "Compared with (even state is not what limits ask for)" in text
    assert "does not fit" not in text  # nothing lacks memory
    text = said(capsys, *QUICK, "limits.0.share=0.5", "baselines=true")
    assert "is not what limits" not in text


def test_no_throughput_is_told_of_a_device_that_is_better_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ("cluster=h100_a100_20", "model=gpt_125m", "global_batch_size=256")
    text = said(capsys, *line, "explain=true", "leave_out=never")
    assert re.search(r"NVIDIA H100 80GB HBM3 +. one more +. [\d.,]+ +. \+\d", text)
    assert re.search(r"NVIDIA A100-SXM4-80GB +. one more +. - +. - ", text)


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


def test_a_simulated_step_is_shown_and_traced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said(capsys, *QUICK, f"out={tmp_path}/plan.json")
    model = "model=gpt_125m"
    simulate_main(with_cards(f"{tmp_path}/plan.json", model, f"trace={tmp_path}/trace.json"))
    text = " ".join(capsys.readouterr().out.split())
    assert "gpt_125m on 3 devices: a step of 64 samples takes" in text
    assert "of it for links" in text
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    code, text = refused(capsys, f"{tmp_path}/plan.json", command=simulate_main)
    assert code == 2
    assert "units embedding, blocks.0, blocks.1 differ. Give the model of the plan" in text
    there = [f"{tmp_path}/plan.json", model, "cluster=two_regions_128"]
    code, text = refused(capsys, *there, command=simulate_main)
    assert "plan: it has 3 devices but the cluster has 128" in text
    code, text = refused(capsys, "absent.json", command=simulate_main)
    assert "'absent.json' does not exist" in text
    code, text = refused(capsys, command=simulate_main)
    assert "shardhet simulate PLAN key=value" in text


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


@pytest.mark.campaign  # files in a folder of one's own stay in tests of train
def test_own_descriptions_are_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (DESCRIBED / "rtx4090_2x3090.yaml").read_text()
    folder = tmp_path / "cluster" / "described"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(text.replace("count: 2", "count: 4"))
    own = ["--config-dir", str(tmp_path), "cluster=described/mine"]
    assert "5 devices of 2 kinds" in said(capsys, *own, *QUICK)
    assert "5 devices of 2 kinds" in said(capsys, f"cluster={folder}/mine.yaml", *QUICK)
    assert "7 devices" in said(capsys, "cluster.nodes.0.devices.1.count=6", *QUICK)


@pytest.mark.campaign  # tests of fewer devices stay
def test_a_region_that_holds_the_rest_up_is_named_and_can_be_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    two_regions = ("cluster=two_regions_128", "model=llama_7b", "global_batch_size=256")
    assert "Unused devices: 16-127." in said(capsys, *two_regions)
    text = said(capsys, *two_regions, "leave_out=auto")
    assert "Better without region east" in text
    assert "start ranks on hosts west-h100-* only" in text
    out = f"out={tmp_path}/plan.json"
    text = said(capsys, *two_regions, "hosts=[west-h100-*]", out)
    assert "16 devices of 1 kind" in text
    assert "leave_out=auto" not in text
    simulate_main([f"{tmp_path}/plan.json", *two_regions[:2], "hosts=[west-h100-*]"])
    assert "takes" in capsys.readouterr().out


@pytest.mark.campaign  # tests of fewer devices stay
def test_all_of_a_cluster_that_gains_from_all_is_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "leave_out=auto" not in said(capsys)


def test_hosts_that_are_not_there_or_have_no_effect_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, text = refused(capsys, "cluster=two_regions_128", "hosts=[north-*]")
    assert code == 2
    assert "hosts: 'north-*' fits none of west-h100-0" in text
    code, text = refused(capsys, f"measured={tmp_path}", "hosts=[a]")
    assert code == 2
    assert "hosts: it has no effect beside measured" in text


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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["limits.0.batch=3", "limits.1.batch=3", "limits.2.batch=3"],
            "give sum to 9, but",
        ),
        (
            [f"limits.{i}.batch=0" for i in range(3)],
            "give sum to 0, but global_batch_size is",
        ),
        (["limits.0.batch=65"], "give sum to 65, but global_batch_size is 64"),
        for_campaign(["seq_len=1000000"], "no single sample beside it: device 0"),
        for_campaign(["limits.0.memory_gib=0.001"], "within 0.001 GiB"),  # ten seconds each
        (["model=llama_8b"], "Did you mean llama_7b?"),
        (["cluster=rtx4090_3x3090"], "or a file. Did you mean rtx4090_2x3090?"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_a_mistake_on_the_command_line_is_answered_by_its_cause(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*QUICK, "model=llama_1b", "cluster=rtx4090_2x3090", *overrides]
    assert words in refused(capsys, *given)[1]


LINK = "latency_s: 2.0e-5, bandwidth_bytes_per_s: 12.0e+9"


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    one_in(
        4,
        [
            ("NVIDIA L4", "NVIDIA L5", "is not known; the nearest are 'NVIDIA L4' (22 GB), "),
            ("2.0e-5", "20", "link: latency_s is 20.0 but must be"),
            ("12.0e+9", "12", "link: bandwidth_bytes_per_s is 12.0 but must be"),
            ("12.0e+9", "12eGB", "bandwidth_bytes_per_s is '12eGB' but must be a number"),
            ("bandwidth_bytes", "bandwith_bytes", "did you mean 'bandwidth_bytes_per_s'?"),
            ("count: 2", "count: two", "devices[0]: count is 'two' but must be of type int"),
        ],
    ),
    ids=lambda each: repr(each)[:20],
)
def test_a_mistake_in_a_cluster_file_is_answered_by_its_place(
    right: str, wrong: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        f"version: 1\nnodes:\n  - host: a\n    link: {{{LINK}}}\n"
        "    devices:\n      - {kind: NVIDIA L4, count: 2}\n"
    )
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert "predicted step" in said(capsys, f"cluster={path}", *QUICK)
    assert right in text
    path.write_text(text.replace(right, wrong))
    assert words in refused(capsys, f"cluster={path}", *QUICK)[1]


@pytest.mark.parametrize(
    "cards",
    ["cards=4090 + 3060x2 | 3090", 'cards="4090 + 3060x2 | 3090"', "cards='4090+3060x2|3090'"],
)
def test_cards_are_typed_as_a_shell_hands_them_over(
    cards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, cards, "network=10 GbE", "leave_out=never", *QUICK)
    assert "4 devices of 3 kinds" in text
    assert "Links that are not stated are assumed: PCIe 3 x16." in text


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


def test_the_cluster_is_checked_before_the_model_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "far.yaml"
    path.write_text(
        "version: 1\nnodes:\n- {host: a, region: x, devices: [{kind: NVIDIA L4}]}\n"
        "- {host: b, region: y, devices: [{kind: NVIDIA L4}]}\n"
    )
    _, text = refused(capsys, f"cluster={path}", "model=hf", "model.path=/nowhere")
    assert "between_regions, is not stated" in text


def test_a_peak_in_teraflops_is_told_from_flops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nkinds: [{kind: Mine, source: tried, memory_capacity_bytes: 1000000000,\n"
        "  memory_bandwidth_bytes_per_s: 1.0e+11, peak_flops_per_s: {float32: 67}}]\n"
        "nodes:\n  - host: a\n    devices:\n      - {kind: Mine}\n"
    )
    _, text = refused(capsys, f"cluster={path}", *QUICK)
    assert "Write 67.0e+12 if TFLOP/s are meant." in text


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

    def counted(conf: DecoderConf, samples: SampleShape, *, param_dtype: str) -> Workload:
        described.append(param_dtype)
        return whole(conf, samples, param_dtype=param_dtype)

    monkeypatch.setattr(DecoderConf, "to_workload", counted)
    said(capsys, *QUICK, "max_stages=2", "global_batch_size=8")
    assert described == ["bfloat16"]
