"""The rounds of a step: what a rank computes in each, on which all ranks agree."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardhet.comm.channel import Channel
from shardhet.fsdp.microbatch.joining import spans_of
from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.known_calls import UNKNOWN
from shardhet.fsdp.sharding.flat import FlatTensor
from shardhet.fsdp.sharding.persistence import Persistence, forget_changed
from shardhet.records.layout import Span
from shardhet.records.plan import Plan
from shardhet.records.schedule import StepForm


class RoundKey(NamedTuple):
    """When a forward is: which round of which step."""

    step: int  # number of steps finished before
    round: int = 0  # of this step
    num_samples_before: int = 0  # of all ranks, in its rounds before


MEMBER = 2**40  # more than the samples of any step


@dataclass(slots=True)
class Round:
    """A round as this rank computes it, beside the others of its stage."""

    call: ModelCall  # until it is made: its arguments may be freed then
    sizes: tuple[int, ...]  # samples by position, of all stages
    round_key: RoundKey
    num_samples: int  # of this rank
    spans: Sequence[Span]  # the samples of each microbatch among these
    first_sample: int  # index in the global batch
    num_together: int  # samples of all ranks of the stage
    computing: tuple[int, ...]  # positions of those that compute something
    member: int  # of those that compute these samples together
    index: int = UNKNOWN  # of the findings for its call
    divisor: float | None = None  # of its loss, if that is known
    gathers_anew: bool = False  # what earlier rounds of the step have left unsharded

    @property
    def seeded_as(self) -> int:
        """The first sample, as seeds have it: members draw for other tokens."""
        return self.first_sample + self.member * MEMBER


@dataclass(slots=True)
class StepInProgress:
    """Where this rank is in the round in progress."""

    round: Round | None = None  # from the call of forward to the end of backward
    is_in_forward: bool = False  # of the model
    has_gradients: bool = False  # at the call of forward; the model may disable them inside
    awaits_backward: bool = False
    is_in_autograd: bool = False
    num_visits: Counter[str] = field(default_factory=Counter)  # of this forward, by unit


class Written:
    """What the program writes of parameters between the forwards of a step."""

    def __init__(self, flats: Sequence[FlatTensor], *, is_alone: bool) -> None:
        self._flats, self._is_alone = flats, is_alone
        self._versions: list[tuple[int, int]] = []

    def forget(self) -> None:
        """Count from now on, the end of a forward with gradients."""
        self._versions = [flat.versions for flat in self._flats]

    @property
    def flats(self) -> list[FlatTensor]:
        """Those that were written."""
        pairs = zip(self._flats, self._versions, strict=True)
        return [flat for flat, before in pairs if flat.versions != before]

    def has_rows(self) -> bool:
        """Whether rows were written; raises for what would be lost."""
        for flat, (_, gathered) in zip(self._flats, self._versions, strict=True):
            if flat.versions[1] != gathered and not self._is_alone:
                raise RuntimeError(_WRITTEN_WHOLE.format(flat.slots[0].fqn))
        return bool(self.flats)


class Rounds:
    """The place of the next forward, or of the one in progress, among rounds and steps."""

    form: StepForm
    # Positions that are gathered for in every round with a backward; None: those that have
    # samples.  In several rounds they stay the same: a unit that is kept for the next round,
    # and gradients kept in one, are on all of them.
    receivers: tuple[int, ...] | None
    grad_norm: Tensor | None = None  # of the last step's gradients, before they are clipped
    is_cut: bool  # whether a batch of the plan is cut at all: between ranks, or rounds

    def __init__(self, plan: Plan, position: int) -> None:
        self._position = position
        self.round_key = RoundKey(0)
        self.follow(plan)

    def follow(self, plan: Plan, batches_per_step: int = 1) -> None:
        """Let a step have the rounds of so many batches of ``plan`` from the next one on."""
        self.batches_per_step = batches_per_step
        self.form = replace(StepForm.of(plan), num_rounds=plan.num_rounds * batches_per_step)
        split = plan.ranks[self._position].split
        self._spans_of = cache(lambda num_samples: spans_of(split(num_samples)))
        self._planned = [rank.rank_batch_size for rank in plan.ranks]  # samples, by position
        self.planned = self._planned[self._position]  # of this rank, in each round
        members = plan.context_group(self._position)
        self._member = members.index(self._position)
        self._context_groups = plan.context_groups or ()
        self._here = plan.group_of(self._position)  # positions of the stage
        # Those whose samples are not those of another, and that come before this one's.
        self._leaders = [i for i in self._here if plan.leads(i)]
        self._before = [i for i in self._leaders if i < members[0]]
        computing = tuple(i for i, samples in enumerate(self._planned) if samples)
        self.receivers = computing if self.number > 1 else None
        self.is_cut = len(computing) > 1 or plan.num_rounds > 1

    def of(self, call: ModelCall, sizes: Sequence[int], round_key: RoundKey) -> Round:
        """This rank's part of a round with ``sizes`` samples by position."""
        return Round(
            call,
            tuple(sizes),
            round_key,
            num_samples=sizes[self._position],
            spans=self._spans_of(sizes[self._position]),
            first_sample=round_key.num_samples_before + sum([sizes[i] for i in self._before]),
            num_together=sum([sizes[i] for i in self._leaders]),
            computing=tuple([i for i in self._here if sizes[i]]),
            member=self._member,
        )

    def agree(
        self,
        control: Channel,
        call: ModelCall,
        *,
        index: int,
        of_frozen: Sequence[Persistence],
        is_written: bool = False,
        checksum: float = 0.0,
    ) -> Round:
        """The round of this ``call`` on all ranks, and of the findings to use.  Collective.

        ``index`` is that of this rank's findings; the round's is UNKNOWN unless all computing
        ranks have the same.  What was written of frozen parameters does not stay unsharded any
        longer; ``is_written``: rows were, since the round before.  ``checksum`` is of samples
        that others compute, too.  Raises ``ValueError`` on all ranks if they call the model in
        different ways, or with more samples than the plan gives them.
        """
        with_gradients, round_key = torch.is_grad_enabled(), self.round_key
        finished = round_key.step * self.number + round_key.round
        has_changed = any(each.has_changed() for each in of_frozen)
        mine = 4 * index + 2 * (has_changed or is_written) + with_gradients
        rows = control.enter("model(...)", [call.num_samples, mine, finished, checksum])
        if len({(row[1] % 2, row[2]) for row in rows}) > 1:
            self._refuse_unlike(rows)
        gathers_anew = any(row[1] % 4 > 1 for row in rows)
        if gathers_anew:
            forget_changed(of_frozen, control)
        sizes = [int(row[0]) for row in rows]
        if with_gradients and sizes != self._planned:
            remedy = _remedy_for(self._planned, sizes)
            check_fits_plan(self._planned, sizes, "model(...):", remedy)
        for group in self._context_groups:
            if len({(rows[i][0], rows[i][3]) for i in group}) > 1:
                raise ValueError(_UNLIKE_MEMBERS.format(list(group)))
        found = self.of(call, sizes, round_key)
        found.gathers_anew = gathers_anew
        known = {int(row[1]) // 4 for row in rows if row[0]}
        found.index = known.pop() if len(known) == 1 else UNKNOWN
        return found

    def _refuse_unlike(self, rows: Sequence[Sequence[float]]) -> NoReturn:
        """Raise ``ValueError``: ranks call the model in different ways."""
        by_name: dict[str, list[Any]] = {
            "gradients enabled": [bool(row[1] % 2) for row in rows],
            "the number of finished steps": [row[2] // self.number for row in rows],
            "the number of its finished rounds": [row[2] % self.number for row in rows],
        }
        name, values = next(each for each in by_name.items() if len({*each[1]}) > 1)
        raise ValueError(
            f"model(...): ranks differ in {name}: {values} in plan order. Call it in the same "
            "way on every rank; to evaluate on some of them alone, enter "
            "model.unit_by_unit() on all, and call model.module there."
        )

    @property
    def number(self) -> int:
        """How many rounds a step has."""
        return self.form.num_rounds

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.round_key.step

    @property
    def have_begun(self) -> bool:
        """Whether a round of the step is finished, but not the last one."""
        return self.round_key.round > 0

    @property
    def is_last(self) -> bool:
        """Whether gradients are set at the end of the round in progress."""
        return self.round_key.round == self.number - 1

    def end_round(self, num_samples: int) -> None:
        """Go on to the next round, after one in which all ranks had ``num_samples``."""
        step, done, before = self.round_key
        self.round_key = RoundKey(step, done + 1, before + num_samples)

    def end_step(self, step: int) -> None:
        """Let the next forward begin the step after ``step`` finished ones."""
        self.round_key, self.grad_norm = RoundKey(step), None

    def forget(self) -> None:
        """Let the next forward begin the step anew, and drop what its rounds have summed up."""
        self.round_key = RoundKey(self.step)

    def check_begins_batch(self, number: int) -> None:
        """Raise in the middle of the ``number`` rounds of a batch."""
        if self.round_key.round % number:
            raise RuntimeError(
                f"forward_backward: round {self.round_key.round + 1} of {self.number} of a "
                "step comes next, and it computes all rounds of a batch. Call model(...) and "
                "model.backward for the rounds that are left, or drop_rounds() to begin the "
                "step anew."
            )

    def check_goes_on(self, call: str, *, awaits_backward: bool) -> None:
        """Raise if rounds have begun and a backward has to follow before ``call``."""
        if self.have_begun and awaits_backward:
            raise RuntimeError(
                f"{call}: round {self.round_key.round + 1} of {self.number} of a step was "
                "computed, but model.backward did not follow. Call model(...) and "
                "model.backward once for each round, or drop_rounds() to begin the step anew; "
                "its gradients are dropped now."
            )


def beside_others(call: ModelCall, control: Channel) -> tuple[ModelCall, bool]:
    """A ragged call, knowing whether others have rows; whether any rank has.  Collective."""
    has_any = any(row[0] for row in control.enter("model(...)", [call.has_rows]))
    return replace(call, is_behind=has_any and not call.has_rows), has_any


def check_fits_plan(
    planned: Sequence[int], sizes: Sequence[int], where: str, remedy: str
) -> None:
    """Raise ``ValueError`` if a rank has more samples than memory was planned for.

    Both are by position of the plan.
    """
    for i, (size, own) in enumerate(zip(sizes, planned, strict=True)):
        if size > own:
            raise ValueError(
                f"{where} position {i} of the plan got {size} samples but the plan gives it "
                f"{own}, and memory was planned for that. {remedy}"
            )


def _remedy_for(planned: Sequence[int], sizes: Sequence[int]) -> str:
    """What to do about too many samples: all ranks may have so many times theirs."""
    pairs = [pair for pair in zip(sizes, planned, strict=True) if pair[0]]
    factors = {size / own if own else math.inf for size, own in pairs}
    is_joined = len(factors) == 1 and max(factors).is_integer()
    return _JOINED.format(int(*factors)) if is_joined else _USE_LOADER


_WRITTEN_WHOLE = (
    "model(...): {}, or a parameter beside it, was written between rounds of a step, while it "
    "was gathered for them, so that its rows would not change. Write what model.parameters() "
    "gives, or between steps."
)
_UNLIKE_MEMBERS = (
    "model(...): positions {} of the plan are a context group, but got unlike samples. Pass "
    "all of them the same whole samples, those of plan.sample_indices: tokens are cut for you."
)
_USE_LOADER = "Let shardhet.loader(dataset, model) deal the global batch."
_JOINED = (
    "If a sample has {} rows (torch.cat([chosen, rejected])), pass them as arguments of their "
    "own to a module that joins them in its forward, and wrap that one; else let "
    "shardhet.loader(dataset, model) deal the global batch."
)
