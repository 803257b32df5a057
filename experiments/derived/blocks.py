"""Blocks that Cephalo's authors have timed, as shardhet describes them.

Shapes and kernels are those of their sources (models/*_simple.py of github.com/benson-guo,
repositories cephalo and zorse): autocast with a residual stream in float32, attention that
keeps its scores but for Llama on all cards except P40, norms that are composed of four kernels
in Llama, and GELU composed of eight in GPT.  What these kernels read and write stands in
``activation_bytes``, which the roofline takes ``ACTIVATION_PASSES`` times.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardhet.pricing.roofline import ACTIVATION_PASSES
from shardhet.records.kinds import DeviceKind, built_in_kinds
from shardhet.records.workload import FLOAT32_BYTES, ITEMSIZE_BY_DTYPE, UnitKind, Workload

KIND_BY_GPU = {  # the tables' names, as the driver spells them
    "a100x40": "NVIDIA A100-SXM4-40GB",
    "a100x80": "NVIDIA A100-SXM4-80GB",
    "a10g": "NVIDIA A10G",
    "a6000": "NVIDIA RTX A6000",
    "h100-nvl": "NVIDIA H100 NVL",
    "l4": "NVIDIA L4",
    "l40s": "NVIDIA L40S",
    "p100": "Tesla P100-PCIE-12GB",
    "p40": "Tesla P40",
    "t4": "Tesla T4",
    "v100-pciex16": "Tesla V100-PCIE-16GB",
    "v100x16": "Tesla V100-SXM2-16GB",
}
LLAMA, BERT, VIT, GPT = "llama", "bert", "vit", "gpt"
VOCAB_SIZE = 49152  # of all text models
IMAGE_TOKENS = 577  # 384 pixels in patches of 16, and a class token
# Reads and writes of the scores in forward, in backward 1.2 times as many; a third of both
# is what one of the three passes of forward and backward moves.
SCORE_PASSES = {LLAMA: 6.0, BERT: 8.25, VIT: 6.0, GPT: 10.0}
SCORE_BACKWARD = 1.2
GELU_PASSES = {BERT: 2, VIT: 2, GPT: 18}  # over the hidden layer


@dataclass(frozen=True, slots=True)
class Shape:
    """The block of one model."""

    family: str
    width: int
    hidden_width: int
    num_heads: int
    num_kv_heads: int

    @property
    def kv_width(self) -> int:
        """The width of all keys of a token."""
        return self.width // self.num_heads * self.num_kv_heads

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """The shapes of its matrices."""
        width, hidden = self.width, self.hidden_width
        qkv = ((width, width), (self.kv_width, width), (self.kv_width, width))
        up = ((hidden, width),) * (2 if self.family == LLAMA else 1)
        return (*qkv, (width, width), *up, (width, hidden))


def _alike(family: str, width: int, hidden_width: int, num_heads: int) -> Shape:
    return Shape(family, width, hidden_width, num_heads, num_heads)


_LLAMA = {
    "tiny": _alike(LLAMA, 2048, 5632, 32),
    "3b": _alike(LLAMA, 3200, 8640, 32),
    "7b": _alike(LLAMA, 4096, 11008, 32),
    "13b": _alike(LLAMA, 5120, 13824, 40),
    "33b": _alike(LLAMA, 6656, 17920, 52),
    "65b": _alike(LLAMA, 8192, 22016, 64),
}
_MISTRAL = Shape(LLAMA, 4096, 14336, 32, 8)
SHAPES = {  # by the tables' names of models, less "deepspeed"
    **{f"llama_{size}": shape for size, shape in _LLAMA.items()},
    **{f"llamav2_{size}": shape for size, shape in _LLAMA.items()},
    "mistral_7b": _MISTRAL,
    "bert_base": _alike(BERT, 768, 3072, 12),
    "bert_large": _alike(BERT, 1024, 4096, 16),
    "bert_xlarge": _alike(BERT, 1536, 6144, 24),
    "vit_g": _alike(VIT, 1664, 8192, 16),
    "vit_e": _alike(VIT, 1792, 15360, 16),
    "vit_e_toy": _alike(VIT, 1792, 15360, 16),
    "gpt_test": _alike(GPT, 512, 2048, 128),
    "gpt_1.3b": _alike(GPT, 2048, 8192, 128),
    "gpt_2.7b": _alike(GPT, 2560, 10240, 80),
    "gpt_6.7b": _alike(GPT, 4096, 16384, 128),
    "gpt_175b": _alike(GPT, 12288, 49152, 96),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One block on one GPU, by microbatch size."""

    model: str
    gpu: str
    seq_len: int
    dtype: str
    seconds_by_size: dict[int, tuple[float, float]]  # forward and backward

    @property
    def group(self) -> tuple[str, str]:
        """What has an efficiency of its own."""
        return KIND_BY_GPU[self.gpu], self.dtype

    @property
    def shape(self) -> Shape:
        """The shape of the model's block."""
        return SHAPES[self.model.removeprefix("deepspeed")]

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample; the tables' length is that of text."""
        return IMAGE_TOKENS if self.shape.family == VIT else self.seq_len

    @property
    def keeps_scores(self) -> bool:
        """Whether attention writes its scores to memory."""
        return self.shape.family != LLAMA or self.gpu == "p40"

    @property
    def unit(self) -> UnitKind:
        """The block as the roofline takes it."""
        return unit_of(
            self.shape,
            num_tokens=self.num_tokens,
            dtype=self.dtype,
            keeps_scores=self.keeps_scores,
        )

    @property
    def own_workload(self) -> Workload:
        """One block of this shape as shardhet's own models have it, with fused kernels."""
        shape = self.shape
        return Workload.transformer(
            num_layers=1,
            width=shape.width,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            hidden_width=shape.hidden_width,
            vocab_size=VOCAB_SIZE,
            seq_len=self.num_tokens,
            is_gated=shape.family == LLAMA,
            has_biases=shape.family != LLAMA,
            fuses_norms=True,
            param_dtype=self.dtype,
        )


