"""Sentences about a plan: its form, what was proven of it, and why it was preferred."""

from collections.abc import Iterator

from shardhet.apps.cli.quantities import counted
from shardhet.planner import Constraints, PlanSolution
from shardhet.planner.candidates.role_times import MAX_MICROBATCH_SIZE
from shardhet.planner.forms import FIRST_ROUNDS
from shardhet.planner.idle import active_positions
from shardhet.planner.preference import FULL
from shardhet.records.plan import EVERY_UNIT, Plan, is_matched
from shardhet.records.workload import Workload

SHOWN_GAP = 1e-4  # the least that is stated
GIB = 2**30
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
