"""How large a model this device can compare three systems on, and everybody's settings.

All three keep their state beside each other, so that they can take turns.  Per parameter:

    HetFSDP, FSDP2   16 bytes   float32 parameter, gradient and two moments
    plain PyTorch    20 bytes   the same, and parameter and gradient in bfloat16

Activations are those of ``shardhet.describe`` for this decoder, rounded up: a block keeps
about 52 bytes per token and channel, and the logits pass through about 16 bytes per token
and word (bfloat16, float32, their logarithms, and two gradients).
"""

from dataclasses import dataclass

import torch

from experiments.decoders import decoder_config, num_params
from shardhet.models.decoder import DecoderConfig

STATE_BYTES_PER_PARAM = 16 + 16 + 20
KEPT_BYTES_PER_CHANNEL = 52  # of a token in a block
LOGITS_BYTES_PER_WORD = 16  # of a token
USABLE = 0.85  # of what is free; the rest is for kernels' own buffers and for fragments
LEAST_MICROBATCH_SIZE = 4
LARGEST_MICROBATCH_SIZE = 8
MLP_RATIO = 2.5
PARAM_DTYPE = torch.bfloat16
REDUCE_DTYPE = torch.float32
RECOMPUTED = ("blocks.*",)  # embedding and head keep what they make, as torchtitan does it


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is trained, and with how much of it the device is filled."""

    name: str
    config: DecoderConfig
    microbatch_size: int  # fits with every activation kept
    recomputed_batch_size: int  # does not, but fits where blocks are recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a part needs to know."""

    device: torch.device
    scale: Scale
    budget_s: float  # about how long to measure; building and warming up come on top
    is_short: bool = False  # few repeats
    is_rehearsal: bool = False  # on a CPU: only to see that the program runs

    @property
    def is_cuda(self) -> bool:
        """Whether there is a device with streams and memory of its own."""
        return self.device.type == "cuda"

    def pick(self, full: int, short: int) -> int:
        """A number of repeats."""
        return short if self.is_short else full


def _gpt(width: int, num_layers: int) -> DecoderConfig:
    return decoder_config(
        width=width,
        num_layers=num_layers,
        seq_len=2048,
        vocab_size=32768,
        head_width=128,
        mlp_ratio=MLP_RATIO,
    )


SIZES = {
    "1.3B": _gpt(2048, 24),
    "750M": _gpt(1536, 24),
    "360M": _gpt(1024, 24),
    "210M": _gpt(1024, 12),
    "130M": _gpt(768, 12),
    "58M": _gpt(512, 8),
}
SMALL_SIZES = ("58M",)  # for a run of a minute
REHEARSAL = Scale(
    name="tiny",
    config=decoder_config(
        width=64, num_layers=2, seq_len=32, head_width=32, mlp_ratio=MLP_RATIO
    ),
    microbatch_size=2,
    recomputed_batch_size=4,
)


def scale_for(free_bytes: int, *, is_short: bool = False) -> Scale:
    """The largest model that three systems can train beside each other in this memory.

    Raises ``ValueError`` where the smallest does not fit.
    """
    names = SMALL_SIZES if is_short else tuple(SIZES)
    for name in names:
        config = SIZES[name]
        least = 1 if name == names[-1] else LEAST_MICROBATCH_SIZE
        fitting = samples_that_fit(config, free_bytes)
        if fitting >= least:
            size = min(LARGEST_MICROBATCH_SIZE, _power_of_two(fitting))
            return Scale(
                name=name,
                config=config,
                microbatch_size=size,
                recomputed_batch_size=2 * _power_of_two(fitting),
            )
    raise ValueError(
        f"the device has {free_bytes / 2**30:.1f} GiB free, too little for three systems on "
        f"the smallest model ({names[-1]}). Free it, or take a larger device."
    )


def samples_that_fit(config: DecoderConfig, free_bytes: int) -> int:
    """The largest batch beside the state of all systems, every activation kept."""
    per_token = KEPT_BYTES_PER_CHANNEL * config.width * config.num_layers
    per_token += LOGITS_BYTES_PER_WORD * config.vocab_size
    left = USABLE * free_bytes - STATE_BYTES_PER_PARAM * num_params(config)
    return max(0, int(left / (per_token * config.seq_len)))


def _power_of_two(number: int) -> int:
    """The largest that is not above ``number``, which is at least 1."""
    return 1 << (number.bit_length() - 1)
