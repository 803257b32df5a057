#!/usr/bin/env bash
# peft==0.21.2, transformers==5.24.0, torch==2.13.0. Expected: `with model.disable_adapter():` computes the base model,
# and unload() gives it back, as with LoRA's other initialisations. Real: PiSSA and OLoRA move a part of each weight
# into the adapter when they start, so that without the adapter a mutilated model is left; unload() hands that out as
# the base model. Nothing warns. Source: pissa_init and olora_init in peft/tuners/lora/layer.py. Who is hurt: preference
# training whose reference is the model with its adapter disabled (TRL's DPO without a ref_model, 1.16.0, does so): the
# log-probabilities of the reference, and with them the loss and the divergence reported, are those of no model that
# anybody chose; whoever compares "with and without adapter".
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


true = logits(base())
for start, keeps in ((True, True), ("orthogonal", True), ("pissa", False), ("olora", False)):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=start)).eval()
        enabled = distance(logits(model), true)
        with model.disable_adapter():
            disabled = distance(logits(model), true)
        unloaded = distance(logits(copy.deepcopy(model).unload()), true)
    print(f"init_lora_weights={start!r}: from the base model, untrained {enabled:.1e}, disabled {disabled:.1e}, unloaded {unloaded:.1e}")
    assert not [w for w in told if issubclass(w.category, UserWarning) and "adapter" in str(w.message)]
    assert enabled < 1e-5
    assert (disabled < 1e-5 and unloaded < 1e-5) if keeps else (disabled > 0.01 and unloaded > 0.01)
PY
cd "$work"
"$py" check.py
