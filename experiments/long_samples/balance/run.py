"""One sample on three unlike devices: how much of their speeds is used, and who holds what.

python -m experiments.long_samples.balance.run            # writes results.csv and the README
python -m experiments.long_samples.balance.run --quick    # a shorter sample; keeps nothing
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from experiments.common.launch import run_ranks
from experiments.common.live_bytes import LiveBytes
from experiments.common.results import Bar, Page, Spread, parser_of
from shardhet import DeviceSpec, HetFSDP, Plan
from shardhet.fsdp.tokens import attention, cutting
from shardhet.models.decoder import Decoder, DecoderConfig
from shardhet.planner import Constraints, find_plan
from shardhet.profiler.batch import ExampleBatch, TrainedModel
from shardhet.profiler.measure import MeasuringEffort, measure
from shardhet.records.layout import Span
from shardhet.simulator.stages import price_of
from shardhet.training.emulation import EmulatedDevice, cores_for, stay_on
from shardhet.training.slow_devices import of_any_device

HERE = Path(__file__).parent
MIB, GIB = 2**20, 2**30
SPEEDS = (0.9, 0.45, 0.225)  # of a core
NUM_TOKENS, NUM_STEPS = 4096, 3
ALONE, SHARED, NAIVE = "whole, as planned without groups", "mirrored spans", "naive spans"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step, or one member's peak in a step."""

    system: str
    rank: int  # -1: all, in seconds
    seconds: float = 0.0
    peak_bytes: int = 0
    predicted: float = 0.0  # of whichever it is
    token_share: float = 0.0


def config_of(num_tokens: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=1024,
        width=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_width=704,
        seq_len=num_tokens,
    )


def naive_spans(num_tokens: int, shares: Sequence[float]) -> list[tuple[Span, ...]]:
    """One span each, in order, in proportion to speeds: the last see the most keys."""
    ends = [round(num_tokens * sum(shares[: i + 1])) for i in range(len(shares))]
    return [(Span(a, b),) for a, b in zip([0, *ends], ends, strict=False)]


def around(system: str) -> AbstractContextManager[object]:
    """A context in which calls are cut as the system does."""
    if system != NAIVE:
        return nullcontext()
    return mock.patch.object(cutting, "token_spans", naive_spans)


def one_process(tokens: Tensor) -> list[Row]:
    """Seconds of the processor of a step without any of this, and its peak."""
    torch.manual_seed(0)
    module, rows = Decoder(config_of(tokens.shape[1])), []

    def step() -> None:
        module.zero_grad()
        loss, number = module(tokens, tokens.roll(-1, 1))
        (loss / number).backward()

    step()
    for _ in range(NUM_STEPS):
        began = time.process_time()
        step()
        seconds = time.process_time() - began
        rows.append(Row(system="one process", rank=-1, seconds=seconds))
    with LiveBytes() as counter:
        step()
    return [*rows, Row(system="one process", rank=0, peak_bytes=counter.peak)]


