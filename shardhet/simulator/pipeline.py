"""The time of a step of a pipeline, from the times of its stages and of the links between them.

Every stage takes rounds one forward, one backward (``shardhet.records.schedule.pipeline``).
What a stage hands over goes through a queue per boundary and direction; a transfer overlaps
compute, and begins when the one before it has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardhet.pricing.setting import Setting
from shardhet.pricing.step_cost import StepCost
from shardhet.records.cluster import Cluster, Link
from shardhet.records.schedule import Phase
from shardhet.records.schedule.pipeline import RoundPhase, one_forward_one_backward
from shardhet.records.workload import Unit, Workload


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one stage, with the collectives among its devices."""

    forward_s: float  # of one round
    backward_s: float
    once_s: float = 0.0  # after its last round: the optimizer, and what overlaps no compute

    @classmethod
    def of(cls, cost: StepCost, num_rounds: int) -> "StageTimes":
        """Those of a stage whose rounds cost this much together, taken to be alike."""
        own_s = cost.overhead_s / 2
        return cls(
            forward_s=(cost.forward_s + own_s) / num_rounds,
            backward_s=(cost.backward_s + own_s) / num_rounds,
            once_s=cost.optimizer_s + cost.exposed_comm_s,
        )

    @property
    def round_s(self) -> float:
        """Seconds of a round."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """What stages hand over in a round, in each direction."""

    nbytes: int
    link: Link
    num_links: int  # side by side
    seconds: float


@dataclass(frozen=True, slots=True)
class Passage:
    """A round's forward or backward on a stage, or its message to the next one."""

    stage: int
    to: int | None  # the stage that gets the message; None: it is computed
    of: RoundPhase
    start_s: float
    end_s: float


def pipeline_s(
    stages: Sequence[StageTimes],
    hops_s: Sequence[float],
    *,
    in_flight: Sequence[int],
    num_rounds: int,
    passages: list[Passage] | None = None,
) -> float:
    """Seconds of a step.

    Args:
        stages: along the pipeline.
        hops_s: of one round from each stage to the next, and of its gradients back.
        in_flight: rounds that each stage may have begun and not finished; not growing.
        num_rounds: of the step.
        passages: gets all that is computed and sent, if given.
    """
    orders = [one_forward_one_backward(num_rounds, each) for each in in_flight]
    next_of = [0] * len(stages)
    free_s = [0.0] * len(stages)
    links_free_s: dict[tuple[int, int], float] = {}  # by sender and receiver
    arrived_s: dict[tuple[int, RoundPhase], float] = {}  # what a stage needs to begin
    num_taken = 0
    while any(n < len(order) for n, order in zip(next_of, orders, strict=True)):
        before = num_taken
        for i, order in enumerate(orders):
            while next_of[i] < len(order):
                each = order[next_of[i]]
                is_forward = each.phase is Phase.FORWARD
                giver, receiver = (i - 1, i + 1) if is_forward else (i + 1, i - 1)
                has_giver = 0 <= giver < len(stages)
                if has_giver and (i, each) not in arrived_s:
                    break
                start_s = max(free_s[i], arrived_s.get((i, each), 0.0))
                seconds = stages[i].forward_s if is_forward else stages[i].backward_s
                free_s[i] = start_s + seconds
                if passages is not None:
                    passages.append(Passage(i, None, each, start_s, free_s[i]))
                next_of[i] += 1
                num_taken += 1
                if 0 <= receiver < len(stages):
                    link = (i, receiver)
                    begins_s = max(free_s[i], links_free_s.get(link, 0.0))
                    arrived_s[receiver, each] = begins_s + hops_s[min(link)]
                    links_free_s[link] = arrived_s[receiver, each]
                    if passages is not None:
                        ends_s = arrived_s[receiver, each]
                        passages.append(Passage(i, receiver, each, begins_s, ends_s))
        if num_taken == before:
            raise ValueError(
                f"pipeline: {list(in_flight)} rounds in flight grow along it, so that it does "
                "not end. Give no stage more than the one before it."
            )
    return max(free_s[i] + stage.once_s for i, stage in enumerate(stages))


def least_pipeline_s(
    stages: Sequence[StageTimes], hops_s: Sequence[float], num_rounds: int
) -> float:
    """Seconds that a step takes at least, whatever is in flight.

    A stage takes all rounds, after the first one has reached it and before the last one has
    gone all the way back; a link carries all rounds.
    """
    least_s, before_s = 0.0, 0.0
    for i, stage in enumerate(stages):
        own_s = num_rounds * stage.round_s
        least_s = max(least_s, before_s + own_s, own_s + stage.once_s)
        if i < len(hops_s):
            least_s = max(least_s, num_rounds * hops_s[i])
            before_s += stage.round_s + 2 * hops_s[i]
    return least_s


def link_between(
    cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]
) -> tuple[Link, int]:
    """The slowest link between devices of two stages, and how many of it work side by side.

    Every node has a cable of its own; between regions there is one.  Raises ``ValueError`` if
    the link is not stated.
    """
    node_of = [node for node in cluster.nodes for _ in node.devices]
    ours = {id(node_of[i]): node_of[i] for i in senders}
    theirs = {id(node_of[i]): node_of[i] for i in receivers}
    found: list[tuple[Link | None, int, str]] = []
    for one in ours.values():
        for other in theirs.values():
            if one is other:
                found.append((one.link, 1, f"between the devices of {one.host!r}"))
            elif one.region != other.region:
                found.append((cluster.between_regions, 1, "between_regions"))
            else:
                number = min(len(ours), len(theirs))
                found.append((cluster.between_nodes, number, "between_nodes"))
    missing = [where for link, _, where in found if link is None]
    if missing:
        raise ValueError(
            f"plan: a pipeline sends samples over links, and the one {missing[0]} is not "
            "stated. Add its latency_s and bandwidth_bytes_per_s to the cluster."
        )
    stated = [(link, number) for link, number, _ in found if link is not None]
    return min(stated, key=lambda each: each[0].bandwidth_bytes_per_s * each[1])


def handed_on_bytes(workload: Workload, after: Unit | None) -> int:
    """Bytes per sample that a stage hands to the next one, whose first unit is ``after``.

    None: it is the last.
    """
    return 0 if after is None else workload.kind_of(after).input_bytes


def hop_between(
    setting: Setting,
    senders: Sequence[int],
    receivers: Sequence[int],
    first: Unit,
    num_samples: int,
) -> Hop:
    """What one stage hands over to the next, whose first unit is ``first``, in a round."""
    nbytes = num_samples * handed_on_bytes(setting.workload, first)
    link, number = link_between(setting.cluster, senders, receivers)
    seconds = hop_s((link, number), nbytes)
    return Hop(nbytes=nbytes, link=link, num_links=number, seconds=seconds)


def hop_s(link: tuple[Link, int], nbytes: float) -> float:
    """Seconds of so many bytes over one of several equal links.

    Messages go point to point and get all of the bandwidth; the part of it that collectives
    reach (``shardhet.pricing.derive``) is relative to this.
    """
    one, number = link
    return one.latency_s + nbytes / (one.bandwidth_bytes_per_s * number)
