"""The data loaders of a HetTrainer: what transformers would load, dealt out by plan."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from transformers.trainer_utils import seed_worker

from shardhet.comm import devices
from shardhet.hf.evaluation import mixes
from shardhet.hf.losses import LOW_PRECISION_TOLERANCE, TOLERANCE
from shardhet.hf.rank_loss import untrained
from shardhet.hf.view import TrainerView
from shardhet.records.layout import Span
from shardhet.training.dealing.batches import (
    LocalBatchCollator,
    OneRowEach,
    PlanBatchSampler,
    PlanLoader,
    Share,
    num_rows,
    rows_of,
)
from shardhet.training.dealing.order import EpochOrder
from shardhet.training.resuming import random_states, restore_random_states

NUM_LOOKED_AT = 8  # samples whose widths are compared
logger = logging.getLogger(__name__)


def training_loader(trainer: TrainerView) -> PlanLoader:
    """This rank's samples of every global batch of an epoch.  Collective."""
    dataset = trainer.train_dataset
    if dataset is None:
        raise ValueError("Trainer: training requires a train_dataset.")
    sampler = trainer._get_train_sampler(dataset) if hasattr(dataset, "__len__") else None
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
    trainer.follow_args()
    args = trainer.args
    trainer.args = copy.copy(args)
    trainer.args.per_device_eval_batch_size *= args.world_size
    try:
        return trainer._get_eval_sampler(dataset)
    finally:
        trainer.args = args


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
    sampler: Any,
    description: str,
    *,
    is_training: bool = False,
) -> PlanLoader:
    """This rank's samples of ``dataset``, in the order of ``sampler``; None: in its own."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"HetTrainer: the dataset for {description.lower()} cannot be dealt out, because "
            "it gives its samples in one order only. Use one with __len__ and __getitem__."
        )
    args = trainer.args
    sampler = _as_prepared(trainer, sampler, dataset)
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description)
    if hasattr(dataset, "column_names"):  # from the datasets library
        dataset = trainer._remove_unused_columns(dataset, description=description)
        collate = trainer.data_collator
    plan, position = trainer.plan, trainer.het.position
    if trainer.padding_matters is None:
        states = random_states(trainer.het.device)
        trainer.padding_matters = _padding_matters(
            trainer, dataset, collate, is_training=is_training
        )
        restore_random_states(states, trainer.het.device)
    if is_training:
        batch_size, share = plan.global_batch_size, Share.of_step(plan, position)
    else:
        batch_size = args.per_device_eval_batch_size * args.world_size
        share_of = Share.in_stages if plan.stages else Share.in_proportion
        share = share_of(plan, position, batch_size)
    whole = trainer.collates_whole or bool(trainer.padding_matters)
    order = EpochOrder(
        dataset,
        sampler,
        batch_size,
        drop_last=args.dataloader_drop_last,
        collates_whole_batch=whole,
        ranks=trainer.het,
    )
    seeded = partial(
        seed_worker,
        num_workers=args.dataloader_num_workers,
        rank=0 if whole else args.process_index,
    )
    return PlanLoader(
        dataset,
        PlanBatchSampler(order, share, whole=whole),
        LocalBatchCollator(OneRowEach(collate), share, whole=whole),
        worker_init_fn=seeded if is_training else None,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and not devices.is_on_host(args.device),
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
    )


def _padding_matters(
    trainer: TrainerView,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    *,
    is_training: bool,
) -> bool | None:
    """Whether a sample's loss depends on what it is collated with, as the places of answers do
    among padded tokens do, and weights that a collator computes; None if no samples of unlike
    widths were met.  Collective.

    Each rank would pad to its own longest sample, but one process to that of the whole batch.
    """
    num = len(dataset)
    samples = [dataset[i] for i in range(0, num, max(1, num // NUM_LOOKED_AT))][:NUM_LOOKED_AT]

    def collated(*chosen: Any) -> Any:  # of copies: some collators pad samples in place
        return trainer._prepare_inputs(dict(collate(copy.deepcopy(list(chosen)))))

    widths = [_widths(collated(sample)) for sample in samples]
    if _is_any(trainer, bool(samples) and _mixes(collated, samples, widths)):
        _warn(trainer, "what data_collator makes of a sample depends on others of its batch")
        return True
    if not widths or min(widths) == max(widths):
        return None
    short, wide = (samples[widths.index(each)] for each in (min(widths), max(widths)))
    alone, beside = collated(short, short), collated(short, short, wide)
    names = trainer.label_names
    has_labels = bool(names) and all(alone.get(name) is not None for name in names)
    if (num_rows(alone), num_rows(beside)) != (2, 3) or not (is_training or has_labels):
        return None
    of_rank = Span(0, 2 if trainer.plan.ranks[trainer.het.position].rank_batch_size else 0)
    losses = [untrained(trainer, rows_of(each, of_rank)) for each in (alone, beside)]
    tolerance = TOLERANCE.get(losses[0].dtype, LOW_PRECISION_TOLERANCE)
    if torch.is_autocast_enabled(losses[0].device.type) or trainer.args.bf16:
        tolerance = LOW_PRECISION_TOLERANCE
    first, second = map(float, losses)
    is_other = abs(first - second) > tolerance * max(abs(first), 1e-12)
    matters = _is_any(trainer, is_other)
    if matters:
        _warn(trainer, "losses depend on how far a batch is padded")
    return matters


def _is_any(trainer: TrainerView, found: bool) -> bool:
    return any(row[0] for row in trainer.het.exchange([float(found)]))


def _warn(trainer: TrainerView, reason: str) -> None:
    if trainer.het.rank == 0:
        logger.warning(
            f"HetTrainer: {reason}, so every rank collates whole batches. Pad all samples to "
            "one length, and compute things of each sample alone, to spare it that."
        )


def _mixes(collated: Callable[..., Any], samples: list[Any], widths: list[list[int]]) -> bool:
    """Whether what samples become depends on others of their batch, but for what is drawn.

    Each part ends with the widest samples, so that all are padded alike.
    """
    widest = [samples[each.index(max(each))] for each in zip(*widths, strict=False)]
    middle = len(samples) // 2
    parts = (samples, samples, samples[:middle], samples[middle:])
    whole, again, *halves = (
        rows_of(collated(*part, *widest), Span(0, len(part))) for part in parts
    )
    lasting = [name for name in whole if not mixes(again[name], whole[name])]
    return any(mixes(whole[name], *(half[name] for half in halves)) for name in lasting)


def _widths(batch: Any) -> list[int]:
    """The elements of a sample in each tensor of a collated batch."""
    return [
        each[0].numel() for each in batch.values() if isinstance(each, Tensor) and each.dim()
    ]


def _as_prepared(trainer: TrainerView, sampler: Any, dataset: Any) -> Any:
    """The sampler that a plain Trainer iterates, whose accelerator seeds a random one anew."""
    if sampler is None:
        return SequentialSampler(dataset)
    name = type(sampler).__name__
    if not hasattr(sampler, "__len__"):
        raise ValueError(f"{name}: it has no __len__ but an epoch needs a length. Give it one.")
    if not isinstance(sampler, RandomSampler) or not trainer.accelerator.use_seedable_sampler:
        return sampler
    if type(sampler) is not RandomSampler or sampler.generator is not None:
        raise ValueError(
            f"{name}: it draws in its own way, or from its own generator, but accelerate draws "
            "a random order from data_seed alone. Set data_seed=, or keep the sampler with "
            'accelerator_config={"use_seedable_sampler": False}.'
        )
    return SeedableRandomSampler(
        sampler.data_source,
        sampler.replacement,
        sampler.num_samples,
        data_seed=trainer.accelerator.dataloader_config.data_seed,
    )
