"""What do frozen weights that stay unsharded spare over slow links?

python -m experiments.resident.run            some minutes; needs an administrator's rights
python -m experiments.resident.run --quick    the run over the cable, short, and keeps nothing
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore

from experiments.capability.run import AS_STATED, gathers_of, inputs_of
from experiments.common.launch import FORKED, start_ranks
from experiments.common.results import Bar, Page, Spread, console, parser_of
from experiments.common.systems import (
    Rounds,
    System,
    TimedStep,
    check_same_losses,
    first_losses,
    take_turns,
)
from experiments.decoders import decoder_config, make_decoder, random_batches
from experiments.resident.activations import LORA, described, kept
from shardhet import Cluster, DeviceSpec, HetFSDP, Plan, Workload
from shardhet.apps.launch.emulated_link import EmulatedLink, emulated_link
from shardhet.comm.transport import SWITCH
from shardhet.models.decoder import Block, Decoder
from shardhet.planner import Demands, PlanSolution, solve
from shardhet.planner.stages.find import find_pipeline
from shardhet.planner.stages.solution import PipelineSolution
from shardhet.pricing.derive import derive_profile
from shardhet.pricing.part import part_of
from shardhet.pricing.setting import Setting
from shardhet.records.schedule import GATHER, LaunchKind, ops_of, straight_schedule
from shardhet.simulator.stages import price_of
from shardhet.training.emulation import EmulatedDevice

HERE = Path(__file__).parent
GIB = 2**30

# Predicted: LoRA of llama_7b over an office's cables, with the prices of experiments/capability

CLUSTER, BATCH = "office_3", 256
MAX_STAGES = 4
LARGEST = 16  # samples of a microbatch, for the speed of a device alone


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


def setting_of(cluster: Cluster, workload: Workload) -> Setting:
    """As ``inputs_of`` has it with AS_STATED."""
    return Setting(cluster, workload, derive_profile(cluster, workload, link_fraction=0.37))


def sum_of_speeds(setting: Setting) -> float:
    """Samples/s of all devices, each alone, with all activations kept and no links."""
    total = 0.0
    for device in setting.cluster.devices:
        of_kind = [
            setting.profile.unit(device.kind, unit.kind)
            for unit in setting.workload.units
            if unit.fqn
        ]
        total += max(
            size / sum(unit.forward_s.at(size) + unit.backward_s.at(size) for unit in of_kind)
            for size in range(1, 1 + LARGEST)
        )
    return total


def predict() -> list[Predicted]:
    """The fastest plans with and without frozen weights that stay, and with stages."""
    _, inputs = inputs_of(CLUSTER, "llama_7b", BATCH, AS_STATED)
    setting = setting_of(inputs.setting.cluster, described(LORA))
    total, found = sum_of_speeds(setting), []
    for stays in (False, True):
        for on_host in (False, True):
            demands = Demands(may_keep_frozen_weights=stays, may_keep_inputs_on_host=on_host)
            solution = solve(setting, global_batch_size=BATCH, demands=demands, tolerance=0.0)
            found.append(_predicted(solution, setting, total, stays=stays, on_host=on_host))
            console.print(str(found[-1]), markup=False)
    for on_host in (False, True):
        pipeline = find_pipeline(
            setting,
            global_batch_size=BATCH,
            smaller=partial(part_of, setting),
            max_stages=MAX_STAGES,
            demands=Demands(may_keep_inputs_on_host=on_host),
            tolerance=0.0,
        )
        assert pipeline is not None
        found.append(_in_stages(pipeline, setting, total, on_host=on_host))
        console.print(str(found[-1]), markup=False)
    return found


def _predicted(
    solution: PlanSolution, setting: Setting, total: float, *, stays: bool, on_host: bool
) -> Predicted:
    plan, workload = solution.plan, setting.workload
    kept = [
        u
        for u in workload.units
        if plan.resident_units == ("*",) or u.fqn in plan.resident_units
    ]
    return Predicted(
        resident_units=stays,
        inputs_on_host=on_host,
        stages="-",
        step_s=solution.predicted.step_time_s,
        share=solution.samples_per_s / total,
        resident_gib=sum(workload.frozen_bytes(workload.kind_of(u)) for u in kept) / GIB,
        num_rounds=plan.num_rounds,
        gathers=gathers_of(plan),
        recomputed=_recomputed(plan),
        fullest_gib=max(r.memory.total_bytes for r in solution.predicted.ranks) / GIB,
    )


def _in_stages(
    pipeline: PipelineSolution, setting: Setting, total: float, *, on_host: bool
) -> Predicted:
    """A pipeline, priced anew from the plan alone."""
    plan = pipeline.plan
    price = price_of(plan, setting, partial(part_of, setting))
    step_s = price.step_time_s
    numbers = [
        f"{len(s.unit_fqns)} on {','.join(map(str, s.positions))}" for s in pipeline.stages
    ]
    return Predicted(
        resident_units=False,
        inputs_on_host=on_host,
        stages="; ".join(numbers),
        step_s=step_s,
        share=BATCH / step_s / total,
        resident_gib=0.0,
        num_rounds=plan.num_rounds,
        gathers=gathers_of(plan),
        recomputed=_recomputed(plan),
        fullest_gib=max(r.memory.total_bytes for r in price.ranks) / GIB,
    )


def _recomputed(plan: Plan) -> str:
    """Kinds of devices that recompute anything."""
    kinds = {str(r.device.kind) for r in plan.ranks if r.recomputed_units}
    return ", ".join(sorted(kinds)) or "-"


# Measured: a decoder with adapters on two hosts with a cable between them

FREE, STAYING = "gathered for every use", "resident"
CONFIG = decoder_config(width=256, num_layers=4, seq_len=64)
PLAN = Plan.by_hand(microbatch_sizes=[4, 2], num_microbatches=[4, 4])
SPEEDS, MBIT_PER_S = (0.6, 0.3), 200.0
RUN = Rounds(num_rounds=6, num_steps=3)
DEVICE = "RESIDENT_DEVICE"  # the variable with the name of the cable's device
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


def train(rank: int) -> tuple[list[Arm], list[TimedStep]]:
    """Steps of both plans in turn."""
    emulated = EmulatedDevice(speed=SPEEDS[rank])
    spec = DeviceSpec(host="ab"[rank], kind=f"{SPEEDS[rank]:g} of a core")
    plans = {FREE: PLAN, STAYING: replace(PLAN, resident_units=("*",))}
    own = PLAN.sample_indices(rank)
    batch = [t[own] for t in random_batches(CONFIG, PLAN.global_batch_size, seed=1)[0]]
    systems = {name: _system(plan, spec, emulated) for name, plan in plans.items()}
    losses = {name: first_losses(each, [batch], 2) for name, each in systems.items()}
    check_same_losses(losses)
    steps = {name: lambda _step, name=name: systems[name].step(*batch) for name in systems}
    arms = []
    for name in plans:
        before = _sent_bytes()
        steps[name](0)
        sent_bytes = _sent_bytes() - before
        needed = _needed_bytes(is_resident=name == STAYING)
        arms.append(Arm(name=name, sent_bytes=sent_bytes, needed_bytes=needed))
    return arms, take_turns(steps, RUN, in_line=True)


def _system(plan: Plan, spec: DeviceSpec, emulated: EmulatedDevice) -> System:
    model = HetFSDP(make_adapted(), plan, device_spec=spec)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    emulated.slow_down(model, optimizer)

    def step(*batch: Tensor) -> float | None:
        mean_loss = model.forward_backward(*batch)
        optimizer.step()
        optimizer.zero_grad()
        return mean_loss

    return System("HetFSDP", step)


def _needed_bytes(*, is_resident: bool) -> int:
    """Every gather and reduction of two ranks moves what it is of across the cable once."""
    model = make_adapted()
    units = [model.embedding, *model.blocks, model.head]
    nbytes = 0
    for op in ops_of(straight_schedule(len(units), PLAN.form)):
        if not isinstance(op.kind, LaunchKind):
            continue
        for param in units[op.unit].parameters():
            is_sent = param.requires_grad or (op.kind is GATHER and not is_resident)
            nbytes += param.numel() * param.itemsize * is_sent
    return nbytes


def _sent_bytes() -> int:
    """What both hosts have sent over the cable so far.  Collective."""
    dist.barrier()
    # The columns of a device (proc(5)): eight of what it has received, then bytes sent.
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    [counts] = [line for line in lines if line.split(":")[0].strip() == os.environ[DEVICE]]
    sent = torch.tensor(int(counts.partition(":")[2].split()[8]))
    dist.all_reduce(sent)
    return int(sent)


def over_cable() -> tuple[list[Arm], list[TimedStep]]:
    """Both ranks, each on its side."""
    with emulated_link(1, MBIT_PER_S) as link:
        store = TCPStore(link.address, 0, is_master=True, wait_for_workers=False)
        reach = partial(_reach, link, store.port)
        return start_ranks(FORKED, reach, train, PLAN.world_size)[0]


def _reach(link: EmulatedLink, port: int, rank: int) -> None:
    """Go to the rank's side of the cable and open the group; hosts share no memory."""
    link.enter(rank)
    os.environ.update({"GLOO_SOCKET_IFNAME": link.device, SWITCH: "gloo", DEVICE: link.device})
    store = TCPStore(link.address, port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PLAN.world_size)


