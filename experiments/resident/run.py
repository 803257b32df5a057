"""What do frozen weights that stay unsharded spare over slow links?

python -m experiments.resident.run            some minutes; needs an administrator's rights
python -m experiments.resident.run --quick    the run over the cable, short, and keeps nothing
"""

import os
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.capability.run import AS_STATED, gathers_of, pipelined, planned, setting_of
from experiments.common.cable import DEVICE, run_over_cable
from experiments.common.results import Bar, Page, Spread, columns, console, parser_of
from experiments.common.systems import (
    Rounds,
    TimedStep,
    by_plan,
    check_same_steps,
    take_turns,
    turns_of,
)
from experiments.decoders import decoder_config, make_decoder, random_batches
from shardhet import DeviceSpec, Plan, Workload
from shardhet.models.decoder import Block, Decoder
from shardhet.models.pretrained import LanguageModel, Lora, PretrainedFolder
from shardhet.planner import Demands
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.part import part_of
from shardhet.pricing.setting import Setting
from shardhet.profiler.describe import describe_sketch
from shardhet.profiler.sketch import sketch_model
from shardhet.records.schedule import GATHER, LaunchKind, ops_of, straight_schedule
from shardhet.simulator.stages import price_of
from shardhet.training.emulation import EmulatedDevice

HERE = Path(__file__).parent
GIB = 2**30

# Predicted: LoRA of llama_7b over an office's cables, with the prices of experiments/capability

