#!/usr/bin/env bash
# peft==0.21.2, transformers==5.24.0, torch==2.13.0. Expected: merge_and_unload gives the outputs of the adapter, as it
# does for other LoRA models, or refuses. Real: with layer_replication the copies of a layer share their base weights
# and have adapters of their own; merging adds the adapters of all copies to the one shared weight, so each copy
# computes with the sum of all. Outputs are as far from the adapter's as those are from the base model's. Nothing warns.
# Source: replicate_layers in peft/tuners/tuners_utils.py and merge in peft/tuners/lora/layer.py. Who is hurt: whoever
# grows a model by repeated layers, trains it and exports it merged.
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


for replicated in (False, True):
    kwargs = {"layer_replication": [(0, 2), (0, 2)]} if replicated else {}
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **kwargs)).eval()
    untrained = logits(model)
    train(model)
    trained = logits(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        merged = logits(copy.deepcopy(model).merge_and_unload())
    off, effect = distance(merged, trained), distance(trained, untrained)
    print(f"layer_replication={replicated}: merged is {off:.1e} from unmerged; the adapter's effect is {effect:.1e}")
    assert not [w for w in told if "replic" in str(w.message) or "merg" in str(w.message)]
    assert off > 0.3 * effect if replicated else off < 1e-5
PY
cd "$work"
"$py" check.py
