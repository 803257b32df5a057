"""The data loaders of a HetTrainer: what transformers would load, dealt out by plan."""

import copy
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler

from shardhet.comm import devices
from shardhet.hf.dealing import PlanLoader, Share
from shardhet.hf.view import TrainerView


def training_loader(trainer: TrainerView) -> PlanLoader:
    """This rank's samples of every global batch of an epoch.  Collective."""
    dataset = trainer.train_dataset
    if dataset is None:
        raise ValueError("Trainer: training requires a train_dataset.")
    sampler = trainer._get_train_sampler(dataset) if hasattr(dataset, "__len__") else None
    sampler = _seedable(sampler, dataset, trainer.args.data_seed)
    if sampler is not None:
        _check_same_order(trainer, dataset, sampler)
    return plan_loader(trainer, dataset, sampler, "Training", is_training=True)


def evaluation_loader(trainer: TrainerView, eval_dataset: Any) -> PlanLoader:
    """This rank's samples of ``eval_dataset``: a dataset, the name of one, or None."""
    named: Any = trainer.eval_dataset
    if eval_dataset is None and named is None:
        raise ValueError("Trainer: evaluation requires an eval_dataset.")
    chosen = named if eval_dataset is None else eval_dataset
    if isinstance(eval_dataset, str):
        chosen = named[eval_dataset]
    return plan_loader(trainer, chosen, evaluation_sampler(trainer, chosen), "Evaluation")


def evaluation_sampler(trainer: TrainerView, dataset: Any) -> Any:
    """The order of transformers in one process, which groups by length here too if asked."""
    args = trainer.args
    trainer.args = copy.copy(args)
    trainer.args.per_device_eval_batch_size *= args.world_size
    try:
        sampler = trainer._get_eval_sampler(dataset)
    finally:
        trainer.args = args
    return SequentialSampler(dataset) if sampler is None else sampler


def check_deals(loader: Any, method: str) -> None:
    """Raise ``ValueError`` if a subclass's ``method`` gives a loader that does not deal."""
    if not isinstance(loader, PlanLoader):
        raise ValueError(
            f"HetTrainer: the loader of {method} does not deal out batches by the plan. Do not "
            "override the method: pass another dataset or data_collator, or override "
            "_get_train_sampler for another order."
        )


def plan_loader(
    trainer: TrainerView,
    dataset: Any,
    sampler: Sampler[int],
    description: str,
    *,
    is_training: bool = False,
) -> PlanLoader:
    """This rank's samples of ``dataset``, in the order of ``sampler``."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"HetTrainer: the dataset for {description.lower()} cannot be dealt out, because "
            "it gives its samples in one order only. Use one with __len__ and __getitem__."
        )
    args = trainer.args
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description)
    if hasattr(dataset, "column_names"):  # from the datasets library
        dataset = trainer._remove_unused_columns(dataset, description=description)
        collate = trainer.data_collator
    plan, position = trainer.plan, trainer.het.position
    if is_training:
        batch_size, share = plan.global_batch_size, Share.of_step(plan, position)
    else:
        batch_size = args.per_device_eval_batch_size * args.world_size
        share_of = Share.in_stages if plan.stages else Share.in_proportion
        share = share_of(plan, position, batch_size)
    return PlanLoader(
        dataset,
        sampler,
        batch_size,
        share,
        collate_fn=collate,
        drop_last=args.dataloader_drop_last,
        collates_whole_batch=trainer.collates_whole,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and not devices.is_on_host(args.device),
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
    )


def _seedable(sampler: Any, dataset: Any, data_seed: int | None) -> Any:
    """The sampler as accelerate makes it for a plain Trainer, so that orders are the same."""
    if not isinstance(sampler, RandomSampler):
        return sampler
    seed = torch.random.initial_seed() if data_seed is None else data_seed
    return SeedableRandomSampler(dataset, data_seed=seed)


def _check_same_order(trainer: TrainerView, dataset: Any, sampler: Any) -> None:
    """Check that ranks draw the same batches, and the same random numbers to collate."""
    mine = [len(dataset), getattr(sampler, "initial_seed", None)]
    if mine[1] is None or trainer.collates_whole:
        mine.append(int(torch.hash_tensor(torch.get_rng_state())))
    found = trainer.het.exchange_objects(mine)
    if any(each != mine for each in found):
        raise ValueError(
            f"train_dataset: ranks have {found} as its length, seed and generator, in plan "
            "order. Give all ranks the same data, and draw random numbers alike on all."
        )
