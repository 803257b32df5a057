#!/usr/bin/env bash
# peft==0.21.2, transformers==5.24.0, torch==2.13.0. Expected: with two adapters active, merge_and_unload gives the
# outputs of the unmerged model: so it is with LoRA, DoRA, HRA and others. Real: two OFT adapters are two rotations,
# which do not commute; the forward applies them in one order and merging in the other. The merged model is the model of
# [second, first] where [first, second] was active. One adapter is right. Nothing warns. Source: forward and merge in
# peft/tuners/oft/layer.py. Who is hurt: whoever stacks a task's adapter on a domain's and exports them merged.
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
from peft import HRAConfig, OFTConfig, get_peft_model
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


merged, order = {}, {}
for name, config in {
    "HRA": HRAConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "OFT": OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj", "v_proj"]),
}.items():
    model = get_peft_model(base(), copy.deepcopy(config), adapter_name="first").eval()
    train(model, 1)
    assert distance(logits(copy.deepcopy(model).merge_and_unload()), logits(model)) < 1e-5
    model.add_adapter("second", copy.deepcopy(config))
    model.set_adapter("second")
    train(model, 2)
    model.base_model.set_adapter(["first", "second"])
    model.eval()
    both, merged[name] = logits(model), logits(copy.deepcopy(model).merge_and_unload())
    model.base_model.set_adapter(["second", "first"])
    order[name] = distance(merged[name], logits(model))
    merged[name] = distance(merged[name], both)
    print(f"{name}: merged [first, second] is {merged[name]:.1e} from [first, second], {order[name]:.1e} from [second, first]")
assert merged["HRA"] < 1e-5
assert merged["OFT"] > 1e-3 and order["OFT"] < 1e-5
PY
cd "$work"
"$py" check.py
