"""The largest model under limits of 4 : 2 : 1 : 1: of FSDP2, of shardhet, and with hosts.

python -m experiments.largest_model.run            # writes results.csv and the README
python -m experiments.largest_model.run --quick    # half of the memory; keeps nothing
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from experiments.common.live_bytes import LiveBytes
from experiments.common.results import Bar, Page, console, parser_of
from experiments.common.systems import fsdp2
from shardhet import Cluster, DeviceSpec, HetFSDP, Plan, Scenario
from shardhet.comm.calls import SWITCH
from shardhet.models.decoder import Decoder, DecoderConfig
from shardhet.planner import Constraints, PlanError, find_plan
from shardhet.profiler.batch import ExampleBatch
from shardhet.profiler.describe import describe
from shardhet.records.cluster import Node
from shardhet.records.profiles import Profile
from tests.emulated.accelerator import Accelerator
from tests.made_up import collectives, device_profile
from tests.worlds import World

HERE = Path(__file__).parent
MIB = 2**20
LIMITS_MIB = (32, 16, 8, 8)
BATCH = 4  # one sample of each rank in FSDP2
SEQ_LEN, WIDTH = 32, 96
NUM_STEPS = 2  # the first examines the model and makes the optimizer's states
GROWTH = 1.15  # from one trial to the next, until one fits and one does not
TOLERANCE = 0.03  # of layers, between the largest that fits and the smallest that does not
MAX_PLANS = 3  # of one model, each with lower budgets where the last took more than its limit
FSDP2, HET, ON_HOST = "FSDP2, even, recomputed", "shardhet", "shardhet, with host memory"
Peaks = list[int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial, or one rank of it."""

    system: str
    num_layers: int
    parameters: int
    rank: int
    limit_bytes: int
    peak_bytes: int  # of tensors on the device, in the step after the first; 0: no plan
    fits: bool  # all ranks


def shape_of(num_layers: int) -> DecoderConfig:
    """A decoder that grows by layers."""
    return DecoderConfig(
        vocab_size=256,
        width=WIDTH,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=4,
        hidden_width=256,
        seq_len=SEQ_LEN,
    )


def num_parameters(num_layers: int) -> int:
    """Of that decoder."""
    with torch.device("meta"):
        return sum(each.numel() for each in Decoder(shape_of(num_layers)).parameters())


def tokens_of(number: int) -> torch.Tensor:
    """Samples, of which no two are alike: what is computed does not matter here."""
    return torch.arange(number * SEQ_LEN).remainder(256).view(number, SEQ_LEN)


def fsdp2_peak(rank: int, num_layers: int) -> int:
    """Bytes that a rank of FSDP2 holds at most in a step, one sample each."""
    torch.manual_seed(0)
    with LiveBytes().counting() as counter:
        model = Decoder(shape_of(num_layers))
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        system = fsdp2(model, [model.embedding, *model.blocks, model.head], 1e-3)
        tokens = tokens_of(1)
        for step in range(NUM_STEPS):
            if step:
                gc.collect()
                counter.forget_peak()
            system.step(tokens, tokens)
        return counter.peak


