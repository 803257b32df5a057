"""A small vision model in a loop of one's own.

shardhet rehearse examples/first_program.py --cards '4090 | 3090x2'    on this CPU
torchrun --nproc-per-node=3 examples/first_program.py                  on three GPUs
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardhet

torch.manual_seed(0)  # one model and one dataset on all ranks
labels = torch.randint(3, (320,))
images = torch.randn(320, 3, 32, 32)
images[torch.arange(320), labels] += 0.5  # the colour to be found
dataset = TensorDataset(images, labels)
convolutions = [nn.Conv2d(128, 128, kernel_size=3, padding=1) for _ in range(4)]
model = nn.Sequential(
    nn.Conv2d(3, 128, kernel_size=4, stride=4),
    *(nn.Sequential(nn.ReLU(), each) for each in convolutions),
    nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 3)),
)
loss_fn = shardhet.mean_of_samples(F.cross_entropy)
batch = shardhet.ExampleBatch(args=(images[:2],), loss_inputs=(labels[:2],))

dist.init_process_group()  # under torchrun
plan = shardhet.plan_for(model, batch, global_batch_size=64, loss_fn=loss_fn)
model = shardhet.HetFSDP(model, plan, loss_fn=loss_fn)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
loader = shardhet.loader(dataset, model)
for x, y in loader:  # this rank's samples of each batch
    loss = model.forward_backward(x, loss_inputs=y)  # the mean over all ranks' samples
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}", flush=True)

weights = model.state_dict()  # the plain model's, on rank 0; every rank calls it
if dist.get_rank() == 0:
    print(plan)
    torch.save(weights, "model.pt")
dist.destroy_process_group()
