"""Imports before the first fork, so that no fork has to."""

from collections.abc import Collection
from importlib import import_module

import torch

from experiments.common.results import console
from experiments.other_peoples_models.records import Family

torch.set_num_threads(1)  # a fork of a process with threads may hang


def import_for(families: Collection[Family]) -> None:
    """The packages of these families, and each model class on the way."""
    import torch._dynamo
    import torch.distributed.tensor

    import shardhet.fsdp

    assert torch.distributed.tensor
    assert torch._dynamo
    assert shardhet.fsdp
    if any(family.source == "transformers" for family in families):
        import_module("transformers")
        import_module("peft")
    for family in families:
        try:
            family.make()
        except ImportError as error:
            console.print(f"{family.name}: {error}", markup=False)
