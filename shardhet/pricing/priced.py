"""What prices of seconds and of bytes have in common: a setting."""

from dataclasses import dataclass
from functools import cached_property

from shardhet.pricing.setting import Setting
from shardhet.records.cluster import Cluster
from shardhet.records.profiles import Profile
from shardhet.records.workload import Unit, Workload


@dataclass(frozen=True)
class Priced:
    """Something that prices what happens in a setting."""

    setting: Setting

    @property
    def cluster(self) -> Cluster:
        """That of the setting."""
        return self.setting.cluster

    @property
    def workload(self) -> Workload:
        """That of the setting."""
        return self.setting.workload

    @property
    def profile(self) -> Profile:
        """That of the setting."""
        return self.setting.profile

    @cached_property
    def visited_units(self) -> tuple[Unit, ...]:
        """The units that compute, in order of execution."""
        return tuple(unit for unit in self.workload.units if unit.fqn)

    @cached_property
    def root_numel(self) -> int:
        """Elements that are unsharded for the whole step."""
        kinds = [self.workload.kind_of(unit) for unit in self.workload.units if not unit.fqn]
        return sum(kind.numel for kind in kinds)
