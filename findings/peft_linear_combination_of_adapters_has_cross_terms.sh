#!/usr/bin/env bash
# peft==0.21.2, transformers==5.24.0, torch==2.13.0. Expected: add_weighted_adapter([a, b], [0.5, 0.5],
# combination_type= "linear") is the linear combination of two adapters: its update of a weight is half of a's plus half
# of b's. Real: it combines the factors, sqrt(w) A and sqrt(w) B, whose product has the cross terms B_a A_b and B_b A_a
# beside: for two adapters that were trained apart the error is as large as the wanted update. "cat" (and "svd" of
# enough rank) is exact. Two halves of one adapter with itself even give twice that adapter. Source:
# _generalized_task_arithmetic_weighted_adapter in peft/tuners/lora/model.py. Who is hurt: whoever merges adapters by
# weights, or averages adapters of several seeds or clients.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
cat > "$work/check.py" <<'PY'
import copy
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore", FutureWarning)


def base():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2)).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(12).reshape(2, 6), use_cache=False).logits


def train(model, seed=1):
    """Stands for training: moves what is trainable."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)


def distance(a, b):
    return (a - b).abs().max().item()


config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
model = get_peft_model(base(), config, adapter_name="first").eval()
train(model, 1)
model.add_adapter("second", copy.deepcopy(config))
model.set_adapter("second")
train(model, 2)
layer = model.base_model.model.model.layers[0].self_attn.q_proj
a, b = layer.get_delta_weight("first"), layer.get_delta_weight("second")


def error(kind, adapters, wanted):
    name = f"{kind}, {adapters}"
    model.add_weighted_adapter(adapters, [0.5, 0.5], name.replace(".", ""), combination_type=kind)
    got = layer.get_delta_weight(name.replace(".", ""))
    print(f"{name}: off by {(got - wanted).norm() / wanted.norm():.2e} of the wanted update")
    return ((got - wanted).norm() / wanted.norm()).item()


assert error("cat", ["first", "second"], 0.5 * a + 0.5 * b) < 1e-5
assert error("linear", ["first", "second"], 0.5 * a + 0.5 * b) > 0.5
assert error("linear", ["first", "first"], 2 * a) < 1e-5
PY
cd "$work"
"$py" check.py