def read_blocks(folder: Path) -> list[Timed]:
    """The blocks of layer_latency.csv, each with all sizes that were timed."""
    found: dict[tuple[str, str, int, str], dict[int, tuple[float, float]]] = {}
    with (folder / "layer_latency.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["model"], row["gpu"], int(row["seq_len"]), row["dtype"])
            seconds = (float(row["fwd_ms"]) / 1000, float(row["bwd_ms"]) / 1000)
            found.setdefault(key, {})[int(row["microbatch"])] = seconds
    return [
        Timed(model=model, gpu=gpu, seq_len=seq_len, dtype=dtype, seconds_by_size=seconds)
        for (model, gpu, seq_len, dtype), seconds in sorted(found.items())
    ]


@cache
def unit_of(shape: Shape, *, num_tokens: int, dtype: str, keeps_scores: bool) -> UnitKind:
    """The block as a unit whose activations are what its kernels move in one pass."""
    matrix_flops = 2 * num_tokens * sum(width * depth for width, depth in shape.matrices)
    flops = matrix_flops + 4 * num_tokens**2 * shape.width
    moved = num_tokens * _bytes_per_token(shape, dtype)
    if keeps_scores:
        moved += shape.num_heads * num_tokens**2 * _bytes_per_score(shape.family, dtype)
    return UnitKind(
        name="block",
        param_shapes=shape.matrices,
        forward_flops=flops,
        backward_flops=2 * flops,
        input_bytes=0,
        activation_bytes=int(moved / ACTIVATION_PASSES),
        transient_bytes=0,
    )


def _bytes_per_score(family: str, dtype: str) -> float:
    each = FLOAT32_BYTES if dtype == "float32" else 3  # the softmax is in float32
    return SCORE_PASSES[family] * each * (1 + SCORE_BACKWARD) / 3


def _bytes_per_token(shape: Shape, dtype: str) -> float:
    """What forward reads and writes besides matrix products and scores."""
    width, hidden, kv_width = shape.width, shape.hidden_width, shape.kv_width
    itemsize = ITEMSIZE_BY_DTYPE[dtype]
    cast = (FLOAT32_BYTES + itemsize) * width * (dtype != "float32")  # of a product's input
    residual = 2 * (2 * FLOAT32_BYTES + itemsize) * width  # read, read and written, twice
    heads = 2 * width * itemsize  # the heads' outputs side by side
    if shape.family == LLAMA:
        norms = 2 * 7 * width * FLOAT32_BYTES
        rotation = 10 * (width + kv_width) * itemsize
        attention = 2 * (width + kv_width) * itemsize
        gated = 5 * hidden * itemsize
        return norms + 5 * cast + rotation + attention + heads + residual + gated
    norms = 2 * 2 * width * FLOAT32_BYTES
    split = 6 * width * itemsize
    gelu_itemsize = FLOAT32_BYTES if shape.family == GPT else itemsize
    gelu = GELU_PASSES[shape.family] * hidden * gelu_itemsize
    dropout = 2 * 2.25 * width * itemsize * (shape.family == BERT)
    return norms + 4 * cast + split + heads + residual + gelu + dropout


@cache
def kinds_by_name() -> dict[str, DeviceKind]:
    """The specifications that come with shardhet, of the GPUs in the tables."""
    names: Iterable[str] = KIND_BY_GPU.values()
    return {name: built_in_kinds()[name] for name in names}
