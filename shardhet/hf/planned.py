"""``HetTrainer(plan="auto")``: a plan for the cards of all ranks."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from shardhet.hf.view import TrainerView
from shardhet.profiler.describe import plan_for
from shardhet.records.plan import Plan
from shardhet.training.resuming import random_states, restore_random_states


def planned_for(trainer: TrainerView, options: Mapping[str, Any]) -> Plan:
    """The plan for ``trainer``'s model; rank 0 makes it.  Collective.

    What the dataset and the collator draw for the example is put back.
    Raises ``ValueError`` without a dataset or cards, and ``PlanError`` if nothing fits.
    """
    assert trainer.model is not None
    if trainer.train_dataset is None:
        raise ValueError(
            'HetTrainer: plan="auto" takes samples of train_dataset for an example, but there '
            "is none. Pass it, or a plan."
        )
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, "training")
    states = random_states(trainer.args.device)
    batch = collate(list(islice(iter(trainer.train_dataset), 2)))
    restore_random_states(states, trainer.args.device)
    same = {name: options[name] for name in ("units", "param_dtype") if name in options}
    size = trainer.args.per_device_train_batch_size  # of all ranks: see ``checked``
    return plan_for(trainer.model, dict(batch), global_batch_size=size, **same)
