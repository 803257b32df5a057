#!/usr/bin/env bash
# torch==2.13.0. Expected: get_optimizer_state_dict (and get_state_dict) only read; a run that saves a checkpoint before
# its first step is bit-equal to one that does not. Real: of an optimizer without state they make one by a step with
# learning rate 0 and gradients of 0, and leave it there. Adam's step counter then stands at 1, so the first real update
# is 0.74 of what it has to be; SGD's momentum starts with weight_decay times the weights in it, and with dampening the
# first gradient counts for less. Nothing warns. Source: _init_optim_state in
# torch/distributed/checkpoint/state_dict.py. Who is hurt: whoever writes a checkpoint of step 0, or builds the state
# dict to load into and finds no checkpoint there.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1
cat > "$work/check.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(read, make):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).double()
    optimizer = make(model.parameters())
    if read:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.detach().clone()
    model(torch.randn(3, 4).double()).square().sum().backward()
    optimizer.step()
    return model.weight.detach() - before


def ratio(name, make):
    r = first_update(True, make) / first_update(False, make)
    print(f"{name}: first update after reading the state, over that without: {r.min():.4f} to {r.max():.4f}")
    return r


adam = ratio("AdamW", lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0))
damped = ratio("SGD, dampening 0.5", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5))
decayed = ratio("SGD, weight decay 0.1", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1))
plain = ratio("SGD", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
assert ((adam - 0.7441).abs() < 1e-3).all()
assert ((damped - 0.5).abs() < 1e-9).all()
assert (decayed - 1).abs().max() > 0.01
assert (plain == 1).all()
PY
cd "$work"
"$py" check.py
