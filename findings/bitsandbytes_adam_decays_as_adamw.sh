#!/usr/bin/env bash
# bitsandbytes==0.50.2, torch==2.13.0. Expected: bitsandbytes.optim.Adam with weight_decay is torch.optim.Adam with it
# (the penalty is added to the gradient and normalised with it), and AdamW is AdamW. Real: both are AdamW: the decay is
# decoupled, weights shrink by lr * weight_decay in each step. Without weight decay Adam equals torch's to rounding;
# with it, it equals torch's AdamW, in 32-bit states, too. Source: the update of the Adam kernels, one for both classes.
# Who is hurt: whoever swaps torch's Adam for it to save memory, or resumes with the other of the two: the strength of
# the regularisation changes by orders of magnitude without a word.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check bitsandbytes==0.50.2 torch==2.13.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1
cat > "$work/check.py" <<'PY'
import bitsandbytes as bnb
import torch


def trained(cls, **kwargs):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8192))
    optimizer = cls([weight], lr=0.01, **kwargs)
    for _ in range(20):
        weight.grad = 0.01 * torch.randn(8192)
        optimizer.step()
    return weight.detach()


def distance(a, b):
    return (a - b).abs().max().item()


plain = distance(trained(bnb.optim.Adam, weight_decay=0.0), trained(torch.optim.Adam, weight_decay=0.0))
ours = trained(bnb.optim.Adam, weight_decay=0.1)
adam = distance(ours, trained(torch.optim.Adam, weight_decay=0.1))
adamw = distance(ours, trained(torch.optim.AdamW, weight_decay=0.1))
print(f"bitsandbytes Adam without decay against torch Adam: {plain:.1e}")
print(f"with weight_decay=0.1: against torch Adam {adam:.1e}, against torch AdamW {adamw:.1e}")
assert plain < 1e-5 and adamw < 1e-5 and adam > 0.05
PY
cd "$work"
"$py" check.py
