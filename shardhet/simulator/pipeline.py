"""The time of a step of a pipeline, from the times of its stages and of the links between them.

Every stage takes rounds one forward, one backward (``shardhet.records.ops``).
What a stage hands over goes through a queue per boundary and direction; a transfer overlaps
compute, and begins when the one before it has ended.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from shardhet.pricing.step_cost import StepCost
from shardhet.records.cluster import Cluster, Link
from shardhet.records.schedule import Phase, RoundPhase, one_forward_one_backward
from shardhet.records.workload import Unit, Workload

Seconds = TypeVar("Seconds", float, Any)  # a number, or an array of those of many pipelines


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
    """What stages hand over in a round, and the gradients that come back.

    Messages go point to point and get all of the bandwidth; the part of it that collectives
    reach (``shardhet.pricing.derive``) is relative to this.
    """

    link: Link
    num_links: int = 1  # side by side
    nbytes: int
    back_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a round from one stage to the next."""
        return self._seconds(self.nbytes)

    @property
    def back_s(self) -> float:
        """Seconds of its gradients."""
        return self._seconds(self.back_bytes) if self.back_bytes else 0.0

    def _seconds(self, nbytes: int) -> float:
        bandwidth = self.link.bandwidth_bytes_per_s * self.num_links
        return self.link.latency_s + nbytes / bandwidth


def seconds_of_hops(hops: Sequence[Hop]) -> tuple[list[float], list[float]]:
    """Seconds of a round from each stage to the next, and of its gradients back."""
    return [hop.seconds for hop in hops], [hop.back_s for hop in hops]


def pipeline_s(
    stages: Sequence[StageTimes],
    hops_s: tuple[Sequence[float], Sequence[float]],
    *,
    in_flight: Sequence[int],
    num_rounds: int,
) -> float:
    """Seconds of a step.

    Args:
        stages: along the pipeline.
        hops_s: of one round from each stage to the next, and of its gradients back.
        in_flight: rounds that each stage may have begun and not finished; not growing.
        num_rounds: of the step.
    """
    times = [(each.forward_s, each.backward_s) for each in stages]
    order = order_of_phases(tuple(in_flight), num_rounds)
    free_s = stages_free_s(times, hops_s, order, max)
    return max(end_s + stage.once_s for end_s, stage in zip(free_s, stages, strict=True))


@lru_cache(maxsize=256)
def order_of_phases(
    in_flight: tuple[int, ...], num_rounds: int
) -> tuple[tuple[int, RoundPhase], ...]:
    """Stages and what they compute, none before what it needs, however long it takes."""
    orders = [one_forward_one_backward(num_rounds, each) for each in in_flight]
    next_of = [0] * len(orders)
    arrived: set[tuple[int, RoundPhase]] = set()
    found: list[tuple[int, RoundPhase]] = []
    while len(found) < sum(map(len, orders)):
        before = len(found)
        for i, order in enumerate(orders):
            while next_of[i] < len(order):
                each = order[next_of[i]]
                giver = i - 1 if each.phase is Phase.FORWARD else i + 1
                if 0 <= giver < len(orders) and (giver, each) not in arrived:
                    break
                next_of[i] += 1
                found.append((i, each))
                arrived.add((i, each))
        if len(found) == before:
            raise ValueError(
                f"pipeline: {list(in_flight)} rounds in flight grow along it, so that it does "
                "not end. Give no stage more than the one before it."
            )
    return tuple(found)


