"""The forms of a step that plans are searched for: rounds, and how often units are gathered.

With a batch of B samples, M rounds of ceil(B / M) are looked at for every M up to
``FIRST_ROUNDS`` and for every larger M that divides B.  Where M does not divide B, the last
round is smaller.  Of several rounds, each has at most ``MOST_SAMPLES``.  Units are gathered per
use, per round or per step and reduced per round or per step; one round leaves open whether they
are gathered again for backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardhet.records.schedule import StepForm

FIRST_ROUNDS = 8
# Whether units are resharded after forward and after backward.
GATHERS = ((True, True), (False, True), (False, False))
MOST_SAMPLES = 2**13  # in each of several rounds: more take long to list


@dataclass(frozen=True, slots=True)
class BatchRounds:
    """So many rounds of a step; the last has fewer samples if they do not divide the batch."""

    number: int
    global_batch_size: int

    @property
    def round_size(self) -> int:
        """Samples of all devices in every round but perhaps the last."""
        return -(-self.global_batch_size // self.number)

    @property
    def are_equal(self) -> bool:
        """Whether the last has as many samples as the others."""
        return self.number * self.round_size == self.global_batch_size

    @property
    def has_last(self) -> bool:
        """Whether the last has samples; else fewer rounds hold the batch."""
        return (self.number - 1) * self.round_size < self.global_batch_size

    @property
    def last_size(self) -> int | None:
        """Samples of the last round; None if it has as many as the others."""
        if self.are_equal:
            return None
        return self.global_batch_size - (self.number - 1) * self.round_size

    @property
    def in_whole_ones(self) -> float:
        """How many rounds of ``round_size`` have as many samples as the step."""
        return self.global_batch_size / self.round_size

    def forms(self, *, has_links: bool = True) -> Iterator[StepForm]:
        """The forms to look at, those that need the least memory first."""
        for gathers in GATHERS if has_links else GATHERS[:1]:
            for reduce_each_round in (True, False):
                # A single round is reduced at its end; one device has nothing to reduce.
                is_like_another = self.number == 1 and not (reduce_each_round and gathers[1])
                if not is_like_another and (
                    self.number == 1 or has_links or not reduce_each_round
                ):
                    yield StepForm(
                        num_rounds=self.number,
                        reshard_after_forward=gathers[0],
                        reshard_after_backward=gathers[1],
                        reduce_each_round=reduce_each_round,
                    )


def rounds_of(global_batch_size: int, max_rounds: int | None = None) -> list[BatchRounds]:
    """The rounds to look at, few first."""
    most = min(global_batch_size, max_rounds or global_batch_size)
    found = [BatchRounds(1, global_batch_size)]
    for number in _divisors_and_small(global_batch_size, most):
        each = BatchRounds(number, global_batch_size)
        if each.has_last and each.round_size <= MOST_SAMPLES:
            found.append(each)
    return found


def _divisors_and_small(batch: int, most: int) -> list[int]:
    small = set(range(2, min(most, FIRST_ROUNDS) + 1))
    root = int(batch**0.5) + 1
    divisors = {d for i in range(1, root + 1) if not batch % i for d in (i, batch // i)}
    return sorted(small | {each for each in divisors if 1 < each <= most})
