"""What a block of llama_7b keeps for backward, of adapters and of all weights trained.

Three counts, for each token: by hand, what torch saves on a CPU (a block at its full width),
and what ``describe`` tells the planner.  Parameters and the block's input are not counted.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardhet import Workload
from shardhet.models.pretrained import LanguageModel, Lora, PretrainedFolder
from shardhet.profiler.describe import describe_sketch
from shardhet.profiler.sketch import sketch_model

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
FEW_TOKENS = 256  # bytes grow with tokens, but for masks
HALF, SINGLE = 2, 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Bytes that one block keeps for each token."""

    trained: str
    by_hand: float
    by_torch: float
    described: float  # for samples of 2,048 tokens


def _folder(name: str, **changes: Any) -> PretrainedFolder:
    from transformers import LlamaConfig

    LlamaConfig(**(LLAMA_7B | changes)).save_pretrained(name)
    return PretrainedFolder.open(name)


def described(lora: Lora | None, **changes: Any) -> Workload:
    """llama_7b with weights in bfloat16, frozen if there are adapters, on no device."""
    with tempfile.TemporaryDirectory() as name:
        pretrained = _folder(name, **changes)
        module = pretrained.on_meta(dtype=torch.bfloat16, lora=lora)
    model = LanguageModel(pretrained.objective).trained(
        module,
        vocab_size=pretrained.vocab_size,
        seq_len=SEQ_LEN,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    )
    return describe_sketch(sketch_model(model), model)


def by_hand(*, is_adapted: bool) -> int:
    """Bytes for each token, of a block that computes as transformers' does on a CPU."""
    width, hidden = LLAMA_7B["hidden_size"], LLAMA_7B["intermediate_size"]
    heads = LLAMA_7B["num_attention_heads"]
    assert isinstance(width, int)
    assert isinstance(hidden, int)
    assert isinstance(heads, int)
    norms = 2 * (width * SINGLE + SINGLE)  # their inputs in float32, and one factor
    into_attention = width * HALF  # of q and v, whose adapters are trained
    attention = 4 * width * HALF + heads * SINGLE  # q, k, v, their result, a sum of each head
    gated = 3 * hidden * HALF  # before and after the nonlinearity, and what it is times
    if is_adapted:
        inside = 2 * LORA.rank * HALF  # between the two factors of an adapter
        return norms + into_attention + attention + gated + inside
    # The gradient of a weight needs what it multiplies: norms scale, products multiply.
    scaled, into_mlp, into_down = 2 * width * HALF, width * HALF, hidden * HALF
    return norms + into_attention + attention + gated + scaled + into_mlp + into_down


def by_torch(lora: Lora | None) -> float:
    """Bytes for each token that autograd saves in the second of two blocks."""
    with tempfile.TemporaryDirectory() as name:
        pretrained = _folder(name, num_hidden_layers=2, vocab_size=64)
        model = pretrained.in_memory(dtype=torch.bfloat16, weights=False, seed=0, lora=lora)
    model.to(torch.bfloat16)  # as gathered, adapters too
    block = next(m for fqn, m in model.named_modules() if fqn.endswith("layers.1"))
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    forward: Callable[..., Any] = block.forward

    def counting(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = [hidden, *kwargs.get("position_embeddings", ())]
        own.update(each.untyped_storage().data_ptr() for each in given)
        with saved_tensors_hooks(save, lambda tensor: tensor):
            return forward(hidden, *args, **kwargs)

    assert isinstance(block, nn.Module)
    block.forward = counting
    tokens = torch.zeros(1, FEW_TOKENS, dtype=torch.int64)
    output = model(tokens, use_cache=False)  # keeps what was saved alive until it is counted
    del output
    return sum(saved.values()) / FEW_TOKENS


def kept() -> list[Kept]:
    """Of adapters, and of all weights."""
    found = []
    for trained, lora in (("adapters of q and v", LORA), ("all weights", None)):
        workload = described(lora, num_hidden_layers=2)
        block = workload.kind_of(workload.units[2])  # whose input needs a gradient
        found.append(
            Kept(
                trained=trained,
                by_hand=by_hand(is_adapted=lora is not None),
                by_torch=by_torch(lora),
                described=block.activation_bytes / SEQ_LEN,
            )
        )
    return found
