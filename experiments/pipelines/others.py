"""Two other ways to plan pipelines, priced like ours: Zorse's formulation, and equal stages.

``even_inside``   Zorse's: stages are groups of unlike devices with even state inside; units
                  are dealt out by speed, or by memory where that does not fit; everything is
                  recomputed, all forwards come before all backwards, and inputs of units wait
                  in the memory of the hosts.
``equal_stages``  as many devices and units in each stage, in the order of the plan, with even
                  batches and state, one forward, one backward: ``Schedule1F1B`` of
                  ``torch.distributed.pipelining`` over FSDP2.

Neither is anybody's runtime or code.  Of what this leaves open the best is taken: microbatches,
rounds, how often units are gathered, and for the first groups and their order, as we search.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardhet.planner import Demands, PlanError, solve
from shardhet.planner.problem.demands import DeviceLimits
from shardhet.planner.stages.bound import even_cuts
from shardhet.planner.stages.find import FORMS, MAX_SEARCHED, MAX_STAGES, PipelineSearch
from shardhet.planner.stages.groups import Positions, Stages, orders_of_stages
from shardhet.pricing.setting import Setting
from shardhet.records.schedule import StepForm
from shardhet.simulator.pipeline import hop_between, pipeline_s

ROUNDS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Found:
    """The best of a formulation."""

    step_s: float
    stages: Stages  # one, if that is best
    num_rounds: int


@dataclass(frozen=True, slots=True)
class Others:
    """A problem, and what others make of it."""

    setting: Setting
    smaller: Callable[[Positions], Setting]
    batch: int

    def even_inside(self) -> Found | None:
        """Zorse's formulation; None if nothing fits."""
        number = self.setting.cluster.world_size
        demands = Demands(
            has_even_state=True,
            may_keep_inputs_on_host=True,
            limits={i: DeviceLimits(recomputes=True) for i in range(number)},
        )
        search = self._search(demands)
        least = sorted(
            (search.speeds.least_step_s(stages), stages)
            for stages in orders_of_stages(self.setting.cluster, MAX_STAGES)
            if len(stages) <= len(search.units)
        )
        found = [*self._flat(demands)]
        for least_s, stages in least[:MAX_SEARCHED]:
            if found and least_s >= min(each.step_s for each in found):
                break
            budgets = self.setting.cluster.memory_budget_bytes
            memory = [float(sum(map(budgets, positions))) for positions in stages]
            by_memory = even_cuts(memory, [1.0] * len(search.units))
            for cuts in (search.speeds.balanced_cuts(stages), by_memory):
                fitting = [*self._timed(search, stages, cuts, is_wave_by_wave=False)]
                found += fitting
                if fitting:
                    break
        return min(found, key=lambda each: each.step_s, default=None)

    def equal_stages(self) -> Found | None:
        """Equal stages of equal devices; None if nothing fits."""
        demands = Demands(has_even_state=True, has_even_batches=True)
        search, size = self._search(demands), self.setting.cluster.world_size
        found = [*self._flat(demands)]
        for number in range(2, MAX_STAGES + 1):
            if size % number == 0 and number <= len(search.units):
                each = size // number
                stages = tuple(tuple(range(i * each, (i + 1) * each)) for i in range(number))
                cuts = even_cuts([1.0] * number, [1.0] * len(search.units))
                found += self._timed(search, stages, cuts, is_wave_by_wave=True)
        return min(found, key=lambda each: each.step_s, default=None)

    def _search(self, demands: Demands) -> PipelineSearch:
        return PipelineSearch(self.setting, self.smaller, self.batch, demands)

    def _flat(self, demands: Demands) -> Iterator[Found]:
        """Without stages."""
        try:
            solution = solve(
                self.setting, global_batch_size=self.batch, demands=demands, is_bounded=False
            )
        except PlanError:
            return
        everyone = tuple(range(self.setting.cluster.world_size))
        yield Found(solution.predicted.step_time_s, (everyone,), solution.plan.num_rounds)

    def _timed(
        self,
        search: PipelineSearch,
        stages: Stages,
        cuts: Sequence[int],
        *,
        is_wave_by_wave: bool,
    ) -> Iterator[Found]:
        """Pipelines of these stages that fit, in rounds and forms that are tried."""
        for form in self._forms():
            number = form.num_rounds
            in_flight = [min(number, len(stages) - i) for i in range(len(stages))]
            if not is_wave_by_wave:
                in_flight = [number] * len(stages)
            bounds = pairwise((0, *cuts, len(search.units)))
            times = []
            for positions, (first, stop), held in zip(stages, bounds, in_flight, strict=True):
                solution = search.plans.of(
                    positions, first, stop, form, held if is_wave_by_wave else 1
                )
                if solution is None:
                    break
                times.append(solution.times)
            else:
                size = self.batch // number
                hops = [
                    hop_between(self.setting, *pair, search.units[cut], size)
                    for pair, cut in zip(pairwise(stages), cuts, strict=True)
                ]
                step_s = pipeline_s(
                    times,
                    [hop.seconds for hop in hops],
                    in_flight=in_flight,
                    num_rounds=number,
                    backs_s=[hop.back_s for hop in hops],
                )
                yield Found(step_s, stages, number)

    def _forms(self) -> Iterator[StepForm]:
        for number in ROUNDS:
            if self.batch % number == 0:
                yield from (replace(form, num_rounds=number) for form in FORMS)
