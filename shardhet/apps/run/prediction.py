"""Compare what a plan was predicted to do with what it did."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Self

from rich.table import Table

from shardhet.apps.cli.streamed import figures_table
from shardhet.pricing.scenario import Scenario
from shardhet.pricing.step_cost import MemoryParts
from shardhet.records.plan import Plan
from shardhet.simulator.simulation import timeline_of
from shardhet.simulator.stages import price_of
from shardhet.simulator.timeline import Timeline
from shardhet.training.peak_memory import DeviceUse
from shardhet.training.rebalancing import beside

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of a plan, simulated from measurements."""

    timeline: Timeline
    busy_shares: tuple[float, ...]  # by device, of the step
    memory: tuple[MemoryParts, ...]  # by device

    @property
    def step_time_s(self) -> float:
        """The predicted time of a step."""
        return self.timeline.step_time_s

    @classmethod
    def in_scenario(cls, plan: Plan, scenario: Scenario) -> Self:
        """Simulate in a scenario of the plan's devices and model.

        Raises ``ValueError`` if stages hand over across links that were not measured.
        """
        price = price_of(plan, scenario)
        timeline = timeline_of(price)
        positions = range(plan.world_size)
        return cls(
            timeline=timeline,
            busy_shares=tuple(1 - timeline.idle_fraction(i) for i in positions),
            memory=tuple(rank.memory for rank in price.ranks),
        )


@dataclass(slots=True)
class Outcome:
    """What the steps of a run took, for the comparison at the end."""

    step_times_s: list[float] = field(default_factory=list)
    looks: list[Sequence[DeviceUse]] = field(default_factory=list)  # what all devices did

    def beside(self, prediction: Prediction) -> str:
        """One line that compares the step time with the prediction."""
        return beside(prediction.step_time_s, self.step_times_s)

    def table(self, plan: Plan, prediction: Prediction) -> Table:
        """What was measured of each device, and in brackets what was predicted.

        What a device keeps are its rows, gradients and optimizer states; the rest of the peak
        are the other tensors of a step, and on a CPU the process.
        """
        of_memory = ("peak, MiB", "kept", "rest of the peak", "on the host")
        table = figures_table("measured (predicted)", "busy", *of_memory)
        for i, rank in enumerate(plan.ranks):
            busy = fmean(uses[i].busy_share for uses in self.looks[1:] or self.looks)
            use, parts = self.looks[-1][i], prediction.memory[i]
            peak, kept = use.peak_memory_bytes, use.kept.on_device
            pairs = (
                (peak, parts.total_bytes),
                (kept, parts.state_bytes),
                (peak - kept, parts.total_bytes - parts.state_bytes),
                (use.kept.on_host, parts.host_bytes),
            )
            table.add_row(
                f"{i} {rank.device.kind or 'device'}",
                f"{busy:.0%} ({prediction.busy_shares[i]:.0%})",
                *(f"{had / MIB:,.1f} ({said / MIB:,.1f})" for had, said in pairs),
            )
        return table