def _steps(plan: Plan, rank: int, model: HetFSDP, begin: Callable[[], None]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = tokens_of(plan.num_rounds * plan.ranks[rank].rank_batch_size).to(model.device)
    for step in range(NUM_STEPS):
        if step:
            gc.collect()
            begin()
        model.forward_backward(tokens, tokens)
        optimizer.step()
        optimizer.zero_grad()


def het_peak(rank: int, num_layers: int, plan: Plan) -> int:
    """The same of a rank of shardhet, on a CPU and over gloo, by the same counter."""
    torch.manual_seed(0)
    with mock.patch.dict(os.environ, {SWITCH: "gloo"}), LiveBytes().counting() as counter:
        spec = plan.ranks[rank].device
        model = HetFSDP(Decoder(shape_of(num_layers)), plan, device_spec=spec)
        _steps(plan, rank, model, counter.forget_peak)
        return counter.peak


def emulated_peak(rank: int, num_layers: int, plan: Plan) -> int:
    """The same on an emulated accelerator, which tells its tensors from those of its host."""
    torch.manual_seed(0)
    with Accelerator().installed() as accelerator:
        memory = accelerator.memory

        def begin() -> None:
            accelerator.module().synchronize()
            memory.peak_bytes = memory.allocated_bytes

        spec, device = plan.ranks[rank].device, accelerator.device
        module = Decoder(shape_of(num_layers))
        model = HetFSDP(module, plan, device=device, device_spec=spec)
        _steps(plan, rank, model, begin)
        return int(memory.peak_bytes)


def plan_of(num_layers: int, limits: list[int], *, on_host: bool) -> Plan | None:
    """A plan that is predicted to fit; seconds are made up and alike."""
    example = tokens_of(1)
    with torch.device("meta"):
        model = Decoder(shape_of(num_layers))
    workload = describe(model, ExampleBatch(args=(example, example)))
    devices = tuple(DeviceSpec(kind="x", memory_capacity_bytes=each) for each in limits)
    cluster = Cluster(nodes=(Node(host="a", devices=devices),), usable_memory_fraction=1.0)
    names = [kind.name for kind in workload.kinds]
    profile = Profile(
        devices=(
            device_profile(
                "x", lambda m: (1e-4 * m, 2e-4 * m), sizes=[1, 2, 4], unit_kinds=names
            ),
        ),
        collectives=collectives((1, 2**20), gather_s_per_byte=1e-10, reduce_s_per_byte=1e-10),
    )
    demands = Constraints(may_keep_inputs_on_host=on_host, may_keep_optimizer_on_host=on_host)
    scenario = Scenario(cluster, workload, profile)
    try:
        plan = find_plan(scenario, global_batch_size=BATCH, constraints=demands)
    except PlanError:
        return None
    return plan


class Contest:
    """Trials of all systems in one world of processes."""

    def __init__(self, limits: list[int]) -> None:
        self._limits = limits
        self._world = World(len(limits))
        self.rows: list[Row] = []

    def close(self) -> None:
        """End the processes."""
        self._world.close()

    def _peaks(self, fn: Callable[..., int], *args: Any) -> Peaks:
        outcomes = self._world.run(fn, args, timeout_s=540.0, grace_s=20.0)
        failed = [each for each in outcomes if not each.has_returned]
        if failed:
            raise RuntimeError(f"{fn.__name__}{args}: {failed[0]}")
        return [each.value for each in outcomes]

    def trial(self, system: str, num_layers: int) -> Peaks | None:
        """What ranks hold at most; None if there is no plan.

        Plans do not count what messages over gloo copy.  A rank that takes more than its limit
        is planned for with so much less.
        """
        if system == FSDP2:
            return self._peaks(fsdp2_peak, num_layers)
        budgets, peaks = list(self._limits), None
        for _ in range(MAX_PLANS):
            plan = plan_of(num_layers, budgets, on_host=system == ON_HOST)
            if plan is None:
                break
            measure = emulated_peak if system == ON_HOST else het_peak
            peaks = self._peaks(measure, num_layers, plan)
            over = [max(0, p - limit) for p, limit in zip(peaks, self._limits, strict=True)]
            if not any(over):
                break
            budgets = [budget - more for budget, more in zip(budgets, over, strict=True)]
        return peaks

    def fits(self, system: str, num_layers: int) -> bool:
        """Whether every rank stays within its limit."""
        peaks = self.trial(system, num_layers)
        found = [0] * len(self._limits) if peaks is None else peaks
        fits = peaks is not None and all(map(int.__le__, peaks, self._limits))
        self.rows += [
            Row(
                system=system,
                num_layers=num_layers,
                parameters=num_parameters(num_layers),
                rank=rank,
                limit_bytes=self._limits[rank],
                peak_bytes=peak,
                fits=fits,
            )
            for rank, peak in enumerate(found)
        ]
        said = " ".join(f"{each / MIB:.2f}" for each in found) if peaks else "no plan"
        console.print(f"{system}: {num_layers} layers, {said} MiB: {fits}", soft_wrap=True)
        return fits

    def largest(self, system: str, start: int) -> int:
        """Layers of the largest that fits, by bisection between a fit and a miss."""
        if self.fits(system, start):
            fits, misses = start, int(GROWTH * start) + 1
            while self.fits(system, misses):
                fits, misses = misses, int(GROWTH * misses) + 1
        else:
            fits, misses = int(start / GROWTH), start
            while not self.fits(system, fits):
                fits, misses = int(fits / GROWTH), fits
        while misses - fits > max(1, TOLERANCE * fits):
            middle = (fits + misses) // 2
            if self.fits(system, middle):
                fits = middle
            else:
                misses = middle
        return fits


def main() -> None:
    """Run what the command line says."""
    options = parser_of(__doc__, "half of the memory; keeps nothing").parse_args()
    page = Page(HERE, is_kept=not options.quick)
    limits = [each * MIB // (2 if options.quick else 1) for each in LIMITS_MIB]
    contest = Contest(limits)
    try:
        layers = {
            system: contest.largest(system, start)
            for system, start in ((FSDP2, 14), (HET, 32), (ON_HOST, 130))
        }
        same = layers[FSDP2]
        plan = plan_of(same, limits, on_host=False)
        assert plan is not None
        both = [contest._peaks(fn, same, plan) for fn in (het_peak, emulated_peak)]
    finally:
        contest.close()
    most = {system: num_parameters(each) for system, each in layers.items()}
    rows = []
    for system, each in layers.items():
        best = [row for row in contest.rows if (row.system, row.num_layers) == (system, each)]
        peaks = " : ".join(f"{row.peak_bytes / MIB:.2f}" for row in best)
        rows.append(
            [system, str(each), f"{most[system]:,}", f"{most[system] / most[FSDP2]:.2f}", peaks]
        )
    said = " : ".join(f"{each / MIB:g}" for each in limits)
    page.table(
        f"The largest model under {said} MiB",
        ["system", "layers", "parameters", "of FSDP2's", "peaks, MiB"],
        rows,
    )
    ratios = [emulated / plain for plain, emulated in zip(*both, strict=True)]
    page.tell(
        f"One plan of {same} layers counted on CPUs and on the emulated accelerator: "
        + ", ".join(f"{each:.3f}" for each in ratios)
        + " of the first, by rank."
    )
    page.bars(
        [
            Bar(
                claim="times the parameters of FSDP2's largest",
                measured=most[HET] / most[FSDP2],
                at_least=1.9,
            ),
            Bar(
                claim="times the parameters of FSDP2's largest, with host memory",
                measured=most[ON_HOST] / most[FSDP2],
                at_least=3.0,
            ),
        ]
    )
    page.keep({"results.csv": contest.rows})


if __name__ == "__main__":
    main()
