"""Sentences about a plan: its form and stages, what was proven, and why it was preferred."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from math import ceil

from shardhet.apps.cli.quantities import GIB, MIB, counted, duration
from shardhet.apps.planning.fewer_devices import named, ranges
from shardhet.planner import Constraints, PlanSolution
from shardhet.planner.candidates.role_times import MAX_MICROBATCH_SIZE
from shardhet.planner.forms import FIRST_ROUNDS
from shardhet.planner.idle import active_positions
from shardhet.planner.preference import FULL
from shardhet.planner.stages.solution import PipelineSolution
from shardhet.records.cluster import Cluster, Link
from shardhet.records.plan import EVERY_UNIT, Plan, is_matched
from shardhet.records.workload import Workload

SHOWN_GAP = 1e-4  # the least that is stated
OVER_GLOO = (
    "GPUs of AMD and of NVIDIA meet over gloo alone (transport=gloo), which holds copies of "
    "units that are not in the memory above. Its speed is an estimate (docs/limits.md)."
)


def form_lines(plan: Plan, workload: Workload) -> Iterator[str]:
    """How many rounds there are, and how often units are gathered and reduced."""
    kept = "each is gathered once instead of twice"
    if plan.num_rounds > 1:
        last = "" if plan.last_round_size is None else f", the last of {plan.last_round_size:,}"
        yield (
            f"A step has {plan.num_rounds} rounds of {counted(plan.round_size, 'sample')}{last}"
            f" (num_rounds={plan.num_rounds}; the table shows one)."
        )
        kept = "each is gathered once a round instead of twice"
    if not plan.reshard_after_backward:
        yield (
            "Units stay gathered over all rounds (reshard_after_backward=False): each is "
            "gathered once a step."
        )
    elif not plan.reshard_after_forward:
        yield (
            "Units stay gathered from forward to backward (reshard_after_forward=False): "
            f"there is memory for it, and {kept}."
        )
    if not plan.reduce_each_round:
        yield (
            "Gradients are kept whole and reduced after the last round "
            "(reduce_each_round=False)."
        )
    for group in plan.context_groups or ():
        yield (
            f"Devices {group[0]} to {group[-1]} compute the same samples, each its part of the "
            "tokens (context_groups); only attention sends keys and values between them. "
            "Training refuses models in which tokens meet elsewhere."
        )
    yield from resident_lines(plan, workload)
    if plan.two_level_units:
        number = sum(is_matched(unit.fqn, plan.two_level_units) for unit in workload.units)
        units = "" if plan.two_level_units == EVERY_UNIT else f"{number} of "
        yield (
            f"Rows of {units}the units cross between nodes once per node, and gradients as one "
            "sum of each node (two_level_units)."
        )


def resident_lines(plan: Plan, workload: Workload) -> Iterator[str]:
    """Which frozen weights stay unsharded, and what a step sends."""
    frozen = workload.frozen_units
    kept = tuple(unit for unit in frozen if is_matched(unit.fqn, plan.resident_units))
    if not kept:
        return
    nbytes = sum(workload.frozen_bytes(workload.kind_of(unit)) for unit in kept)
    units = "all units" if kept == frozen else f"{len(kept)} of {len(frozen)} units"
    sends = "what is trained only"
    if kept != frozen:
        sends = "what is trained, and the frozen weights of the others"
    yield (
        f"Frozen weights of {units} stay whole on every device that computes, "
        f"{nbytes / GIB:.1f} GiB (resident_units): a step sends {sends}."
    )


def proven_line(solution: PlanSolution, constraints: Constraints) -> str:
    """What the search has shown, and of which plans (docs/architecture.md)."""
    relative_gap = solution.relative_gap
    limit = f"more than {relative_gap:.2%}" if relative_gap >= SHOWN_GAP else f"{SHOWN_GAP:.2%}"
    has_demands = bool(constraints.limits or constraints.equal)
    world_size = solution.plan.world_size
    idle = world_size - len(active_positions(solution))
    busy = " that leave no device idle" * (world_size > 1)
    if idle:
        busy += f", or only the {idle} that {'is' if idle == 1 else 'are'} idle here"
    most = constraints.max_rounds
    first = min(FIRST_ROUNDS, most or FIRST_ROUNDS)
    if solution.plan.context_groups:
        busy += ", in these context groups with these parts of the tokens"
    rounds = "one round" if most == 1 else f"1 to {first} equal rounds"
    if most is None or most > FIRST_ROUNDS:
        rounds += f", or more{f' (up to {most or 0:,})' * bool(most)} that divide the batch"
    return (
        f"No plan that was looked at{' and meets the demands' * has_demands} is predicted to "
        f"be {limit} faster: any batches and shares{busy}; microbatches of up to "
        f"{min(MAX_MICROBATCH_SIZE, constraints.max_microbatch_size or MAX_MICROBATCH_SIZE):,} "
        f"samples; recomputation kind by kind, in quarters; {rounds}."
    )


def preferred_lines(solution: PlanSolution) -> Iterator[str]:
    """What a plan that is slower than the fastest is preferred for."""
    if solution.fastest_s is None:
        return
    slower = solution.predicted.step_time_s / solution.fastest_s - 1
    if slower >= SHOWN_GAP:
        yield (
            f"The fastest plan takes {slower:.2%} less. Of those nearly as fast, in this one "
            f"no budget is filled beyond {FULL:.0%} if possible, then alike devices do alike "
            "if they do in any such; of such plans that were looked at, there is one round if "
            "possible, then least is recomputed, then the fullest device is emptiest "
            "(tolerance=0 takes the fastest)."
        )


def units_in_short(fqns: Sequence[str], of_model: Sequence[str]) -> str:
    """Units in few words: ``embed, layers 0-17``, without what all names begin with."""
    paths = [fqn.split(".") for fqn in of_model if fqn]
    by_place = zip(*(path[:-1] for path in paths), strict=False)
    num_shared = len([*takewhile(lambda names: len(set(names)) == 1, by_place)])
    while num_shared and any(path[num_shared].isdigit() for path in paths):
        num_shared -= 1  # "layers" says what the numbers are of
    found: list[tuple[str, list[int]]] = []
    for fqn in fqns:
        *names, last = fqn.split(".")[num_shared:]
        name = ".".join(names if last.isdigit() else [*names, last])
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].extend([int(last)] if last.isdigit() else [])
    return ", ".join(f"{name} {ranges(numbers)}".strip() for name, numbers in found)


def pipeline_lines(found: PipelineSolution, cluster: Cluster) -> Iterator[str]:
    """What is in flight, who is left out, and what goes over the links between stages."""
    price = found.predicted
    in_flight = ", ".join(map(str, price.in_flight))
    seconds = ", ".join(duration(times.round_s) for times in price.times)
    yield f"A round takes {seconds}; at most {in_flight} are in flight."
    if unused := unused_in(found, cluster):
        yield f"Left out: {named(cluster, unused)}. Start no ranks there."
    yield "shardhet train plan=file runs plans with stages (docs/limits.md)."
    for i, (hop, pair) in enumerate(zip(price.hops, pairwise(price.times), strict=True)):
        number = f"{hop.num_links} x " * (hop.num_links > 1)
        back = (
            f"{_mib(hop.back_bytes)} back: {duration(hop.seconds)} and {duration(hop.back_s)}"
        )
        if hop.back_bytes == hop.nbytes:
            back = f"as much back: {duration(hop.seconds)} each"
        yield (
            f"Stage {i} hands stage {i + 1} {_mib(hop.nbytes)} a round over "
            f"{number}{_gbit_per_s(hop.link):,.4g} Gbit/s, and gets {back}, beside rounds of "
            f"{duration(max(each.round_s for each in pair))}."
        )


def pipeline_proof(found: PipelineSolution, workload: Workload) -> str:
    """What was proven of the pipeline."""
    return (
        f"No plan in {workload.param_dtype}, with stages or without, is predicted to "
        f"be more than {ceil(100 * found.relative_gap)}% faster: the compute alone takes all "
        f"devices {duration(found.lower_bound_s)}. Cuts, rounds and rounds in flight were "
        "improved until no neighbour was faster; nothing proves that they are the best."
    )


def unused_in(found: PipelineSolution, cluster: Cluster) -> list[int]:
    """The positions of devices that no stage has."""
    return [i for i in range(cluster.world_size) if i not in found.places]


def _mib(nbytes: int) -> str:
    mib = nbytes / MIB
    return f"{mib:,.{0 if mib >= 10 else 2}f} MiB"


def beside_line(found: PipelineSolution, flat: PlanSolution | None) -> str:
    """What all devices reach without stages, where that is ``flat``; None: nothing fits."""
    if flat is None:
        return "Without stages no plan fits."
    flat_s = flat.predicted.step_time_s
    more = flat_s / found.step_time_s
    return f"Without stages: {duration(flat_s)} a step, {more:.2f} times as long."


def _gbit_per_s(link: Link) -> float:
    return link.bandwidth_bytes_per_s * 8 / 1e9
