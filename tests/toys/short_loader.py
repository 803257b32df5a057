"""Two ranks in a loop of their own; the loader of the second has one batch fewer."""

import torch
import torch.distributed as dist

from shardhet import HetFSDP, Plan

dist.init_process_group("gloo")
torch.manual_seed(0)
model = HetFSDP(torch.nn.Linear(4, 1), Plan.by_hand(microbatch_sizes=[2, 2]))
for _ in range(3 - dist.get_rank()):
    model.backward(model(torch.randn(2, 4)).square().sum(), 2)
