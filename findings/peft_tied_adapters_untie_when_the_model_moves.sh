#!/usr/bin/env bash
# peft==0.21.2, transformers==5.24.0, torch==2.13.0. Expected: LoraConfig(ensure_weight_tying=True), which "will ensure
# that the adapters added to the tied layers are also tied", gives the embedding and the head of a model with tied
# embeddings one adapter, through all of training. Real: they are two parameters in the same memory. Moving the model to
# another device or dtype after get_peft_model, as trainers do, gives each memory of its own: from then on they
# are trained apart and differ after one step. Where nothing moves, an optimizer steps the shared memory twice: one
# step of Adam moves it by twice the learning rate, and weight decay counts twice. Nothing warns. Source: tied_adapter
# in peft/tuners/lora/layer.py, torch.nn.Parameter(emb_B.t()). Who is hurt: whoever trains and merges or saves adapters
# of tied embeddings, which are no longer tied.
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
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

LR = 0.01


def adapted():
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
    config = LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    return get_peft_model(base, config)


def tied(model):
    inner = model.base_model.model
    return inner.model.embed_tokens.lora_embedding_A["default"], inner.lm_head.lora_B["default"].weight.t()


def step(model):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=LR)
    ids = torch.arange(16).reshape(2, 8)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():  # as after some training: no adapter is zero
        if parameter.requires_grad and ("embedding_B" in name or "embedding_A" in name):
            parameter.data.normal_(0, 0.1)
    if not shares(model):
        for name in ("embedding_A", "embedding_B"):
            source = [p for n, p in model.named_parameters() if name in n]
            target = [p for n, p in model.named_parameters() if ("lora_B" if name[-1] == "A" else "lora_A") in n]
            target[0].data.copy_(source[0].data.t())
    before = tied(model)[0].detach().clone()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    embedding, head = tied(model)
    return (embedding - before).abs().max().item(), (embedding - head).abs().max().item()


def shares(model):
    embedding, head = tied(model)
    return embedding.data_ptr() == head.data_ptr()


with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    stays, moves = adapted(), adapted().to(torch.float64)
assert not [w for w in told if "tie" in str(w.message) or "tying" in str(w.message)]
for name, model in (("not moved", stays), ("moved to float64", moves)):
    shared = shares(model)
    moved, apart = step(model)
    print(f"{name}: one memory {shared}; a step of Adam with lr={LR} moves it by {moved:.4f}; "
          f"embedding and head differ by {apart:.4f}")
    assert shared == (model is stays)
    assert (moved > 1.9 * LR and apart == 0) if model is stays else (moved < 1.1 * LR and apart > 0.5 * LR)
PY
cd "$work"
"$py" check.py
