"""What do frozen weights that stay unsharded spare over slow links?

python -m experiments.resident.run            some minutes; needs an administrator's rights
python -m experiments.resident.run --quick    the run over the cable, short, and keeps nothing
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.common.cable import DEVICE, run_over_cable
from experiments.common.results import Bar, Page, Spread, parser_of
from experiments.common.systems import (
    Rounds,
    TimedStep,
    by_plan,
    check_same_steps,
    take_turns,
    turns_of,
)
from experiments.decoders import decoder_config, make_decoder, random_batches
from shardhet import DeviceSpec, Plan
from shardhet.models.decoder import Block, Decoder
from shardhet.records.ops import ops_of
from shardhet.records.schedule import GATHER, LaunchKind, StepForm, straight_schedule
from shardhet.training.emulation import EmulatedDevice

HERE = Path(__file__).parent

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
        for op in ops_of(straight_schedule(len(units), StepForm.of(PLAN)))
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
    """Run over the cable, and keep what it took."""
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
    page.bars(bars)
    samples = [
        Sample(plan=s.system, round=s.round, step=s.step, seconds=s.slowest_rank_s)
        for s in steps
    ]
    page.keep({"results.csv": samples})


if __name__ == "__main__":
    main()
