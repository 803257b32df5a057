"""A pipeline with its predicted price."""

from dataclasses import dataclass

from shardhet.planner.problem.solution import PlanSolution
from shardhet.planner.stages.groups import Positions, Stages
from shardhet.records.plan import Plan
from shardhet.simulator.pipeline import StageTimes
from shardhet.simulator.stages import PipelinePrice


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """The best plan of one stage."""

    positions: Positions  # in the cluster
    units: tuple[int, int]  # the first, and the one after the last
    solution: PlanSolution  # of these devices and units alone, with all rounds of a step
    times: StageTimes

    @classmethod
    def of(
        cls, positions: Positions, first: int, stop: int, solution: PlanSolution
    ) -> "StageSolution":
        """With the times of a round of the solution."""
        times = StageTimes.of(solution.predicted, solution.plan.num_rounds)
        return cls(positions=positions, units=(first, stop), solution=solution, times=times)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSolution:
    """The best pipeline that was found."""

    plan: Plan  # its devices are in the order of its stages
    predicted: PipelinePrice
    places: Positions  # of the plan's devices, in the cluster
    lower_bound_s: float  # of any plan for these devices, with stages or without

    @property
    def groups(self) -> Stages:
        """The positions of each stage's devices in the cluster."""
        return tuple(tuple(self.places[i] for i in group) for group in self.plan.groups)

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.predicted.step_time_s

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput."""
        return self.plan.global_batch_size / self.step_time_s

    @property
    def relative_gap(self) -> float:
        """(predicted step time - bound) / bound."""
        return max(0.0, self.step_time_s / self.lower_bound_s - 1)
