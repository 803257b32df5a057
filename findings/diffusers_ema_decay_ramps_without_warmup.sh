#!/usr/bin/env bash
# diffusers==0.42.1, torch==2.13.0. Expected: EMAModel(parameters, decay=0.9999) with its use_ema_warmup=False averages
# with a decay of 0.9999. Real: without the warmup of that name there is another one, (1 + step) / (10 + step), until it
# passes the decay: half after 8 steps, and 0.9999 after 90,000 steps only. The first step keeps nothing at all of the
# initial average. A run of 1,000 steps never averages over more than the last hundred or so, whatever decay was asked
# for: 0.999 and 0.9999 give the same weights. Source: get_decay in diffusers/training_utils.py. Who is hurt: whoever
# tunes the decay, compares with torch.optim.swa_utils or lightning's EMA at the same decay, or takes the EMA of a short
# fine-tuning.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check diffusers==0.42.1 torch==2.13.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1
cat > "$work/check.py" <<'PY'
import torch
from diffusers.training_utils import EMAModel


def average(decay, steps, **kwargs):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    ema = EMAModel([weight], decay=decay, **kwargs)
    plain = 0.0
    for step in range(1, steps + 1):
        with torch.no_grad():
            weight.fill_(float(step))
        ema.step([weight])
        plain = decay * plain + (1 - decay) * step
    return ema.shadow_params[0].item(), plain, ema.cur_decay_value


for decay in (0.999, 0.9999):
    got, true, used = average(decay, 1000)
    print(f"decay {decay}, weights 1..1000: EMAModel {got:.1f} (last decay {used:.4f}), plain average {true:.1f}")
    assert used < 0.992
assert abs(average(0.999, 1000)[0] - average(0.9999, 1000)[0]) < 1e-9
assert average(0.9999, 1)[0] == 1.0
got, true, _ = average(0.9999, 1000, min_decay=0.9999)
print(f"with min_decay=0.9999, too: {got:.1f}")
PY
cd "$work"
"$py" check.py
