"""What does the caching allocator reserve beside the most that tensors take?

python -m experiments.predicted_memory.reserved.run
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from experiments.common.results import Page, columns, parser_of
from experiments.decoders import decoder_config, make_decoder, random_batches
from experiments.gpu.systems import PRECISION, one_rank_plan
from experiments.predicted_memory.reserved.allocator import Event, reserved_by_stream
from shardhet import HetFSDP, Plan
from shardhet.fsdp.sharding.flat_grad import FlatGradient
from shardhet.models.decoder import DecoderConfig
from tests.emulated import accelerator as emulated
from tests.emulated.memory import Held, Memory
from tests.worlds import World

HERE = Path(__file__).parent
GIB = 2**30
PART = 32  # of width, tokens, words and heads' width: all large tensors are PART^2 smaller
REDUCE = -1  # a pool of the reduce stream's own
NUM_STEPS = 3
GPT = decoder_config(  # of experiments/gpu
    width=2048 // PART,
    num_layers=24,
    seq_len=2048 // PART,
    vocab_size=32768 // PART,
    head_width=128 // PART,
    mlp_ratio=2.5,
)
LLAMA_8B = DecoderConfig(  # 3.1, in samples of 8,192 tokens
    vocab_size=128256 // PART,
    width=4096 // PART,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_width=14336 // PART,
    seq_len=8192 // PART,
)
ALTERNATE = [f"blocks.{i}" for i in range(0, 32, 2)]


def _first_of(number: int) -> Plan:
    """A rank with its part of the state, beside one that stands for all others."""
    return Plan.by_hand(
        microbatch_sizes=[2, 2],
        state_shares=[1 / number, 1 - 1 / number],
        recompute=[ALTERNATE] * 2,
    )


CASES: dict[str, tuple[DecoderConfig, Plan, float | None]] = {  # GiB that a H200 reserved
    "1 x 8, everything kept": (GPT, one_rank_plan(8), 54.90),
    "4 x 2, everything kept": (GPT, one_rank_plan(2, 4), 48.55),
    "1 x 8, half of the blocks recomputed": (
        GPT,
        one_rank_plan(8, recompute=[f"blocks.{i}" for i in range(12)]),
        40.82,
    ),
    "2 x 8, blocks recomputed": (GPT, one_rank_plan(8, 2, recompute=["blocks.*"]), 31.64),
    "Llama 3.1 8B, one of 8": (LLAMA_8B, _first_of(8), None),
    "Llama 3.1 8B, one of 128": (LLAMA_8B, _first_of(128), None),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank, in GiB of its real size."""

    case: str
    tensors: float  # at the fullest moment of the third step
    growing: float  # reserved where segments grow
    fixed: float  # where they do not
    of_reductions: float  # where segments grow, and gradients are in a pool of the reduction
    recorded: float | None  # by experiments/gpu, in segments that do not grow


class Logged(Memory):
    """Notes what is allocated and freed."""

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self.events: list[Event] = []
        self._key_by_id: dict[int, int] = {}

    def allocate(self, nbytes: int, stream: Any) -> Held:
        """Note it."""
        held = super().allocate(nbytes, stream)
        self._note(held)
        return held

    def reallocate(self, held: Held, nbytes: int, stream: Any) -> None:
        """Note it."""
        super().reallocate(held, nbytes, stream)
        self._note(held)

    def free(self, held: Held) -> None:
        """Note it."""
        if not held.is_freed:
            self.events.append(Event(self.key_of(held)))
        super().free(held)

    def key_of(self, held: Held) -> int:
        """The allocation that it has now."""
        return self._key_by_id[id(held)]

    def _note(self, held: Held) -> None:
        self._key_by_id[id(held)] = len(self.events)
        self.events.append(Event(len(self.events), held.nbytes, held.pool))


class FusedNorm(torch.autograd.Function):
    """Keeps and makes what the kernel of GPUs does; a CPU would keep every step of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Without the division by the norm, which needs no memory."""
        ctx.save_for_backward(x, weight, x.new_ones(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Of both."""
        x, weight, _ = ctx.saved_tensors
        of_x = grad * x
        of_weight = of_x.flatten(0, -2).sum(0)
        return torch.mul(grad, weight, out=of_x), of_weight


@contextmanager
def logged() -> Iterator[tuple[Any, set[int]]]:
    """An emulated accelerator whose memory is noted, and which of it are reduced parts."""
    reduce, parts = FlatGradient.reduce, set[int]()

    def noted(grad: FlatGradient) -> None:
        reduce(grad)
        if grad._reduction is not None:
            held = accelerator.held(grad._reduced)
            if held is not None:
                parts.add(accelerator.memory.key_of(held))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(emulated, "Memory", Logged))
        accelerator = emulated.Accelerator()
        stack.enter_context(mock.patch.object(FlatGradient, "reduce", noted))
        norm = mock.patch.object(
            nn.RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight)
        )
        stack.enter_context(norm)
        stack.enter_context(accelerator.installed())
        yield accelerator, parts


def measured(rank: int, case: str) -> Row | None:
    """The first rank's memory in three steps of an empty allocator."""
    config, plan, recorded = CASES[case]
    with logged() as (accelerator, parts):
        memory, device = accelerator.memory, accelerator.device
        model = HetFSDP(make_decoder(config, device), plan, device=device, **PRECISION)
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        mine = plan.ranks[rank].rank_batch_size
        [batch] = random_batches(config, mine, seed=1)
        own = [each.to(device) for each in batch]
        for _ in range(NUM_STEPS):
            accelerator.module().synchronize()
            gc.collect()
            memory.peak_bytes = memory.allocated_bytes
            model.backward(*model(*own))
            optimizer.step()
            for param in model.parameters():
                param.grad = None
        events, peak = list(memory.events), memory.peak_bytes
    if rank:
        return None
    real = PART**2
    sized = [e if e.nbytes is None else e._replace(nbytes=e.nbytes * real) for e in events]
    apart = [e._replace(stream=REDUCE) if e.key in parts else e for e in sized]

    def reserved(of: list[Event], *, grows: bool) -> float:
        return sum(reserved_by_stream(of, grows=grows).values()) / GIB

    return Row(
        case=case,
        tensors=peak * real / GIB,
        growing=reserved(sized, grows=True),
        fixed=reserved(sized, grows=False),
        of_reductions=reserved(apart, grows=True),
        recorded=recorded,
    )


def main() -> None:
    """Every case in a world of its own."""
    is_quick = parser_of(__doc__, "the first case, and keeps nothing").parse_args().quick
    rows = []
    for case in [*CASES][: 1 if is_quick else None]:
        world = World(CASES[case][1].world_size)
        first, *_ = world.run(measured, (case,), timeout_s=400.0, grace_s=10.0)
        world.close()
        if not first.has_returned:
            raise RuntimeError(f"{case}: {first}")
        rows.append(first.value)
    page = Page(HERE, is_kept=not is_quick)
    page.table(
        "Bytes of one rank, in GiB of its real size",
        *columns(
            rows,
            {
                "rank": "{0.case}",
                "tensors": "{0.tensors:.2f}",
                "reserved, segments grow": "{0.growing:.2f}",
                "they do not": "{0.fixed:.2f}",
                "recorded (they do not)": "{0.recorded:.2f}",
                "they grow, gradients in a pool of reductions": "{0.of_reductions:.2f}",
            },
        ),
    )
    page.keep({"results.csv": rows})


if __name__ == "__main__":
    main()