def stages_free_s(
    times: Sequence[tuple[Seconds, Seconds]],
    hops_s: tuple[Sequence[Seconds], Sequence[Seconds]],
    order: Sequence[tuple[int, RoundPhase]],
    later: Callable[[Seconds, Seconds], Seconds],
) -> list[Seconds]:
    """When each stage has computed all, given its forward and its backward of one round.

    ``hops_s`` are from each stage to the next, and back.
    Seconds are numbers, or arrays of those of many pipelines, and ``later`` takes the maximum.
    """
    last = len(times) - 1
    free_s: list[Any] = [0.0] * len(times)
    # By direction and the stage that gets them: when the last message has arrived, and those
    # that wait.
    links_free_s: list[list[Any]] = [[0.0] * len(times) for _ in range(2)]
    waiting: list[list[deque[Any]]] = [[deque() for _ in times] for _ in range(2)]
    for i, each in order:
        is_backward = each.phase is Phase.BACKWARD
        start_s = free_s[i]
        if i != (last if is_backward else 0):
            start_s = later(start_s, waiting[is_backward][i].popleft())
        free_s[i] = end_s = start_s + times[i][is_backward]
        if i != (0 if is_backward else last):
            receiver = i - 1 if is_backward else i + 1
            begins_s = later(end_s, links_free_s[is_backward][receiver])
            arrived_s = begins_s + hops_s[is_backward][min(i, receiver)]
            links_free_s[is_backward][receiver] = arrived_s
            waiting[is_backward][receiver].append(arrived_s)
    return free_s


def least_step_s(
    rounds_s: Sequence[Seconds],
    per_step_s: Sequence[Seconds],
    hops_s: tuple[Sequence[Seconds], Sequence[Seconds]],
    num_rounds: int,
    in_flight: Sequence[int] | None,
    larger: Callable[[Seconds, Seconds], Seconds],
) -> Seconds:
    """Seconds that a step takes at least; ``in_flight`` None: whatever is in flight.

    Let a round need r on a stage, b on those before it and a on those after it, with messages.
    The stage has M rounds to compute, after the first has reached it and before the last has
    gone all the way back: b + M r.  With f of r for forward, the last forward ends after M f,
    and all of a and a backward follow; M backwards follow the first forward and a; so the mean
    of both, b + a + (M + 1) r / 2, is no more than a step.  With K rounds in flight, round
    m + K begins after round m has come back: after q times K of the M rounds, q (r + a) have
    passed.  A link carries all rounds one after the other, each way.
    """
    last = len(rounds_s) - 1
    before_s: list[Any] = [0.0]  # of a round, on the stages before each and on the way
    both_s = [there_s + back_s for there_s, back_s in zip(*hops_s, strict=True)]
    for round_s, message_s in zip(rounds_s[:-1], both_s, strict=True):
        before_s.append(before_s[-1] + round_s + message_s)
    through_s = before_s[-1] + rounds_s[-1]
    min_s = through_s
    after_s: Any = 0.0  # likewise
    for i in range(last, -1, -1):
        round_s = rounds_s[i]
        own_s = larger(num_rounds * round_s, after_s + (num_rounds + 1) / 2 * round_s)
        if in_flight is not None and (begun := (num_rounds - 1) // in_flight[i]):
            left = num_rounds - begun * in_flight[i]
            rest_s = larger(left * round_s, after_s + (left + 1) / 2 * round_s)
            own_s = larger(own_s, begun * (round_s + after_s) + rest_s)
        min_s = larger(larger(min_s, before_s[i] + own_s), own_s + per_step_s[i])
        if i:
            slower_s = larger(hops_s[0][i - 1], hops_s[1][i - 1])
            min_s = larger(min_s, through_s + (num_rounds - 1) * slower_s)
            after_s = after_s + round_s + both_s[i - 1]
    return min_s


def link_between(
    cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]
) -> tuple[Link, int]:
    """The slowest link between devices of two stages, and how many of it work side by side.

    Every node has a cable of its own; between regions there is one.  Raises ``ValueError`` if
    the link is not stated.
    """
    ours = {id(node): node for node in [cluster.node_of[i] for i in senders]}
    theirs = {id(node): node for node in [cluster.node_of[i] for i in receivers]}
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


def handed_back_bytes(workload: Workload, after: Unit) -> int:
    """Bytes per sample of the gradients that it gets from there."""
    kind = workload.kind_of(after)
    return kind.input_bytes if kind.input_grad_bytes is None else kind.input_grad_bytes


def hop_of(link: tuple[Link, int], workload: Workload, first: Unit, num_samples: int) -> Hop:
    """What one stage hands to the next, whose first unit is ``first``, in a round."""
    return Hop(
        link=link[0],
        num_links=link[1],
        nbytes=num_samples * handed_on_bytes(workload, first),
        back_bytes=num_samples * handed_back_bytes(workload, first),
    )
