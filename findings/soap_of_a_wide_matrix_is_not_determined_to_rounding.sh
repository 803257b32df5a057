#!/usr/bin/env bash
# pytorch_optimizer==4.1.0, torch==2.13.0. Expected: SOAP's step is a smooth function of the gradients, as those of Shampoo
# and Muon are: noise of 1e-15 in float64 gradients changes parameters by some 1e-14. Real: so it is for a square matrix
# with gradients of full rank (1e-14). For a 16 x 12 matrix, or gradients of low rank, five steps under such noise differ
# by a fifth to a half of all that the parameters have moved. Cause: the first basis is that of eigh of G G^T, whose null
# space (16 - 12 dimensions) has no basis of its own, so rounding chooses one; what later gradients have there is scaled
# by Adam in that basis, and Adam is not invariant to it. Repeats on one machine are bit-equal, which hides it. Source:
# get_orthogonal_matrix in pytorch_optimizer/optimizer/soap.py. Who is hurt: whoever compares a run with SOAP with one of
# other batches a device, other devices or another version, or takes its difference for a fault of the parallelism.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check pytorch_optimizer==4.1.0 torch==2.13.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1
cat > "$work/check.py" <<'PY'
import torch
from pytorch_optimizer import SOAP


def trained(rows, columns, rank, noise=0.0):
    """The parameter after five steps, and how far it has moved at most."""
    torch.manual_seed(0)
    start = torch.randn(rows, columns, dtype=torch.float64)
    param = torch.nn.Parameter(start.clone())
    optimizer = SOAP([param], lr=0.01)
    for step in range(5):
        drawn = torch.Generator().manual_seed(step + 1)
        left = torch.randn(rows, rank, generator=drawn, dtype=torch.float64)
        grad = left @ torch.randn(rank, columns, generator=drawn, dtype=torch.float64)
        grad *= 1 + noise * torch.randn(rows, columns, generator=drawn, dtype=torch.float64)
        param.grad = grad
        optimizer.step()
    return param.detach(), (param.detach() - start).abs().max().item()


for rows, columns, rank in ((12, 12, 12), (16, 12, 12), (12, 12, 4)):
    plain, moved = trained(rows, columns, rank)
    assert torch.equal(plain, trained(rows, columns, rank)[0])
    by = (plain - trained(rows, columns, rank, 1e-15)[0]).abs().max().item()
    print(f"{rows} x {columns}, gradients of rank {rank}: moved by {moved:.3f}, noise of 1e-15 changes it by {by:.1e}")
    is_determined = rows == columns == rank
    assert by < 1e-11 if is_determined else by > 0.1 * moved
PY
cd "$work"
"$py" check.py
