#!/usr/bin/env bash
# torch==2.13.0, transformers==5.24.0. Expected: torch.optim.Muon moves a layer alike however its matrix is stored, as
# orthogonalising does not care about a transpose: GPT-2 of transformers and a GPT-2 of nn.Linear that start alike and
# get alike gradients stay alike. Real: they part in the first step. Muon's own scale is sqrt(max(1, rows / columns)),
# which is outputs / inputs for nn.Linear, but GPT-2 stores Conv1D, inputs x outputs: the layer that widens by four
# (mlp.c_fc) moves half as far as it should and the one that narrows (mlp.c_proj) twice as far, 1.7 times too little
# for c_attn. Nothing is said, and losses fall. With adjust_lr_fn="match_rms_adamw", whose scale is symmetric, both
# are alike. Source: _adjust_lr in torch/optim/_muon.py, Conv1D in transformers/pytorch_utils.py. Who is hurt: whoever
# takes Muon's learning rates from recipes of models made of nn.Linear to GPT-2, or compares the two.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1
cat > "$work/check.py" <<'PY'
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D


def moved(scale):
    """How far each matrix of the first block moves as Conv1D, over how far it does as nn.Linear."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=96, n_positions=32, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(96, (8, 32))
    model(input_ids=ids, labels=ids).loss.backward()
    ratios = {}
    for name, module in model.transformer.h[0].named_modules():
        if not isinstance(module, Conv1D):
            continue
        steps = []
        for turn in (lambda x: x, lambda x: x.T.contiguous()):  # as stored, and as nn.Linear has it
            param = torch.nn.Parameter(turn(module.weight.detach()).clone())
            param.grad = turn(module.weight.grad).clone()
            before = param.detach().clone()
            torch.optim.Muon([param], lr=0.02, weight_decay=0.0, adjust_lr_fn=scale).step()
            steps.append(turn(before - param.detach()))
        ratios[name] = (steps[0].norm() / steps[1].norm()).item()
        direction = torch.nn.functional.cosine_similarity(steps[0].flatten(), steps[1].flatten(), dim=0)
        assert direction > 0.999, "the two steps have one direction"
    return ratios


original, symmetric = moved("original"), moved("match_rms_adamw")
for name, ratio in original.items():
    print(f"{name}: as Conv1D over as nn.Linear {ratio:.3f}, with match_rms_adamw {symmetric[name]:.3f}")
expected = {"attn.c_attn": 3**-0.5, "attn.c_proj": 1.0, "mlp.c_fc": 0.5, "mlp.c_proj": 2.0}
assert original.keys() == expected.keys()
for name, value in expected.items():
    assert abs(original[name] / value - 1) < 0.01
    assert abs(symmetric[name] - 1) < 0.01
PY
cd "$work"
"$py" check.py
