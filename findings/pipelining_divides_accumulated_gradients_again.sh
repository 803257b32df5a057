#!/usr/bin/env bash
# torch==2.13.0. Expected: two step() of a pipeline schedule without zero_grad between accumulate gradients as two
# backward calls do. Real: each step divides all that is in .grad by the number of microbatches, what earlier steps left
# there included: with 4 microbatches three steps of the same batch sum to 1.3125 of one, not to 3, and the oldest batch
# weighs a sixteenth. A parameter that two stages of a rank share (tied weights, interleaved schedule) is divided for
# each of them, too, within one step: less than half of its gradient is left, while its neighbours' are right. Nothing
# warns. Source: scale_grads in torch/distributed/pipelining/stage.py divides .grad in place. Who is hurt: whoever
# accumulates over schedule steps or ties weights; scale_grads=False with a divided loss is right.
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
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
cat > "$work/check.py" <<'PY'
import copy
import datetime
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss

WORLD, MICROBATCHES = 2, 4


def alone(layers, x, y, tie=False):
    layers = copy.deepcopy(layers)
    if tie:
        layers[2].weight = layers[0].weight
    mse_loss(torch.nn.Sequential(*layers)(x), y).backward()
    return layers


def main(rank):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4).double() for _ in range(4)]
    x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()

    def step(schedule):
        schedule.step(x) if rank == 0 else schedule.step(target=y)

    true = alone(layers, x, y)[2 * rank].weight.grad
    mine = copy.deepcopy(layers)[2 * rank : 2 * rank + 2]
    stage = PipelineStage(torch.nn.Sequential(*mine), rank, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, mse_loss)
    for expected in (1.0, 1.25, 1.3125):
        step(schedule)
        ratio = mine[0].weight.grad / true
        if rank == 0:
            print(f"accumulated gradient over that of one batch: {ratio.mean():.4f}")
        assert ((ratio - expected).abs() < 1e-9).all()

    tied = copy.deepcopy(layers)
    tied[2].weight = tied[0].weight
    stages = [PipelineStage(tied[i], i, 4, torch.device("cpu")) for i in (rank, rank + 2)]
    step(ScheduleInterleaved1F1B(stages, MICROBATCHES, mse_loss))
    true = alone(layers, x, y, tie=True)
    for i in (rank, rank + 2):
        assert (tied[i].bias.grad - true[i].bias.grad).abs().max() < 1e-12
    if rank == 0:
        share = (tied[0].weight.grad.norm() / true[0].weight.grad.norm()).item()
        print(f"tied weight of stages 0 and 2: {share:.3f} of its gradient's norm is left")
        assert share < 0.5
    else:
        assert (tied[1].weight.grad - true[1].weight.grad).abs().max() < 1e-12


def run(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
                            timeout=datetime.timedelta(seconds=60))
    main(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(run, args=(os.path.abspath("store"),), nprocs=WORLD, start_method="fork")
PY
cd "$work"
"$py" check.py