def compete(rank: int, num_tokens: int) -> list[Row]:
    """What every system takes, the same list on every rank."""
    stay_on(cores_for(SPEEDS)[rank])
    device = EmulatedDevice(speed=SPEEDS[rank], memory_bytes=4 * GIB)
    tokens = torch.randint(0, 1024, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    rows = one_process(tokens) if rank == 0 else []
    dist.barrier()
    found = measure(
        TrainedModel(
            module=Decoder(config_of(num_tokens)), batch=ExampleBatch(args=(tokens, tokens))
        ),
        device_spec=DeviceSpec(
            host="here", kind=f"{SPEEDS[rank]:g} of a core", memory_capacity_bytes=4 * GIB
        ),
        emulated=device,
        effort=MeasuringEffort(max_microbatch_size=1, time_limit_s=20.0),
    )
    shared = find_plan(
        found.setting, global_batch_size=1, constraints=Constraints(may_share_samples=True)
    )
    plans = {
        SHARED: shared,
        NAIVE: shared,
        ALONE: find_plan(found.setting, global_batch_size=1),
    }
    prices = {name: price_of(plan, found.setting) for name, plan in plans.items()}
    models = {name: model_of(plan, num_tokens) for name, plan in plans.items()}
    for name, model in models.items():
        with around(name):
            step(model, tokens)  # examines the model
        device.slow_down(model)
    for _ in range(NUM_STEPS):
        for name, model in models.items():
            with around(name):
                seconds = step(model, tokens)
            price = prices[name]
            predicted = price.step_time_s - max(each.optimizer_s for each in price.ranks)
            rows.append(Row(system=name, rank=-1, seconds=seconds, predicted=predicted))
    model = model_of(shared, num_tokens)
    step(model, tokens)
    model.zero_grad()
    with (
        mock.patch.object(attention, "causal_lower_right", uncounted_mask),
        LiveBytes() as counter,
    ):
        model.forward_backward(tokens, tokens.roll(-1, 1))
    cost = prices[SHARED].ranks[rank]
    resting = 12 * cost.stored_numel + cost.memory.reserved_bytes  # parameters and moments
    mine = Row(
        system=SHARED,
        rank=rank,
        peak_bytes=counter.peak,
        predicted=cost.memory.total_bytes - resting,
        token_share=shared.ranks[rank].token_share or 1.0,
    )
    everyone: list[list[Row]] = [[] for _ in SPEEDS]
    dist.all_gather_object(everyone, [mine] if rank else [*rows, mine])
    return [row for each in everyone for row in each]


def uncounted_mask(*sizes: int) -> Any:
    """Torch cannot make this mask while something counts; it has no elements."""
    with _disable_current_modes():
        return causal_lower_right(*sizes)


def model_of(plan: Plan, num_tokens: int) -> HetFSDP:
    torch.manual_seed(0)
    return HetFSDP(Decoder(config_of(num_tokens)), of_any_device(plan))


def step(model: HetFSDP, tokens: Tensor) -> float:
    """Seconds of a forward and a backward of all ranks, which begin together."""
    model.zero_grad()
    dist.barrier()
    begins = time.perf_counter()
    number = model.plan.ranks[dist.get_rank()].rank_batch_size
    mine = tokens[:number]
    model.forward_backward(mine, mine.roll(-1, 1))
    dist.barrier()
    return time.perf_counter() - begins


def main() -> None:
    """Run what the command line says."""
    options = parser_of(__doc__, "a shorter sample; keeps nothing").parse_args()
    num_tokens = NUM_TOKENS // (4 if options.quick else 1)
    page = Page(HERE, is_kept=not options.quick)
    rows = run_ranks(compete, len(SPEEDS), num_tokens)[0]
    of = {
        name: [row for row in rows if row.system == name and row.rank < 0]
        for name in ("one process", SHARED, NAIVE, ALONE)
    }
    seconds = {name: Spread.of([row.seconds for row in each]) for name, each in of.items()}
    ideal_s = seconds["one process"].median / sum(SPEEDS)
    page.table(
        f"A step of {num_tokens:,} tokens; all speeds together allow {ideal_s:.2f} s",
        ["", "seconds", "of the sum of speeds", "predicted"],
        [
            [
                name,
                seconds[name].cell(2),
                f"{ideal_s / seconds[name].median:.2f}",
                f"{of[name][0].predicted:.2f}",
            ]
            for name in (SHARED, NAIVE, ALONE)
        ],
    )
    members = [row for row in rows if row.system == SHARED and row.rank >= 0]
    whole = next(
        row.peak_bytes for row in rows if row.system == "one process" and row.rank == 0
    )
    config = config_of(num_tokens)
    kv_width = config.width // config.num_heads * (config.num_kv_heads or config.num_heads)
    kv_bytes = config.num_layers * 2 * num_tokens * kv_width * 4
    page.table(
        f"Peak of a member beside its rows and moments; one process: {whole / MIB:,.0f} MiB",
        ["member", "tokens", "peak, MiB", "its part of the whole, and K and V", "predicted"],
        [
            [
                f"{SPEEDS[row.rank]:g} of a core",
                f"{row.token_share:.1%}",
                f"{row.peak_bytes / MIB:,.0f}",
                f"{(row.token_share * whole + kv_bytes) / MIB:,.0f}",
                f"{row.predicted / MIB:,.0f}",
            ]
            for row in members
        ],
    )
    over = max(row.peak_bytes / (row.token_share * whole + kv_bytes) for row in members)
    off = max(abs(row.predicted / row.peak_bytes - 1) for row in members)
    step_off = abs(of[SHARED][0].predicted / median(row.seconds for row in of[SHARED]) - 1)
    page.bars(
        [
            Bar(
                claim="of the sum of speeds, mirrored spans",
                measured=ideal_s / seconds[SHARED].median,
                at_least=0.85,
            ),
            Bar(
                claim="peak of a member over its part of the whole and K and V",
                measured=over,
                at_most=1.15,
            ),
            Bar(claim="predicted step, off by", measured=step_off, at_most=0.10),
            Bar(claim="predicted peaks, off by at most", measured=off, at_most=0.05),
        ]
    )
    page.keep({"results.csv": rows})


if __name__ == "__main__":
    main()
