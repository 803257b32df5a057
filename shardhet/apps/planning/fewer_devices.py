"""Report devices that are better left out, and how to launch without them.

A plan leaves devices idle where that is faster.  Without them the others may also compute in
another number format, and libraries hold less of their memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby

from shardhet.config.planning import Inputs
from shardhet.planner.idle import Positions, SubsetPlan, active_positions, node_type
from shardhet.planner.problem.solution import PlanSolution
from shardhet.pricing.part import part_of
from shardhet.pricing.scenario import Scenario
from shardhet.records.cluster import Cluster
from shardhet.records.profiles import Source

LEAST_GAIN = 1.02  # smaller gains are within the error of any prediction
MAX_HOSTS = 8  # that are shown one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class BetterWithout:
    """Devices that are better left out, and what the job gains."""

    whole: Cluster
    part: SubsetPlan  # the devices that stay
    param_dtype: str  # with all devices
    samples_per_s_with_all: float | None  # None: the plan of all leaves the same ones idle
    is_described: bool  # the cluster can be planned for by names of hosts
    estimate: str  # where its collectives come from, if they were not measured

    @property
    def left_out(self) -> list[int]:
        """The positions of these devices."""
        kept = set(self.part.positions)
        return [i for i in range(self.whole.world_size) if i not in kept]

    @property
    def gain_line(self) -> str:
        """Which devices, and what is gained."""
        rate, before = self.part.solution.samples_per_s, self.samples_per_s_with_all
        gained = "they would only slow down the others"
        if before is not None:
            gained = f"{rate:,.4g} samples/s instead of {before:,.4g}{self._formats}"
        which = named(self.whole, self.left_out)
        return f"Better without {which}: {gained}.{self.estimate}"

    @property
    def note(self) -> str:
        """Which devices, how to plan without them, and what the figures are."""
        which = f"without {named(self.whole, self.left_out)}{self._formats}"
        key = f"; {self.hosts_key} plans for the others" if self.hosts_key else ""
        return f"{which}{key}.{self.estimate}"

    @property
    def _formats(self) -> str:
        dtype = self.part.scenario.workload.param_dtype
        return f", {dtype} instead of {self.param_dtype}" * (dtype != self.param_dtype)

    @property
    def hosts_key(self) -> str:
        """The key that plans for the others, if whole hosts of a described cluster stay."""
        return f"hosts=[{self._patterns}]" if self.is_described and self._patterns else ""

    def launch_lines(self) -> Iterator[str]:
        """How to start the job without them."""
        if self._patterns:
            key = f" ({self.hosts_key} describes them)" if self.hosts_key else ""
            yield f"To launch without them: start ranks on hosts {self._patterns} only{key}."
            return
        whole, inside = self.whole, set(self.part.positions)
        local = [
            (node.host, [i for i, position in enumerate(here) if position in inside])
            for node, here in zip(whole.nodes, whole.positions_by_node, strict=True)
        ]
        kept = [f"{ranges(numbers)} of {host}" for host, numbers in local if numbers]
        more = f"; and so on, on {len(kept)} hosts in all" * (len(kept) > MAX_HOSTS)
        shown = "; ".join(kept[:MAX_HOSTS])
        how = "CUDA_VISIBLE_DEVICES, where these are GPUs"
        yield f"To launch without them: start ranks on devices {shown} only{more} ({how})."

    @property
    def _patterns(self) -> str:
        """The hosts that stay; empty if only a part of the devices of one does."""
        kept = set(whole_hosts(self.whole, self.part.positions) or ())
        of_type: dict[str, list[str]] = {}
        for node in self.whole.nodes:
            of_type.setdefault(node_type(node), []).append(node.host)
        patterns: list[str] = []
        every = [node.host for node in self.whole.nodes]
        for name, hosts in of_type.items():
            # A pattern may fit hosts of another type: "a-*" fits "a-b-0".
            fitting = [host for host in every if fnmatchcase(host, f"{name}-*")]
            is_whole = len(hosts) > 1 and kept.issuperset([*hosts, *fitting])
            patterns += [f"{name}-*"] if is_whole else filter(kept.__contains__, hosts)
        return ",".join(patterns)


def without_idle(
    inputs: Inputs,
    solution: PlanSolution,
    *,
    smaller: Callable[[Positions], Scenario] | None = None,
) -> BetterWithout | None:
    """The devices that a plan of all leaves idle; None if there are none."""
    scenario, kept = inputs.scenario, active_positions(solution)
    if len(kept) == scenario.cluster.world_size:
        return None
    there = (smaller or partial(part_of, scenario))(kept)
    return BetterWithout(
        whole=scenario.cluster,
        part=SubsetPlan(kept, there, solution),
        param_dtype=there.workload.param_dtype,
        samples_per_s_with_all=None,
        is_described=smaller is not None,
        estimate=estimated(scenario, kept),
    )


def estimated(scenario: Scenario, kept: Sequence[int]) -> str:
    """Where the collectives among these devices come from, if not from a measurement."""
    is_measured = scenario.profile.collectives.source is Source.MEASURED
    if not is_measured or len(kept) in (1, scenario.cluster.world_size):
        return ""
    return (
        " Collectives among the others are estimated from those of all devices: measure the "
        "others alone before you rely on it."
    )


def named(cluster: Cluster, positions: Sequence[int]) -> str:
    """``the 2 NVIDIA GeForce RTX 3090 (devices 1-2)``: regions as a whole, then by kind."""
    parts, rest = [], list(positions)
    for region, members in _regions(cluster).items():
        if members <= set(rest) and len(members) < cluster.world_size:
            noun = "devices" if len(members) > 1 else "device"
            parts.append(f"region {region} ({noun} {ranges(sorted(members))})")
            rest = [i for i in rest if i not in members]
    numbers = Counter(str(device.kind) for device in cluster.devices)
    kinds = [str(cluster.devices[i].kind) for i in rest]
    for kind in dict.fromkeys(kinds):
        members_of_kind = [i for i, each in zip(rest, kinds, strict=True) if each == kind]
        number = f"{len(members_of_kind)} " if len(members_of_kind) > 1 else ""
        noun = "devices" if len(members_of_kind) > 1 else "device"
        is_all = len(members_of_kind) == numbers[kind]
        parts.append(f"{'the ' * is_all}{number}{kind} ({noun} {ranges(members_of_kind)})")
    return ", ".join(parts)


def _regions(cluster: Cluster) -> dict[str, set[int]]:
    """The positions of every region that has a name."""
    regions: dict[str, set[int]] = {}
    for node, here in zip(cluster.nodes, cluster.positions_by_node, strict=True):
        if node.region:
            regions.setdefault(node.region, set()).update(here)
    return regions


def ranges(positions: Sequence[int]) -> str:
    """``0, 2-5`` for these numbers."""
    runs = [
        [i for _, i in each]
        for _, each in groupby(enumerate(positions), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def whole_hosts(cluster: Cluster, kept: Sequence[int]) -> list[str] | None:
    """The hosts of these devices; None if only a part of a host's devices is kept."""
    inside, hosts = set(kept), []
    for node, here in zip(cluster.nodes, cluster.positions_by_node, strict=True):
        number = len(inside.intersection(here))
        if 0 < number < len(node.devices):
            return None
        if number:
            hosts.append(node.host)
    return hosts
