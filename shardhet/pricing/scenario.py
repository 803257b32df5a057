"""The input of every price: a cluster, a workload and measurements."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from shardhet.records.cluster import Cluster
from shardhet.records.plan import Plan
from shardhet.records.profiles import Profile
from shardhet.records.workload import Workload

CLUSTER_FILE, WORKLOAD_FILE, PROFILE_FILE = "cluster.json", "workload.json", "profile.json"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, the workload it trains, and their measured (or derived) profile."""

    cluster: Cluster
    workload: Workload
    profile: Profile

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read the three files that ``shardhet measure`` writes into a folder.

        Raises ``ValueError`` and ``OSError`` as the ``load`` of each record does.
        """
        path = Path(folder)
        return cls(
            Cluster.load(path / CLUSTER_FILE),
            Workload.load(path / WORKLOAD_FILE),
            Profile.load(path / PROFILE_FILE),
        )

    def named(self, plan: Plan) -> Plan:
        """The plan, which says what it holds for."""
        return replace(plan, holds_for=self.workload.holds_for)

    def check_plan(self, plan: Plan, *, name: str) -> None:
        """Raise ``ValueError`` unless ``plan`` is for this model on as many devices.

        ``name`` is what the reader calls the scenario.  A plan that was written by hand does
        not say which model it is for, and is refused.  A pipeline may leave devices out.
        """
        if not plan.units:
            raise ValueError(
                f"{name}: the plan was written by hand and names no units, so nothing shows "
                f"that it is for the measured model. Leave {name} out, or plan with it."
            )
        planned = {unit.fqn: unit.numel for unit in plan.units if unit.numel}
        measured = {each.fqn: each.numel for each in self.workload.planned_units if each.numel}
        world_size = self.cluster.world_size
        is_part = plan.stages is not None and plan.world_size < world_size
        if planned != measured or not (plan.world_size == world_size or is_part):
            raise ValueError(
                f"{name}: it is of {world_size} devices and a model of {len(measured)} units, "
                f"the plan of {plan.world_size} and {len(planned)}, or their sizes differ. "
                "Measure this model on this cluster, and plan with that."
            )

    def save(self, folder: str | Path) -> None:
        """Write the three files; the folder is created if it does not exist."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.cluster.save(path / CLUSTER_FILE)
        self.workload.save(path / WORKLOAD_FILE)
        self.profile.save(path / PROFILE_FILE)
