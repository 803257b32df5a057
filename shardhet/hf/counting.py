"""What transformers counts about a model, for the whole model instead of a rank's rows."""

import torch
from torch import nn

from shardhet.fsdp import HetFSDP


def num_multiplied(model: HetFSDP) -> int:
    """The number of elements in parameters that inputs are multiplied with: no embeddings."""
    looked_up = {
        f"{fqn}.weight"
        for fqn, module in model.module.named_modules()
        if isinstance(module, nn.Embedding)
    }
    boxes = model.sharded_state_dict().items()
    return sum(torch.Size(b.global_shape).numel() for fqn, b in boxes if fqn not in looked_up)
