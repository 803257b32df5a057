"""The same decoder, precision and optimizer under HetFSDP, FSDP2 and plain PyTorch.

Precision.  Parameters are stored in float32 and computed with in bfloat16; gradients come in
bfloat16 and are accumulated, reduced and applied in float32.  HetFSDP spells that
``param_dtype`` and ``reduce_dtype``, FSDP2 ``MixedPrecisionPolicy``.  Plain PyTorch has two
ways.  Autocast is another policy: norms and the residual stream stay in float32, and every
use of a weight casts it.  So plain PyTorch gets what the other two do: a model in bfloat16
beside a float32 copy that the optimizer writes, two multi-tensor copies a step.  That is the
fastest of the ways, and the arithmetic is the same, so losses must agree.

Recomputation.  Blocks alone, by ``torch.utils.checkpoint`` inside the block's forward, so
that FSDP2's hooks stay around it (torchtitan's order); HetFSDP recomputes by plan.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from experiments.common import systems
from experiments.common.systems import PLAIN, System, fused_adamw
from experiments.decoders import Batch, make_decoder, random_batches, units_of
from experiments.gpu.scale import PARAM_DTYPE, REDUCE_DTYPE
from shardhet import HetFSDP, Plan
from shardhet.models.decoder import Decoder, DecoderConfig

LEARNING_RATE = 1e-4
PRECISION = {"param_dtype": PARAM_DTYPE, "reduce_dtype": REDUCE_DTYPE}


@contextmanager
def one_rank_group(device: torch.device) -> Iterator[None]:
    """A default process group of this process alone: NCCL on a GPU, gloo in a rehearsal."""
    is_cuda = device.type == "cuda"
    with TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            init_method=f"file://{Path(folder) / 'store'}",
            rank=0,
            world_size=1,
            device_id=device if is_cuda else None,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def one_rank_plan(
    microbatch_size: int, num_microbatches: int = 1, *, recompute: Sequence[str] = ()
) -> Plan:
    """Everything on one device."""
    return Plan.by_hand(
        microbatch_sizes=[microbatch_size],
        num_microbatches=[num_microbatches],
        state_shares=[1.0],
        recompute=[recompute],
    )


def random_batch(config: DecoderConfig, num_samples: int, device: torch.device) -> Batch:
    """Random tokens and their successors, on the device."""
    [(tokens, targets)] = random_batches(config, num_samples, seed=1)
    return tokens.to(device), targets.to(device)


def ours(params: Iterable[nn.Parameter]) -> Optimizer:
    """Every system's."""
    return fused_adamw(params, LEARNING_RATE)


def het_fsdp(
    config: DecoderConfig,
    plan: Plan,
    device: torch.device,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer] = ours,
) -> System:
    """HetFSDP under ``plan``, which decides on microbatches and recomputation."""
    model = HetFSDP(make_decoder(config, device), plan, **PRECISION)
    return systems.het_fsdp(model, make_optimizer(list(model.parameters())))


def fsdp2(
    config: DecoderConfig,
    device: torch.device,
    *,
    recompute: bool,
    microbatch_size: int | None = None,
) -> System:
    """FSDP2 over the default group; parameters are gathered for each microbatch, twice."""
    model = decoder_of(config, device, recompute=recompute)
    return systems.fsdp2(
        model,
        units_of(model),
        LEARNING_RATE,
        microbatch_size=microbatch_size,
        policy=MixedPrecisionPolicy(**PRECISION),
    )


def plain_pytorch(config: DecoderConfig, device: torch.device, *, recompute: bool) -> System:
    """One process, a bfloat16 model and its float32 master copy."""
    model = decoder_of(config, device, recompute=recompute)
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    for master in masters:
        master.grad = torch.zeros_like(master)
    model.to(PARAM_DTYPE)
    params = list(model.parameters())
    optimizer = ours(masters)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss_sum, num_tokens = model(tokens, targets)
        loss = loss_sum / num_tokens
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
            for param in params:
                param.grad = None
            optimizer.step()
            torch._foreach_copy_(params, masters)
        return loss.detach()

    return System(PLAIN, step)


def decoder_of(config: DecoderConfig, device: torch.device, *, recompute: bool) -> Decoder:
    """Every block may keep its input alone; there is no dropout, so no random state."""
    model = make_decoder(config, device)
    for block in model.blocks if recompute else ():
        block.forward = partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    return model
