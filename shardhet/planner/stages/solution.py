"""A pipeline with its predicted times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardhet.planner.problem.solution import PlanSolution
from shardhet.planner.stages.groups import Positions, Stages
from shardhet.records.cluster import Link
from shardhet.records.plan import Plan, PlannedUnit
from shardhet.records.stages import Stage
from shardhet.simulator.pipeline import Hop, StageTimes, hop_over, pipeline_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """One stage: its devices, its units and the best plan of them."""

    positions: Positions  # in the cluster
    unit_fqns: tuple[str, ...]
    in_flight: int
    solution: PlanSolution  # of these devices and units alone, with all rounds of a step
    times: StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSolution:
    """The best pipeline that was found."""

    stages: tuple[StageSolution, ...]
    hops: tuple[Hop, ...]  # between one stage and the next
    num_rounds: int
    lower_bound_s: float  # of any plan for these devices, with stages or without
    units: tuple[PlannedUnit, ...]  # of the whole model

    @property
    def groups(self) -> Stages:
        """The positions of each stage's devices in the cluster."""
        return tuple(stage.positions for stage in self.stages)

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a step."""
        return self._step_s(self.hops)

    def step_time_over(self, link: Link, part: float) -> float:
        """Seconds of a step if messages over this link had this part of its bandwidth."""
        slower = replace(link, bandwidth_bytes_per_s=part * link.bandwidth_bytes_per_s)
        return self._step_s(
            [
                hop_over((slower, hop.num_links), hop.nbytes, hop.back_bytes)
                if hop.link == link
                else hop
                for hop in self.hops
            ]
        )

    def _step_s(self, hops: Sequence[Hop]) -> float:
        return pipeline_s(
            [stage.times for stage in self.stages],
            [hop.seconds for hop in hops],
            backs_s=[hop.back_s for hop in hops],
            in_flight=[stage.in_flight for stage in self.stages],
            num_rounds=self.num_rounds,
        )

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput."""
        return self.stages[0].solution.plan.global_batch_size / self.step_time_s

    @property
    def relative_gap(self) -> float:
        """(predicted step time - bound) / bound."""
        return max(0.0, self.step_time_s / self.lower_bound_s - 1)

    @property
    def plan(self) -> Plan:
        """The plan with these stages; its devices are in their order."""
        plans = [stage.solution.plan for stage in self.stages]
        return replace(
            plans[0],
            ranks=tuple(rank for plan in plans for rank in plan.ranks),
            units=self.units,
            stages=tuple(
                Stage(
                    units=stage.unit_fqns,
                    num_ranks=len(stage.positions),
                    in_flight=stage.in_flight,
                )
                for stage in self.stages
            ),
        )
