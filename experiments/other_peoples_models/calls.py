"""How a model is made and called, the same for plain torch and for HetFSDP."""

import inspect
from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.other_peoples_models.records import Family, Loss, Way
from experiments.other_peoples_models.tasks import (
    IGNORED,
    MASKED_WORD,
    NEXT_WORD,
    SPECTRUM,
    TRANSLATION,
    Batch,
)
from shardhet import HetFSDP
from shardhet.fsdp.sharding.unit import UnitModules, find_units

MODEL_SEED = 11
BATCH_SEED = 5
SEED = 3  # of dropout, by HetFSDP(seed=)
NUM_STEPS = 3
COLLIDING_LENGTHS = (4, 3)  # of the second and third step: the batches of the plan's ranks
MAX_NORM = 0.5
LORA_DROPOUT = 0.1


def make_model(family: Family, way: Way) -> nn.Module:
    """In float64 and in training mode; the same at every call."""
    torch.manual_seed(MODEL_SEED)
    np.random.seed(MODEL_SEED)  # noqa: NPY002 -- some models draw from numpy's own generator
    model = family.make(**way.config).double().train()
    if way.has_lora:
        model = _with_lora(model, family)
    if not way.drops:
        _drop_nothing(model)
    return WithLoss(model, family) if way.is_staged else model


class WithLoss(nn.Module):
    """A model that computes its loss, as those in stages do."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        super().__init__()
        self.model = model
        self._family = family

    def forward(self, labels: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and the number of labels."""
        output = self.model(**inputs)
        loss_sum, number = self._family.task.loss(self._family.logits(output), labels)
        return loss_sum, torch.tensor(number)


def _with_lora(model: nn.Module, family: Family) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        target_modules=list(family.lora_targets),
        lora_dropout=LORA_DROPOUT,
        init_lora_weights=False,  # random: beside zeros its first half has no gradient
    )
    return get_peft_model(model, config).double().train()  # type: ignore[arg-type]


def _drop_nothing(model: nn.Module) -> None:
    """Set all that looks like the probability of dropout to zero."""
    for each in model.modules():
        names = {name for name in vars(each) if "drop" in name}
        if "Drop" in type(each).__name__ or type(each).__name__ == "StochasticDepth":
            names.add("p")
        for name in names & vars(each).keys():
            if isinstance(getattr(each, name), float):
                setattr(each, name, 0.0)


def wanted_units(family: Family, way: Way) -> tuple[str, ...] | None:
    """Of HetFSDP's argument; None is its own choice."""
    return family.coarse_units if way.has_coarse_units else None


def units_of(model: nn.Module, family: Family, way: Way) -> list[UnitModules]:
    """What HetFSDP makes units of."""
    wanted = wanted_units(family, way)
    keeps_last = way.loss is Loss.FUNCTION
    return find_units(model, wanted, keeps_last=keeps_last, merges_tied=not way.is_staged)


def make_batches(family: Family, way: Way, num_samples: int) -> list[Batch]:
    """The global batch of every step."""
    generator = torch.Generator().manual_seed(BATCH_SEED)
    lengths = [family.seq_len] * NUM_STEPS
    if way.collides:
        lengths[1:] = COLLIDING_LENGTHS
    return [family.task.make_batch(generator, num_samples, length) for length in lengths]


def part_of(batch: Batch, family: Family, first: int, num_samples: int) -> Batch:
    """So many samples of it, from ``first`` on."""
    return {
        name: tensor.narrow(batch_dim_of(family, name), first, num_samples)
        for name, tensor in batch.items()
    }


def batch_dim_of(family: Family, name: str) -> int:
    """Where an argument has its samples."""
    if isinstance(family.batch_dim, Mapping):
        return family.batch_dim.get(name) or 0
    return family.batch_dim


def call(model: nn.Module, batch: Batch, family: Family, way: Way, **ours: Any) -> Any:
    """The model's output; ``ours`` are arguments that only HetFSDP has."""
    inputs, options = inputs_of(batch, family, way)
    names = _first_parameters(model, inputs) if way.is_positional else ()
    positional = [inputs.pop(name) for name in names]
    return model(*positional, **inputs, **options, **ours)


def inputs_of(batch: Batch, family: Family, way: Way) -> tuple[Batch, dict[str, Any]]:
    """The arguments of a call: tensors of the batch, and others."""
    inputs = {
        name: tensor
        for name, tensor in batch.items()
        if name != "labels" and name not in way.without
    }
    options = dict(way.call_options)
    makes_inputs = family.task in (TRANSLATION, SPECTRUM)  # the decoder's, from labels
    # The model is to compute no loss itself
    if makes_inputs and (way.is_staged or way.loss is Loss.FUNCTION):
        words = batch["labels"].clamp(min=0)
        options["decoder_input_ids"] = F.pad(words[:, :-1], (1, 0))
    elif makes_inputs or way.loss in (Loss.INNER, Loss.ITEMS):
        options["labels"] = batch["labels"]
    if way.name == "contrastive":
        del options["labels"]
    if way.loss is Loss.ITEMS:
        options["num_items_in_batch"] = 1
    if way.is_staged:
        options["labels"] = batch["labels"]
    return inputs, options


def evaluated(
    model: nn.Module, batch: Batch, family: Family, way: Way, first: int, num_samples: int
) -> Tensor:
    """Logits of so many samples without dropout and gradients."""
    model.eval()
    with torch.no_grad():
        output = call(model, part_of(batch, family, first, num_samples), family, way)
    model.train()
    return family.logits(output)


def _first_parameters(model: nn.Module, names: Collection[str]) -> list[str]:
    """The longest beginning of the model's parameters that consists of ``names`` only."""
    module = model.module if isinstance(model, HetFSDP) else model
    parameters = list(inspect.signature(module.forward).parameters)
    return list(takewhile(lambda name: name in names, parameters))


def loss_of(
    output: Any, batch: Batch, family: Family, way: Way, model: nn.Module | None = None
) -> tuple[Tensor, int]:
    """Sum over samples or labels, and their number; of a ``model``'s tokens, if it has a part
    of them.
    """
    if way.is_staged:
        loss_sum, number = output
        return loss_sum, int(number)
    task, labels = family.task, batch["labels"]
    if isinstance(model, HetFSDP) and model.plan.context_groups and labels.dim() > 1:
        if task.loss is NEXT_WORD.loss:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        task, labels = MASKED_WORD, model.own_tokens(labels)
    num_valid = task.num_valid(labels)
    if way.loss is Loss.INNER:
        return output.loss * num_valid, num_valid
    if way.loss is Loss.ITEMS:
        return output.loss, num_valid
    return task.loss(family.logits(output), labels)