def main() -> None:
    """Predict, run, and keep both."""
    options = parser_of(__doc__, quick="the run over the cable, and keeps nothing").parse_args()
    page = Page(HERE, is_kept=not options.quick)
    arms, steps = over_cable()
    samples = [
        Sample(plan=s.system, round=s.round, step=s.step, seconds=s.slowest_rank_s)
        for s in steps
    ]
    ratio = report_run(arms, samples, page)
    bars = [Bar(claim="a step in which all is gathered, as long as one", measured=ratio)]
    bars += [
        Bar(claim=f"{each.name}: bytes over the cable, of rows and gradients (with frames)",
            measured=each.sent_bytes / each.needed_bytes)
        for each in arms
    ]  # fmt: skip
    predicted, counted = ([], []) if options.quick else (predict(), kept())
    page.table(
        "KiB that a block of llama_7b keeps for backward, for each token, besides its input",
        ("trained", "by hand", "saved by torch on a CPU", "described"),
        [
            (k.trained, *(f"{n / 1024:.2f}" for n in (k.by_hand, k.by_torch, k.described)))
            for k in counted
        ],
    )
    if predicted:
        page.table(
            f"predicted: LoRA of rank {LORA.rank} on llama_7b, {CLUSTER}, batch {BATCH}",
            ("frozen weights may stay", "inputs may be on hosts", "units of stages", "step (s)",
             "of the speeds", "GiB kept on each", "rounds", "a unit is gathered", "recompute",
             "fullest, GiB"),
            [
                ("yes" if p.resident_units else "no", "yes" if p.inputs_on_host else "no",
                 p.stages, f"{p.step_s:.1f}", f"{p.share:.2f}", f"{p.resident_gib:.1f}",
                 str(p.num_rounds), p.gathers, p.recomputed, f"{p.fullest_gib:.1f}")
                for p in predicted
            ],
        )  # fmt: skip
        best, flat = (
            max(p.share for p in predicted if (p.stages == "-") in which)
            for which in ((True, False), (True,))
        )
        bars += [
            Bar(claim="predicted share of the sum of speeds", measured=best, at_least=0.85),
            Bar(claim="the same without stages", measured=flat),
        ]
    page.bars(bars)
    page.keep({"results.csv": samples, "predicted.csv": predicted, "activations.csv": counted})


