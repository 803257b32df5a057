"""The loader for a training loop of one's own: this rank's samples of every global batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler, default_collate

from shardhet.comm.channel import Channel, check_same_on_all_ranks, may_take_long
from shardhet.fsdp import HetFSDP
from shardhet.records.plan import Plan
from shardhet.training.dealing.batches import (
    LocalBatchCollator,
    PlanBatchSampler,
    PlanLoader,
    Share,
)
from shardhet.training.dealing.order import EpochOrder, SeededSampler
from shardhet.training.dealing.stream import (
    BatchIndices,
    Read,
    ReadCollator,
    SampleStream,
    is_stream,
)
from shardhet.training.resuming import check_unchanged

END: Any = object()  # a batch may be anything else
LOADING = "loading the next batch"  # of a watch over ranks


class PlanSampler(PlanBatchSampler):
    """Indices of this rank's samples of every global batch, an epoch for each ``iter``.

        sampler = PlanSampler(dataset, model)
        DataLoader(dataset, batch_sampler=sampler, collate_fn=sampler.collator())

    ``loader`` is both at once.  Without the collator a rank without samples gets ``[]``, of
    which torch's own cannot make a batch.  Making it and beginning an epoch are collective.
    """

    def __init__(
        self,
        dataset: Any,
        model_or_plan: HetFSDP | Plan,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        sampler: Sampler[Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        """As ``loader``."""
        if not isinstance(model_or_plan, HetFSDP | Plan):
            raise TypeError(
                f"loader: it was given a {type(model_or_plan).__name__} after the dataset but "
                "needs the HetFSDP, or its Plan. Wrap the model first."
            )
        if not isinstance(dataset, SampleStream) and is_stream(dataset):
            raise ValueError(
                f"PlanSampler: a {type(dataset).__name__} gives its samples in one order, so "
                "there are no indices to deal out. Use shardhet.loader."
            )
        self._source, self.seed = model_or_plan, seed
        plan, is_read = self.plan, isinstance(dataset, SampleStream)
        is_shuffled = sampler is None and not is_read if shuffle is None else shuffle
        name = type(sampler).__name__ if sampler is not None else f"shuffled: {is_shuffled}"
        self._facts = {
            "global_batch_size": plan.global_batch_size if batch_size is None else batch_size,
            "num_samples": None if is_read else len(dataset),
            "order": name,
            "seed": seed,
            "drop_last": drop_last,
            # Streams of the datasets library shuffle otherwise in a worker.
            "num_workers": dataset.num_workers if is_read else None,
        }
        if isinstance(model_or_plan, HetFSDP):
            self.ranks: Any = model_or_plan
            channel, guard = (
                model_or_plan._control,
                model_or_plan.fail_together("making a loader"),
            )
        else:
            is_alone = not dist.is_initialized()
            self.ranks = channel = Channel(None, (0,), 0) if is_alone else Channel.of_world()
            guard = nullcontext()
        orders = {
            "shuffle=True": is_shuffled,
            "a sampler": sampler is not None,
            "a dataset that has an order": is_read,
        }
        given = [name for name, is_given in orders.items() if is_given]
        with guard:
            told = {**self._facts, "orders": given, "plan": plan.digest}
            check_same_on_all_ranks(told, what="arguments of the loader", channel=channel)
            _check(plan, channel, self._facts["global_batch_size"], given)
        if is_read:
            sampler, dataset.batch_size = BatchIndices(dataset), plan.global_batch_size
        elif sampler is None:
            sampler = SeededSampler(len(dataset), seed if is_shuffled else None)
        order = EpochOrder(
            dataset,
            sampler,
            1 if is_read else plan.global_batch_size,
            drop_last=drop_last,
            collates_whole_batch=False,
            ranks=self.ranks,
        )
        super().__init__(order, self.share, whole=is_read)
        self._shows = False
        # Epoch, its batches that were given before, and what its order was drawn with
        self.next: tuple[int, int, dict[str, Any]] = (0, 0, {})
        self._epoch = self._num_before = self.num_given = 0
        self.is_over, self.is_counting = False, True

    @property
    def plan(self) -> Plan:
        """The plan that is followed now."""
        source = self._source
        return source.plan if isinstance(source, HetFSDP) else source

    @property
    def share(self) -> Share:
        """This rank's samples of a full batch, under the plan that is followed now."""
        return Share.of_step(self.plan, self.ranks.position)

    def collator(
        self, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> LocalBatchCollator:
        """``collate_fn`` (None: torch's own), which may get no samples from now on.

        They become what it makes of one, with tensors without rows.
        """
        self._shows = True
        return LocalBatchCollator(collate_fn or default_collate, self.share)

    def __iter__(self) -> Iterator[list[Any]]:
        self._epoch, self._num_before, began_with = self.next
        self.next = self._epoch + 1, 0, {}
        self.num_given, self.is_over, self._share = 0, False, self.share
        begins = self.ranks.exchange_objects((self._epoch, self._num_before))
        if len(set(begins)) > 1:
            raise ValueError(
                f"loader: ranks go on at {begins} (epoch, batches that are done) in plan "
                "order, but must at the same. Load the same state on every rank."
            )
        batches: Iterable[list[Any]] = self.order
        if began_with:  # a sampler's own generators are then as they were
            batches = self.order.draw_again(began_with)
        if not self._num_before:
            self.set_epoch(self._epoch)
            batches = self.order
        own = self._share.shown if self._shows else self._share.of
        for batch in islice(batches, self._num_before, None):
            self.num_given += self.is_counting
            yield batch if self._whole else own(batch)
        self.is_over = self.is_counting

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch is, for any other plan with the same global batch."""
        return {
            "epoch": self._epoch + self.is_over,
            "num_batches": 0 if self.is_over else self._num_before + self.num_given,
            "began_with": self.order.began_with,
            **self._facts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter`` go on where ``state`` was taken.  The same on all ranks."""
        remedies = dict.fromkeys(self._facts, "Make the loader as it was")
        check_unchanged(state, self._facts, remedies, source="loader: the state")
        self.next = state["epoch"], state["num_batches"], state["began_with"]
        self._epoch, self._num_before, self.order.began_with = self.next
        self.num_given, self.is_over = 0, False


class Loader(PlanLoader):
    """See ``loader``."""

    batches: PlanSampler

    def __init__(
        self,
        dataset: Any,
        batches: PlanSampler,
        collate_fn: Callable[[list[Any]], Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        self._seeds, self._dealt = torch.Generator(), batches.collator(collate_fn)
        self._stream = dataset if isinstance(dataset, SampleStream) else None
        given: Any = self._dealt if self._stream is None else ReadCollator(self._dealt)
        super().__init__(dataset, batches, given, **{"generator": self._seeds, **options})
        batches.is_counting = False  # what workers have read ahead is not given yet

    @property
    def epoch(self) -> int:
        """The epoch in progress, counted from 0; between epochs the next one."""
        return int(self.state_dict()["epoch"])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader's is a class
        batches, has_ended = self.batches, False
        while not has_ended:
            plan = batches.plan
            self._begin()
            for batch in self._read():
                batches.num_given += 1
                yield batch
                if batches.plan is not plan:  # what was read ahead was dealt by the other one
                    self.load_state_dict(self.state_dict())
                    self._iterator = None  # of workers that persist
                    break
            else:
                has_ended = batches.is_over = True

    def _begin(self) -> None:
        """Seed the workers differently on every rank and in every epoch."""
        batches, share = self.batches, self.batches.share
        self._dealt.share = share
        if self._stream is not None:
            self._stream.share = share
        told = batches.seed % 2**64, *batches.next[:2], batches.ranks.position
        [seed] = np.random.SeedSequence(told).generate_state(1, np.uint64)
        self._seeds.manual_seed(int(seed))

    def _read(self) -> Iterator[Any]:
        with may_take_long(LOADING):
            batches = super().__iter__()
        while True:
            with may_take_long(LOADING):
                batch = next(batches, END)
            if self._stream is not None:  # whose tickets have no end
                batch = batch.own if self._agreed(batch) else END
            if batch is END:
                return
            yield batch

    def _agreed(self, read: Read) -> int:
        """The samples of a batch of a stream, 0 at its end; raises unless ranks read alike."""
        found: list[Read] = self.batches.ranks.exchange_objects(read._replace(own=None))
        if not all(each.is_same(found[0]) for each in found):
            raise ValueError(
                f"loader: ranks have read other samples of the dataset "
                f"({[each.num_samples for each in found]} of a batch, in plan order), but "
                "each has to read the same and takes its own. Do not split the dataset by "
                "rank, and let it shuffle by a seed."
            )
        return read.num_samples

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch is, for any other plan with the same global batch.

        It goes on after the last batch that the loop was given, whatever workers have read.
        """
        return self.batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter`` go on where ``state`` was taken.  The same on all ranks."""
        self.batches.load_state_dict(state)


def loader(
    dataset: Any,
    model_or_plan: HetFSDP | Plan,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    *,
    sampler: Sampler[Any] | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> Loader:
    """A DataLoader of this rank's samples of every global batch.  Collective.

        loader = shardhet.loader(dataset, model)
        for batch in loader:
            loss = model.forward_backward(**batch)  # *batch if samples are tuples

    Each ``iter`` is the next epoch and collective.  A last batch with fewer samples is dealt
    like any other, so that a step is that of one process.  Ranks without samples get tensors
    without rows.  ``state_dict`` and ``load_state_dict`` go on within an epoch, also under
    another plan with the same global batch.

    Args:
        dataset: equal on all ranks.  If it is iterable, every rank reads all of it, in its own
            order, with one worker at most.
        model_or_plan: before the model is wrapped, ranks take the plan's positions in order.
        batch_size: the global batch; only that of the plan.
        shuffle: whether to draw an order from ``seed`` plus the epoch.  None does so if a map
            dataset has no ``sampler``.
        seed: of orders, and of what workers draw.
        sampler: gives the order of the whole dataset's samples.
        drop_last: leave out a last batch with fewer samples.
        collate_fn: as in DataLoader, given this rank's samples, of which there is one at least.
        options: the DataLoader's.
    """
    if "batch_sampler" in options or not options.get("in_order", True):
        name = "batch_sampler" if "batch_sampler" in options else "in_order=False"
        raise ValueError(
            f"loader: {name} is given, but ranks take their samples of the plan's batches, in "
            "one order. Leave it out; sampler= gives another order."
        )
    if isinstance(dataset, DataLoader):
        raise TypeError(
            f"loader: it was given a {type(dataset).__name__} but deals out samples, not "
            "batches. Give it the dataset of that loader, and its collate_fn."
        )
    if is_stream(dataset):
        num_workers = options.get("num_workers", 0)
        if num_workers > 1:
            raise ValueError(
                f"loader: num_workers={num_workers} but a dataset that gives its "
                "samples in one order is read by one worker, so that each comes once. Set "
                "num_workers=1, or give a dataset with __len__ and __getitem__."
            )
        dataset = SampleStream(dataset, num_workers, seed=seed, drop_last=drop_last)
    batches = PlanSampler(
        dataset,
        model_or_plan,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        sampler=sampler,
        drop_last=drop_last,
    )
    return Loader(dataset, batches, collate_fn, options)


def _check(plan: Plan, channel: Channel, batch_size: Any, orders: Sequence[str]) -> None:
    """Raise ``ValueError`` for what cannot be dealt; the same on all ranks."""
    if plan.world_size != channel.world_size:
        raise ValueError(
            f"loader: the plan is for {plan.world_size} devices but {channel.world_size} ranks "
            "were started. Start as many as it has devices, after init_process_group."
        )
    if batch_size != plan.global_batch_size:
        raise ValueError(
            f"loader: batch_size is {batch_size} but a step of the plan has "
            f"{plan.global_batch_size} samples. Leave it out, or make a plan with "
            f"global_batch_size={batch_size}."
        )
    if len(orders) > 1:
        raise ValueError(
            f"loader: {' and '.join(orders)} are given, but there is one order. Leave out all "
            "but one; a dataset that has an order may shuffle itself, by a seed."
        )
