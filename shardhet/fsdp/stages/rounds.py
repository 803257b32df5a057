"""The rounds of a step, on whose samples all stages agree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardhet.fsdp.microbatch.signature import CHECKSUM_END, ModelCall
from shardhet.fsdp.step.rounds import Moment, Round, Rounds, check_fits_plan
from shardhet.records.plan import Plan

DEAL = "Pass each rank the samples of plan.sample_indices(model.position)."


class Passed(NamedTuple):
    """What a rank is passed in a round."""

    num_samples: int
    lengths: Any  # shapes without samples
    divisor: float | None = None  # of its loss, if that is known

    @classmethod
    def of(cls, call: ModelCall, divisor: float | None) -> "Passed":
        """That of a call."""
        return cls(call.num_samples, call.lengths, divisor)


def rounds_of(
    plan: Plan,
    of_step: Rounds,
    calls: Sequence[ModelCall],
    told: Sequence[Any],
    *,
    caller: str,
) -> list[Round]:
    """The rounds that have samples, given what every rank is passed in each, by position.

    Raises ``ValueError``, on all ranks, unless all stages have the same samples.
    """
    rounds: list[Round] = []
    before = 0
    for number, call in enumerate(calls):
        row: list[Passed] = [each[number] for each in told]
        _check_round(plan, row, f"{caller}: in round {number}")
        sizes = [each.num_samples for each in row]
        if any(sizes):
            moment = Moment(of_step.step, len(rounds), before)
            rounds.append(of_step.of(call, sizes, moment))
            rounds[-1].divisor = row[0].divisor
            before += rounds[-1].num_together
    return rounds


def _check_round(plan: Plan, row: Sequence[Passed], where: str) -> None:
    planned = [rank.rank_batch_size for rank in plan.ranks]
    check_fits_plan(planned, [each.num_samples for each in row], where, DEAL)
    counts = [sum(row[i].num_samples for i in each) for each in plan.groups]
    if len(set(counts)) > 1:
        raise ValueError(
            f"{where} the stages got {counts} samples but must get the same. {DEAL}"
        )
    if len(numbers := {len(each.lengths) for each in row if each.num_samples}) > 1:
        raise ValueError(
            f"{where} ranks pass {sorted(numbers)} arguments but all must pass the same. Each "
            "entry of a list counts as one: pass tensors with a row for each sample instead."
        )
    if len({str(each.lengths) for each in row if each.num_samples}) > 1:
        raise ValueError(
            f"{where} arguments have shapes {[each.lengths for each in row]} without samples, "
            "in plan order, but stages hand over samples of one shape. Pad them alike on all "
            "ranks."
        )


def check_samples(
    plan: Plan, told: Sequence[Any], checksums: Sequence[Sequence[float]], caller: str
) -> None:
    """Raise ``ValueError``, on all ranks, unless all stages were passed the same samples.

    ``told`` are what every rank was passed in each round, by position, and ``checksums`` those
    of ``ModelCall.checksums``, round after round.
    """
    for number in range(len(told[0])):
        sums = [
            (each[number].num_samples, *map(int, row[2 * number : 2 * number + 2]))
            for each, row in zip(told, checksums, strict=True)
        ]
        if len({_checksum([sums[i] for i in each]) for each in plan.groups}) > 1:
            raise ValueError(
                f"{caller}: in round {number} the stages were passed other samples or other "
                f"values, or in another order. Pass all arguments on every rank. {DEAL}"
            )


def _checksum(parts: Sequence[tuple[int, int, int]]) -> int:
    """A number for the samples of a round in their order."""
    total, first = 0, 0
    for num_samples, plain, placed in parts:
        total += first * plain + placed
        first += num_samples
    return total % CHECKSUM_END
