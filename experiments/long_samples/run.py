"""One long sample on one device, with and without tiles: peak, gradients and time.

python -m experiments.long_samples.run            # writes results.csv and the README
python -m experiments.long_samples.run --quick    # a shorter sample; keeps nothing
"""

import copy
import gc
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.common.live_bytes import LiveBytes
from experiments.common.results import Bar, Page, Spread, parser_of
from shardhet import HetFSDP, Plan
from shardhet.models.decoder import Decoder, DecoderConfig

HERE = Path(__file__).parent
MIB = 2**20
VOCAB_SIZE = 4096
NUM_TOKENS, TOKENS_PER_TILE = 6144, 512
NUM_PAIRS = 4  # of steps, without and with tiles, in turn
WHOLE, TILED = "whole", "in tiles"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step."""

    system: str
    seconds: float  # of the processor
    peak_bytes: int  # of tensors beside those that were there before; 0: not counted


def config_of(num_tokens: int) -> DecoderConfig:
    """Two blocks; a vocabulary that is large beside their width, as language models have."""
    return DecoderConfig(
        vocab_size=VOCAB_SIZE,
        width=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_width=512,
        seq_len=num_tokens,
    )


def plans() -> dict[str, Plan]:
    """Both recompute all units."""
    return {
        name: Plan.by_hand(
            microbatch_sizes=[1],
            recompute=True,
            tiles=name == TILED,
            tokens_per_tile=TOKENS_PER_TILE,
        )
        for name in (WHOLE, TILED)
    }


def step(model: HetFSDP, tokens: torch.Tensor) -> float:
    """Seconds of the processor of a forward and a backward."""
    model.zero_grad()
    begins = time.process_time()
    model.forward_backward(tokens, tokens.roll(-1, 1))
    return time.process_time() - begins


def peak_of(model: HetFSDP, tokens: torch.Tensor) -> int:
    """Bytes of tensors in a step beside what is there before it."""
    model.zero_grad()
    gc.collect()
    with LiveBytes() as counter:
        model.forward_backward(tokens, tokens.roll(-1, 1))
    return counter.peak


def largest_difference(num_tokens: int) -> float:
    """Of gradients in float64, of the largest of each parameter."""
    module = Decoder(config_of(num_tokens)).double()
    tokens = torch.randint(0, VOCAB_SIZE, (1, num_tokens))
    grads = []
    for plan in plans().values():
        model = HetFSDP(copy.deepcopy(module), plan)
        step(model, tokens)
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*grads, strict=True))


def main() -> None:
    """Run what the command line says."""
    options = parser_of(__doc__, "a shorter sample; keeps nothing").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    num_tokens = NUM_TOKENS // (8 if options.quick else 1)
    page = Page(HERE, is_kept=not options.quick)
    module = Decoder(config_of(num_tokens))
    tokens = torch.randint(0, VOCAB_SIZE, (1, num_tokens))
    models = {name: HetFSDP(copy.deepcopy(module), plan) for name, plan in plans().items()}
    for model in models.values():
        step(model, tokens)  # examines the model
    rows = [
        Row(system=name, seconds=step(model, tokens), peak_bytes=0)
        for _ in range(NUM_PAIRS)
        for name, model in models.items()
    ]
    peaks = {name: peak_of(model, tokens) for name, model in models.items()}
    rows += [Row(system=name, seconds=0.0, peak_bytes=each) for name, each in peaks.items()]
    seconds = {
        name: Spread.of([row.seconds for row in rows if row.system == name and row.seconds])
        for name in models
    }
    page.table(
        f"A step of one sample of {num_tokens:,} tokens, tiles of {TOKENS_PER_TILE}",
        ["", "peak, MiB", "seconds of the processor"],
        [[name, f"{peaks[name] / MIB:,.0f}", seconds[name].cell(2)] for name in models],
    )
    page.bars(
        [
            Bar(
                claim="peak with tiles, of that without",
                measured=peaks[TILED] / peaks[WHOLE],
                at_most=0.25,
            ),
            Bar(
                claim="seconds with tiles, of those without",
                measured=seconds[TILED].median / seconds[WHOLE].median,
                at_most=1.06,
            ),
            Bar(
                claim="10^12 times the largest difference of gradients in float64",
                measured=1e12 * largest_difference(num_tokens // 4),
                at_most=1.0,
            ),
        ]
    )
    page.keep({"results.csv": rows})


if __name__ == "__main__":
    main()
