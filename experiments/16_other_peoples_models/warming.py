"""Imports before the first fork, so that no fork has to."""

from collections.abc import Set
from importlib import import_module

import torch
from families import FAMILIES
from other_families import find_torchvision

from experiments.common import console

torch.set_num_threads(1)  # a fork of a process with threads may hang


def import_everything(sources: Set[str]) -> None:
    """The packages of these sources, and each model class on the way."""
    import torch._dynamo
    import torch.distributed.tensor

    import shardhet.fsdp

    assert torch.distributed.tensor
    assert torch._dynamo
    assert shardhet.fsdp
    names = {"timm": "timm", "torchvision": "torchvision"}
    for source in sources & names.keys():
        try:
            find_torchvision()
            import_module(names[source])
        except ImportError as error:
            console.print(f"{source}: {error}", markup=False)
    if "transformers" in sources:
        import_module("transformers")
        import_module("peft")
        for family in FAMILIES.values():
            if family.source == "transformers":
                family.make()
