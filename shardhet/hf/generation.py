"""Generate text (or any other sequence) with a sharded Hugging Face model."""

from typing import Any

from torch import Tensor, nn

from shardhet.fsdp import HetFSDP
from shardhet.fsdp.module_proxy import around


def generate(model: nn.Module, inputs: Tensor | None = None, **kwargs: Any) -> Any:
    """Run ``generate`` of the wrapped model on this rank's prompts.  Collective.

    ``model`` is a HetFSDP, or what one is around, as callbacks of a HetTrainer get it.

    Arguments are those of transformers' ``generate``; ranks may pass different ones.  A rank
    that passes nothing provides its rows to the others until they are done and returns None.
    Random draws come from torch's own generator: after the same ``torch.manual_seed``, every
    rank returns what the plain model returns for the same prompts.
    """
    model = model if isinstance(model, HetFSDP) else around(model, "generate")
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
