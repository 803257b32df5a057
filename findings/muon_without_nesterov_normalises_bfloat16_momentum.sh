#!/usr/bin/env bash
# torch==2.13.0. Expected: torch.optim.Muon(nesterov=False) keeps the moving average of gradients in momentum_buffer,
# in bfloat16 as in float32, so a gradient ten times as large counts ten times as much later on. Real: for bfloat16
# parameters the buffer has norm 1 after every step: the average of past gradients is replaced by its direction, and
# the next gradient is added to that at its own size. With gradients of norm 1e-3 (clipped ones, say) the buffer stays
# at the direction of the first step; with large ones it forgets at once. Nothing is said; float32 and nesterov=True
# are right. Cause: Newton-Schulz begins with grad.bfloat16(), which copies nothing where the tensor is bfloat16
# already, and divides it in place; without Nesterov that tensor is the buffer itself. Upstream knows it (pull request
# 194664, August 2026). Source: _zeropower_via_newtonschulz and _single_tensor_muon in torch/optim/_muon.py. Who is
# hurt: whoever trains bfloat16 weights with Muon's plain momentum, and whoever loads such a momentum_buffer
# elsewhere.
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


def trained(dtype, nesterov, size):
    """Norms of the momentum and of the average it should be, and the cosine between the two, after 20 steps."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(32, 24).to(dtype))
    optimizer = torch.optim.Muon([param], lr=0.01, momentum=0.95, nesterov=nesterov, weight_decay=0.0)
    average = torch.zeros(32, 24)
    for _ in range(20):
        drawn = torch.randn(32, 24)
        grad = (size * drawn / drawn.norm()).to(dtype)
        param.grad = grad
        average.lerp_(grad.float(), 0.05)
        optimizer.step()
    held = optimizer.state[param]["momentum_buffer"].float()
    cosine = torch.nn.functional.cosine_similarity(held.flatten(), average.flatten(), dim=0)
    return held.norm().item(), average.norm().item(), cosine.item()


for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        for size in (1e-3, 100.0):
            held, right, cosine = trained(dtype, nesterov, size)
            print(f"{dtype}, nesterov={nesterov}, gradients of norm {size:g}: momentum has norm {held:.3g}, "
                  f"its average {right:.3g}, cosine {cosine:.2f}")
            if dtype == torch.bfloat16 and not nesterov:
                assert abs(held - 1) < 0.02 and cosine < 0.9
            else:
                assert abs(held / right - 1) < 0.02 and cosine > 0.99
PY
cd "$work"
"$py" check.py
