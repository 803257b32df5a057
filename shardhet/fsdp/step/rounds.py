"""The rounds of a step: what a rank computes in each, and which one comes next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torch import Tensor

from shardhet.fsdp.microbatch.signature import ModelCall
from shardhet.fsdp.probing.known_calls import UNKNOWN
from shardhet.records.plan import Plan
from shardhet.records.schedule import StepForm


class Moment(NamedTuple):
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
    moment: Moment
    microbatch_sizes: tuple[int, ...]
    first_sample: int  # index in the global batch
    num_together: int  # samples of all ranks of the stage
    computing: tuple[int, ...]  # positions of those that compute something
    member: int  # of those that compute these samples together
    index: int = UNKNOWN  # of the findings for its call
    divisor: float | None = None  # of its loss, if that is known

    @classmethod
    def of(
        cls, plan: Plan, position: int, call: ModelCall, sizes: Sequence[int], moment: Moment
    ) -> Self:
        """That of the rank at ``position``, of a round with ``sizes`` samples by position."""
        own, members = plan.group_of(position), plan.context_group(position)
        dealt = {i: sizes[i] * plan.leads(i) for i in own}
        before = sum(size for i, size in dealt.items() if i < members[0])
        return cls(
            call,
            tuple(sizes),
            moment,
            microbatch_sizes=plan.ranks[position].split(sizes[position]),
            first_sample=moment.num_samples_before + before,
            num_together=sum(dealt.values()),
            computing=tuple(i for i in own if sizes[i]),
            member=members.index(position),
        )

    @property
    def num_samples(self) -> int:
        """The number of samples of this rank."""
        return sum(self.microbatch_sizes)

    @property
    def seeded_as(self) -> int:
        """The first sample, as seeds have it: members draw for other tokens."""
        return self.first_sample + self.member * MEMBER


class Rounds:
    """The place of the next forward, or of the one in progress, among rounds and steps."""

    form: StepForm
    # Positions that are gathered for in every round with a backward; None: those that have
    # samples.  In several rounds they stay the same: a unit that is kept for the next round,
    # and gradients kept in one, are on all of them.
    receivers: tuple[int, ...] | None
    grad_norm: Tensor | None = None  # of the last step's gradients, before they are clipped
    is_cut: bool  # whether a batch of the plan is cut at all: between ranks, or rounds

    def __init__(self, plan: Plan) -> None:
        self.moment = Moment(0)
        self.follow(plan)

    def follow(self, plan: Plan, batches_per_step: int = 1) -> None:
        """Let a step have the rounds of so many batches of ``plan`` from the next one on."""
        self.batches_per_step = batches_per_step
        self.form = replace(plan.form, num_rounds=plan.num_rounds * batches_per_step)
        computing = tuple(i for i, rank in enumerate(plan.ranks) if rank.rank_batch_size)
        self.receivers = computing if self.number > 1 else None
        self.is_cut = len(computing) > 1 or plan.num_rounds > 1

    @property
    def number(self) -> int:
        """How many rounds a step has."""
        return self.form.num_rounds

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.moment.step

    @property
    def have_begun(self) -> bool:
        """Whether a round of the step is finished, but not the last one."""
        return self.moment.round > 0

    @property
    def is_last(self) -> bool:
        """Whether gradients are set at the end of the round in progress."""
        return self.moment.round == self.number - 1

    def end_round(self, num_samples: int) -> None:
        """Go on to the next round, after one in which all ranks had ``num_samples``."""
        step, done, before = self.moment
        self.moment = Moment(step, done + 1, before + num_samples)

    def end_step(self, step: int) -> None:
        """Let the next forward begin the step after ``step`` finished ones."""
        self.moment, self.grad_norm = Moment(step), None

    def forget(self) -> None:
        """Let the next forward begin the step anew, and drop what its rounds have summed up."""
        self.moment = Moment(self.step)

    def check_goes_on(self, *, has_gradients: bool, awaits_backward: bool) -> None:
        """Raise unless a forward with gradients may begin the next round of the step."""
        if has_gradients and not awaits_backward:
            return
        raise RuntimeError(
            f"model(...): round {self.moment.round + 1} of {self.number} of a step "
            + (
                "was computed, but model.backward did not follow. "
                if awaits_backward
                else "comes next, but gradients are disabled. "
            )
            + "Call model(...) and model.backward once for each round, or drop_rounds() to "
            "begin the step anew; its gradients are dropped now."
        )
