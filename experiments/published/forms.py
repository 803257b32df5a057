"""Five forms of plan for one case, and what each is predicted to give."""

from dataclasses import dataclass, replace
from math import inf

from experiments.planner.cephalo import cephalo
from experiments.published.inputs import (
    DERIVED,
    FEWER_BATCH,
    Case,
    derived_beside,
    on_fewer_nodes,
)
from shardhet.apps.plan import COMPARED
from shardhet.config.planning import Inputs
from shardhet.planner import PlanError, solve
from shardhet.planner.baselines import compute_only, even, memory_only
from shardhet.pricing.cost import CostModel
from shardhet.pricing.step_cost import StepCost
from shardhet.records.plan import Plan
from shardhet.simulator.simulation import simulate

EVEN, COMPUTE_ONLY, MEMORY_ONLY = "even", "compute only", "memory only"
CEPHALO, FULL = "Cephalo's", "full"
BY_SPECIFICATION = "full, planned from specifications"
FEWER_NODES = "full, on the best choice of nodes but all"
BASELINES = {EVEN: even, COMPUTE_ONLY: compute_only, MEMORY_ONLY: memory_only}
FORMS = (EVEN, COMPUTE_ONLY, MEMORY_ONLY, CEPHALO, FULL)
ONE_SIDED = (COMPUTE_ONLY, MEMORY_ONLY)
ALL_HOSTS = "all"
DIGITS = 6  # significant ones that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one form gives for one case; zeros where no plan of the form fits."""

    part: str
    cluster: str
    num_devices: int
    model: str
    num_params: int
    param_dtype: str
    tokens_per_sample: int
    global_batch_size: int
    form: str
    hosts: str = ALL_HOSTS  # types of node that are used
    predicted_step_time_s: float = 0.0
    predicted_samples_per_s: float = 0.0
    mfu: float = 0.0  # model FLOPs, nothing recomputed, over the peak of all devices
    simulated_step_time_s: float = 0.0
    lower_bound_s: float = 0.0  # of the step of any plan of the form; 0: not known
    links_part: float = 0.0  # of the step: turns that last as long as the links need
    memory_part: float = 0.0  # of its budget, of the fullest device
    num_computing: int = 0
    why_not: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.predicted_step_time_s > 0


@dataclass(frozen=True, slots=True)
class _Found:
    plan: Plan
    lower_bound_s: float


def predict(case: Case, inputs: Inputs) -> list[Row]:
    """One row per form."""
    forms = [*FORMS, BY_SPECIFICATION] if case.part != DERIVED else list(FORMS)
    rows = [_row(case, inputs, form) for form in forms]
    if case.part == DERIVED and case.global_batch_size == FEWER_BATCH:
        rows += _fewer_nodes(case)
    return rows


def _fewer_nodes(case: Case) -> list[Row]:
    """The fastest plan that leaves types of node out; nothing where none fits."""
    best_s, best = inf, None
    for hosts, inputs in on_fewer_nodes(case):
        try:
            found = solve(
                inputs.setting,
                global_batch_size=case.global_batch_size,
                effort=COMPARED,
            )
        except PlanError:
            continue
        if found.predicted.step_time_s < best_s:
            best_s, best = found.predicted.step_time_s, (hosts, inputs)
    if best is None:
        return []
    row = _row(case, best[1], FULL)
    return [replace(row, form=FEWER_NODES, hosts=best[0])]


def _row(case: Case, inputs: Inputs, form: str) -> Row:
    workload = inputs.setting.workload
    row = Row(
        part=case.part,
        cluster=case.cluster,
        num_devices=inputs.setting.cluster.world_size,
        model=case.model,
        num_params=workload.numel,
        param_dtype=workload.param_dtype,
        tokens_per_sample=workload.tokens_per_sample,
        global_batch_size=case.global_batch_size,
        form=form,
    )
    try:
        found = _find(case, inputs, form)
        cost = CostModel(inputs.setting).predict(found.plan)
    except PlanError as error:
        return replace(row, why_not=str(error).removeprefix("plan: "))
    samples_per_s = case.global_batch_size / cost.step_time_s
    return replace(
        row,
        predicted_step_time_s=_short(cost.step_time_s),
        predicted_samples_per_s=_short(samples_per_s),
        mfu=_short(mfu(inputs, samples_per_s)),
        simulated_step_time_s=_short(simulate(found.plan, inputs.setting).step_time_s),
        lower_bound_s=_short(found.lower_bound_s),
        links_part=_short(links_part(cost)),
        memory_part=_short(
            max(rank.memory.total_bytes / rank.memory_budget_bytes for rank in cost.ranks)
        ),
        num_computing=sum(rank.rank_batch_size > 0 for rank in found.plan.ranks),
    )


def _find(case: Case, inputs: Inputs, form: str) -> _Found:
    setting, batch = inputs.setting, case.global_batch_size
    if form == CEPHALO:
        return _Found(cephalo(setting, global_batch_size=batch), 0.0)
    if form == BY_SPECIFICATION:
        guess = replace(setting, profile=derived_beside(case).setting.profile)
        return _Found(solve(guess, global_batch_size=batch).plan, 0.0)
    if form == FULL:
        solution = solve(setting, global_batch_size=batch)
    else:
        solution = BASELINES[form](setting, global_batch_size=batch, effort=COMPARED)
    return _Found(solution.plan, solution.lower_bound_s)


def mfu(inputs: Inputs, samples_per_s: float) -> float:
    """Model FLOPs per second over what all devices promise in the dtype of compute."""
    workload, cluster = inputs.setting.workload, inputs.setting.cluster
    flops = sum(
        number * (kind.forward_flops + kind.backward_flops)
        for name, number in workload.num_units_by_kind.items()
        for kind in [workload.kind_by_name[name]]
    )
    peak = sum(cluster.kind(each.kind).peak(workload.param_dtype) for each in cluster.devices)
    return samples_per_s * flops / peak


def links_part(cost: StepCost) -> float:
    """The part of a step in which compute does not set the pace."""
    paced_s = sum(turn.seconds for turn in cost.turns if turn.is_paced_by_links)
    return (paced_s + cost.exposed_comm_s) / cost.step_time_s


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