CLUSTER, BATCH = "office_3", 256
LARGEST = 16  # samples of a microbatch, for the speed of a device alone
SEQ_LEN = 2048
LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": SEQ_LEN,
    "architectures": ["LlamaForCausalLM"],
}
LORA = Lora(rank=16, alpha=16.0, targets=("q_proj", "v_proj"), dropout=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One search; shares are of the sum of the devices' speeds."""

    resident_units: bool  # whether the planner may
    inputs_on_host: bool
    stages: str  # devices and units of each; "-": the planner may not make any
    step_s: float
    share: float
    resident_gib: float
    num_rounds: int
    gathers: str
    recomputed: str  # kinds of devices that recompute anything
    fullest_gib: float


def described() -> Workload:
    """llama_7b with frozen weights in bfloat16 beside adapters, on no device."""
    from transformers import LlamaConfig

    with tempfile.TemporaryDirectory() as name:
        LlamaConfig(**LLAMA_7B).save_pretrained(name)
        pretrained = PretrainedFolder.open(name)
        module = pretrained.on_meta(dtype=torch.bfloat16, lora=LORA)
    model = LanguageModel(pretrained.objective).trained(
        module,
        vocab_size=pretrained.vocab_size,
        seq_len=SEQ_LEN,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    return describe_sketch(sketch_model(model), model)


def sum_of_speeds(setting: Setting) -> float:
    """Samples/s of all devices, each alone, with all activations kept and no links."""
    names, profile = [unit.kind for unit in setting.workload.units if unit.fqn], setting.profile
    total = 0.0
    for device in setting.cluster.devices:
        units = [profile.unit(device.kind, name) for name in names]
        total += max(
            size / sum(unit.forward_s.at(size) + unit.backward_s.at(size) for unit in units)
            for size in range(1, 1 + LARGEST)
        )
    return total


def predict() -> list[Predicted]:
    """The fastest plans with and without frozen weights that stay, and in stages."""
    cluster = setting_of(CLUSTER, "llama_7b", BATCH, AS_STATED).cluster
    workload = described()
    setting = Setting(cluster, workload, derive_profile(cluster, workload, link_fraction=0.37))
    found = []
    for stays, on_host in ((False, False), (False, True), (True, False), (True, True)):
        demands = Demands(may_keep_frozen_weights=stays, may_keep_inputs_on_host=on_host)
        flat = planned(setting, BATCH, demands)
        assert flat is not None
        kept = flat.plan.resident_units
        resident = [u for u in workload.units if kept == ("*",) or u.fqn in kept]
        nbytes = sum(workload.frozen_bytes(workload.kind_of(u)) for u in resident)
        found.append(
            _predicted(flat.plan, setting, flat.predicted, stays, on_host, "-", nbytes)
        )
    pipeline = pipelined(setting, BATCH)
    assert pipeline is not None
    price = price_of(pipeline.plan, setting, partial(part_of, setting))
    stages = "; ".join(
        f"{len(s.unit_fqns)} on {','.join(map(str, s.positions))}" for s in pipeline.stages
    )
    found.append(_predicted(pipeline.plan, setting, price, False, False, stages, 0))
    return found


def _predicted(
    plan: Plan,
    setting: Setting,
    price: Any,
    stays: bool,
    on_host: bool,
    stages: str,
    resident_bytes: int,
) -> Predicted:
    kinds = {str(r.device.kind) for r in plan.ranks if r.recomputed_units}
    found = Predicted(
        resident_units=stays,
        inputs_on_host=on_host,
        stages=stages,
        step_s=price.step_time_s,
        share=BATCH / price.step_time_s / sum_of_speeds(setting),
        resident_gib=resident_bytes / GIB,
        num_rounds=plan.num_rounds,
        gathers=gathers_of(plan),
        recomputed=", ".join(sorted(kinds)) or "-",
        fullest_gib=max(r.memory.total_bytes for r in price.ranks) / GIB,
    )
    console.print(str(found), markup=False)
    return found


# Measured: a decoder with adapters on two hosts with a cable between them

FREE, STAYING = "gathered for every use", "resident"
CONFIG = decoder_config(width=256, num_layers=4, seq_len=64)
PLAN = Plan.by_hand(microbatch_sizes=[4, 2], num_microbatches=[4, 4])
PLANS = {FREE: PLAN, STAYING: replace(PLAN, resident_units=("*",))}
SPEEDS, MBIT_PER_S = (0.6, 0.3), 200.0
RUN, QUICK = Rounds(num_rounds=6, num_steps=3), Rounds(num_rounds=2, num_steps=1)
ADAPTER_RANK, LEARNING_RATE = 8, 1e-3


class Adapted(nn.Module):
    """A frozen projection and a trainable one of a low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, ADAPTER_RANK, bias=False)
        self.up = nn.Linear(ADAPTER_RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def make_adapted() -> Decoder:
    """A decoder whose queries, keys and values are adapted, and nothing else is trained."""
    model = make_decoder(CONFIG).requires_grad_(requires_grad=False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.qkv = Adapted(block.attention.qkv)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One plan; the same on both ranks."""

    name: str
    sent_bytes: int  # of one step, by both hosts, as their devices count them
    needed_bytes: int  # of rows and gradients, of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step over the cable."""

    plan: str
    round: int
    step: int
    seconds: float


def train(rank: int, rounds: Rounds) -> tuple[list[Arm], list[TimedStep]]:
    """Steps of both plans in turn."""
    emulated = EmulatedDevice(speed=SPEEDS[rank])
    spec = DeviceSpec(host="ab"[rank], kind=f"{SPEEDS[rank]:g} of a core")
    [batch] = random_batches(CONFIG, PLAN.global_batch_size, seed=1)
    options: dict[str, Any] = {"spec": spec, "learning_rate": LEARNING_RATE}
    steps = {
        name: by_plan(make_adapted(), plan, batch, emulated=emulated, **options)
        for name, plan in PLANS.items()
    }
    check_same_steps(steps)
    arms = []
    for name, step in steps.items():
        before = _sent_bytes()
        step()
        sent_bytes = _sent_bytes() - before
        needed = _needed_bytes(is_resident=name == STAYING)
        arms.append(Arm(name=name, sent_bytes=sent_bytes, needed_bytes=needed))
    numbered = {name: lambda _step, name=name: steps[name]() for name in steps}
    return arms, take_turns(numbered, rounds, in_line=True)


def _needed_bytes(*, is_resident: bool) -> int:
    """Every gather and reduction of two ranks moves what it is of across the cable once."""
    model = make_adapted()
    units = [model.embedding, *model.blocks, model.head]
    return sum(
        param.numel()
        * param.itemsize
        * (param.requires_grad or (op.kind is GATHER and not is_resident))
        for op in ops_of(straight_schedule(len(units), PLAN.form))
        if isinstance(op.kind, LaunchKind)
        for param in units[op.unit].parameters()
    )


def _sent_bytes() -> int:
    """What both hosts have sent over the cable so far.  Collective."""
    dist.barrier()
    # The columns of a device (proc(5)): eight of what it has received, then bytes sent.
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    [counts] = [line for line in lines if line.split(":")[0].strip() == os.environ[DEVICE]]
    sent = torch.tensor(int(counts.partition(":")[2].split()[8]))
    dist.all_reduce(sent)
    return int(sent)


def main() -> None:
    """Predict, run, and keep both."""
    options = parser_of(__doc__, quick="the run over the cable, and keeps nothing").parse_args()
    page = Page(HERE, is_kept=not options.quick)
    rounds = QUICK if options.quick else RUN
    arms, steps = run_over_cable(train, (1, 1), MBIT_PER_S, rounds)[0]
    seconds = {name: turns_of(steps, name) for name in PLANS}
    ratio = Spread.of([seconds[FREE][i] / s for i, s in seconds[STAYING].items()])
    page.table(
        f"measured: two ranks over {MBIT_PER_S:g} Mbit/s (median, 10th and 90th percentile)",
        ("frozen weights", "step (s)", "times as fast", "MB over the cable", "needed, MB"),
        [
            (
                arm.name,
                Spread.of(list(seconds[arm.name].values())).cell(3),
                ratio.cell(2) if arm.name == STAYING else "1",
                f"{arm.sent_bytes / 1e6:.2f}",
                f"{arm.needed_bytes / 1e6:.2f}",
            )
            for arm in arms
        ],
    )
    bars = [Bar(claim="a step in which all is gathered, as long as one", measured=ratio.median)]
    for each in arms:
        claim = f"{each.name}: bytes over the cable, of rows and gradients (with frames)"
        bars.append(Bar(claim=claim, measured=each.sent_bytes / each.needed_bytes))
    predicted = [] if options.quick else predict()
    if predicted:
        header, cells = columns(
            predicted,
            {
                "frozen weights may stay": "{0.resident_units}",
                "inputs may be on hosts": "{0.inputs_on_host}",
                "units of stages": "{0.stages}",
                "step (s)": "{0.step_s:.1f}",
                "of the speeds": "{0.share:.2f}",
                "GiB kept on each": "{0.resident_gib:.1f}",
                "rounds": "{0.num_rounds}",
                "a unit is gathered": "{0.gathers}",
                "recompute": "{0.recomputed}",
                "fullest, GiB": "{0.fullest_gib:.1f}",
            },
        )
        page.table(
            f"predicted: LoRA of rank {LORA.rank} on llama_7b, {CLUSTER}, batch {BATCH}",
            header,
            cells,
        )
        best = max(p.share for p in predicted)
        flat = max(p.share for p in predicted if p.stages == "-")
        bars += [
            Bar(claim="predicted share of the sum of speeds", measured=best, at_least=0.85),
            Bar(claim="the same without stages", measured=flat),
        ]
    page.bars(bars)
    samples = [
        Sample(plan=s.system, round=s.round, step=s.step, seconds=s.slowest_rank_s)
        for s in steps
    ]
    page.keep({"results.csv": samples, "predicted.csv": predicted})


if __name__ == "__main__":
    main()
