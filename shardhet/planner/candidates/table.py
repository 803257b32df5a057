"""A problem with what its candidates stand for."""

from dataclasses import dataclass
from functools import cached_property

from shardhet.planner.candidates.splits import LeastSplits, Splits
from shardhet.planner.forms import BatchRounds
from shardhet.planner.problem.problem import Ints, Problem
from shardhet.records.plan import RankPlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one device does: enough to write its part of a plan."""

    microbatch_sizes: tuple[int, ...]
    recomputed_units: tuple[str, ...]
    tiled_units: tuple[str, ...]
    inputs_on_host: tuple[str, ...]
    optimizer_on_host: bool


@dataclass(frozen=True)
class CandidateTable:
    """What the problem's candidates stand for, and which devices make up each group."""

    problem: Problem
    rounds: BatchRounds
    equal_groups: tuple[tuple[tuple[int, ...], ...], ...]  # per group: sets of equal positions
    splits: tuple[Splits | LeastSplits, ...]  # per group
    split_indices: tuple[Ints, ...]  # per group, [C]: index into its splits
    choices: tuple[Ints, ...]  # per group, [C]: index into treatments
    policies: tuple[RankPlan, ...]  # of units, without samples
    is_cut: bool  # candidates were left out because they compute too long

    @cached_property
    def rounded(self) -> Problem:
        """The problem with less room, so that shares still fit after rounding to rows."""
        return self.problem.rounded()

    def candidate(self, group: int, index: int) -> Candidate:
        """What one device does that takes the candidate at ``index`` of a group."""
        each = self.problem.groups[group]
        batch = int(each.batch[index]) // each.num_batches
        split = int(self.split_indices[group][index])
        sizes = self.splits[group].sizes(batch, split)
        treated = self.policies[int(self.choices[group][index])]
        of_units = treated if batch else self.policies[0]
        return Candidate(
            sizes,
            of_units.recomputed_units,
            of_units.tiled_units,
            of_units.inputs_on_host,
            treated.optimizer_on_host,
        )
