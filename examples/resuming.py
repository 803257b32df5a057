"""A loop of one's own that goes on where it was stopped, in the middle of an epoch, too.

shardhet rehearse examples/resuming.py --cards '4090 | 3090x2'    on this CPU, once and again
torchrun --nproc-per-node=3 examples/resuming.py                  on three GPUs
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardhet
from shardhet.checkpoint import Checkpoints

NUM_EPOCHS, SAVE_EVERY = 4, 5

torch.manual_seed(0)  # one model and one dataset on all ranks
inputs = torch.randn(128, 16)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
loss_fn = shardhet.mean_of_samples(F.mse_loss)
batch = shardhet.ExampleBatch(args=(inputs[:2],), loss_inputs=(inputs[:2, :1],))

dist.init_process_group()
plan = shardhet.plan_for(model, batch, global_batch_size=32, loss_fn=loss_fn)
model = shardhet.HetFSDP(model, plan, loss_fn=loss_fn)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = shardhet.loader(dataset, model)
checkpoints = Checkpoints("checkpoints", keep_last=2)
resumed = checkpoints.load_latest(model, optimizer)  # None the first time
step = 0
if resumed is not None:
    step = resumed.step
    loader.load_state_dict(resumed.extra["loader"])

for epoch in range(loader.epoch, NUM_EPOCHS):
    for x, y in loader:
        loss = model.forward_backward(x, loss_inputs=y)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            print(f"epoch {epoch} step {step}: loss {loss:.4f}", flush=True)
        if step % SAVE_EVERY == 0:
            extra = {"loader": loader.state_dict()}
            checkpoints.save(model, optimizer, step=step, extra=extra)
dist.destroy_process_group()