def report_run(arms: Sequence[Arm], samples: Sequence[Sample], page: Page) -> float:
    """A row for each plan; how much longer a step takes that gathers everything."""
    by_round = {name: _medians(samples, name) for name in (FREE, STAYING)}
    ratios = Spread.of([by_round[FREE][i] / s for i, s in by_round[STAYING].items()])
    page.table(
        f"measured: two ranks over {MBIT_PER_S:g} Mbit/s (median, 10th and 90th percentile)",
        ("frozen weights", "step (s)", "times as fast", "MB over the cable", "needed, MB"),
        [
            (
                arm.name,
                Spread.of(list(by_round[arm.name].values())).cell(3),
                ratios.cell(2) if arm.name == STAYING else "1",
                f"{arm.sent_bytes / 1e6:.2f}",
                f"{arm.needed_bytes / 1e6:.2f}",
            )
            for arm in arms
        ],
    )
    return ratios.median


def _medians(samples: Sequence[Sample], name: str) -> dict[int, float]:
    """Seconds by round."""
    found: dict[int, list[float]] = {}
    for each in samples:
        if each.plan == name:
            found.setdefault(each.round, []).append(each.seconds)
    return {turn: median(seconds) for turn, seconds in found.items()}


if __name__ == "__main__":
    main()
