"""Text (or any other sequence) from a sharded Hugging Face model."""

from typing import Any

from torch import Tensor

from shardhet.fsdp import HetFSDP


def generate(model: HetFSDP, inputs: Tensor | None = None, **kwargs: Any) -> Any:
    """What ``generate`` of the model inside returns for this rank's prompts.  Collective.

    Arguments are those of transformers' ``generate``; ranks may pass different ones.  A rank
    that passes nothing gets None: it lends its rows to the others until they are done.
    Random draws come from torch's own generator, so ``torch.manual_seed`` before it gives on
    every rank what the plain model gives for the same prompts.
    """
    module: Any = model.module
    was_training = module.training
    module.eval()  # before the context: a rank that has no prompt must be in it too
    try:
        with model.unit_by_unit():
            if inputs is None and not kwargs:
                return None
            return module.generate(inputs, **kwargs)
    finally:
        module.train(was_training)
