"""As with DDP, but each card has a batch size of its own.

shardhet rehearse examples/batch_per_card.py --cards '4090 | 3090x2'    on this CPU
torchrun --nproc-per-node=3 examples/batch_per_card.py                  on three GPUs
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardhet

torch.manual_seed(0)  # one model and one dataset on all ranks
inputs = torch.randn(210, 16)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

dist.init_process_group()
plan = shardhet.Plan.by_hand(microbatch_sizes=[2, 4, 15], reshard_after_forward=False)
model = shardhet.HetFSDP(model, plan, loss_fn=shardhet.mean_of_samples(F.mse_loss))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
loader = shardhet.loader(dataset, model)
for epoch in range(2):
    for x, y in loader:
        loss = model.forward_backward(x, loss_inputs=y)  # the mean over all 21 samples
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
dist.destroy_process_group()
