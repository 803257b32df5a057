"""Which device stores which matrices whole, under a plan whose batches are known.

With N_s matrices of shape s, of m_s elements and w_s operations, and devices d with room for
r_d elements, which take p_d seconds per operation and o_d per element,

    minimise    T
    such that   sum_s (w_s p_d + m_s o_d) n_sd + o_d c_d <= T
                sum_s m_s n_sd + c_d <= r_d,   sum_d n_sd = N_s,   sum_d c_d = C

n_sd are whole numbers; c_d are elements of what is cut by rows.  The bound is the best of
three: that of the relaxation, of the relaxation in which no device has more of one shape than
it could have of that shape alone, and of the integer programme, which gets ``MOST_S`` seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardhet.planner.problem.constraints import NO_LIMITS, Constraints
from shardhet.planner.problem.solution import PlanError, PlanSolution
from shardhet.planner.search.assignment import silenced
from shardhet.planner.task import TOO_SLOW
from shardhet.pricing.cost import CostModel
from shardhet.pricing.matrices import (
    Matrices,
    operations,
    seconds_per_operation,
    trained_matrices,
)
from shardhet.records.layout import Owned
from shardhet.records.plan import Plan, is_matched

Floats = NDArray[np.float64]

MOST_S = 2.5  # of the integer programme, that it may take
GAP = 0.005  # relative, of assignments that are good enough
MAX_TRIES = 8  # with less room where memory was too full
PARTS = (1.0, 0.98, 0.95, 0.9, 0.8, 0.65)  # of budgets, for which batches are planned


@dataclass(frozen=True)
class OwnersProblem:
    """Matrices of few shapes, and devices."""

    numels: Floats  # [S] elements
    numbers: Floats  # [S]
    seconds: Floats  # [S, D] of the optimizer's step
    room: Floats  # [D] elements
    seconds_per_numel: Floats  # [D] of what is cut by rows
    cut_numel: float


@dataclass(frozen=True)
class Owners:
    """An assignment, and a time that none can beat."""

    numbers: Floats  # [S, D]
    cut: Floats  # [D] elements of what is cut by rows
    optimizer_s: float
    bound_s: float


def assigned(problem: OwnersProblem) -> Owners | None:
    """Matrices to devices, so that the slowest optimizer is fast; None if nothing fits."""
    programme = _Programme(problem)
    relaxed = programme.solve(inf)
    if relaxed is None:
        return None
    greedy = _greedily(problem)
    most_s = inf if greedy is None else greedy.optimizer_s
    bound_s = max(relaxed.fun, programme.bound_s(relaxed.fun, most_s))
    if greedy is None or most_s > (1 + GAP) * bound_s:
        found = programme.solve(most_s, bound_s, is_whole=True)
        if found is not None:
            bound_s = max(bound_s, found.mip_dual_bound or 0.0)
            if found.x is not None and found.fun < most_s:
                return programme.owners(found, bound_s)
    return None if greedy is None else replace(greedy, bound_s=min(bound_s, most_s))


def _greedily(problem: OwnersProblem) -> Owners | None:
    """The slowest first, each to the device that is then done first."""
    of = problem
    number = len(of.room)
    found, busy, used = np.zeros(of.seconds.shape), np.zeros(number), np.zeros(number)
    for s in np.argsort(-of.seconds.min(axis=1)):
        for _ in range(int(of.numbers[s])):
            done = np.where(used + of.numels[s] <= of.room, busy + of.seconds[s], inf)
            d = int(done.argmin())
            if done[d] == inf:
                return None
            found[s, d] += 1
            busy[d] = done[d]
            used[d] += of.numels[s]
    per_numel, left = np.maximum(of.seconds_per_numel, 1e-30), of.room - used
    low, high = 0.0, float(busy.max() + of.cut_numel * per_numel.max())
    for _ in range(100):
        middle = (low + high) / 2
        fits = np.clip((middle - busy) / per_numel, 0, left).sum() >= of.cut_numel
        low, high = (low, middle) if fits else (middle, high)
    cut = np.clip((high - busy) / per_numel, 0, left)
    if cut.sum() < of.cut_numel * (1 - 1e-9):
        return None
    cut *= of.cut_numel / cut.sum() if cut.any() else 1.0
    return Owners(found, cut, float((busy + cut * of.seconds_per_numel).max()), 0.0)


class _Programme:
    """The programme; its columns are n_sd, c_d in units of all elements, and T."""

    def __init__(self, problem: OwnersProblem) -> None:
        from scipy.sparse import bmat, csr_array, eye_array, kron  # imported here, as below

        self._of = of = problem
        num_shapes, num = of.seconds.shape
        self._whole = float(of.numels @ of.numbers) + of.cut_numel
        self._scale_s = float(of.seconds.max(initial=0.0)) or 1.0
        one = csr_array(np.ones((1, num)))
        busy = np.concatenate([np.diag(each) for each in of.seconds / self._scale_s], axis=1)
        of_cut = np.diag(of.seconds_per_numel * (self._whole / self._scale_s))
        stored = kron(of.numels[None] / self._whole, eye_array(num))
        self._matrix = bmat(
            [
                [csr_array(busy), csr_array(of_cut), csr_array(-np.ones((num, 1)))],
                [stored, eye_array(num), None],
                [kron(eye_array(num_shapes), one), None, None],
                [None, one, None],
            ],
            format="csr",
        )
        equal = np.append(of.numbers, of.cut_numel / self._whole)
        self._high = np.concatenate([np.zeros(num), of.room / self._whole, equal])
        self._low = np.concatenate([np.full(2 * num, -inf), equal])

    def solve(self, most_s: float, min_s: float = 0.0, *, is_whole: bool = False) -> Any | None:
        """The least T within these limits, in seconds; None if there is none."""
        from scipy.optimize import (  # imported here: half a second
            Bounds,
            LinearConstraint,
            milp,
        )

        of, num = self._of, len(self._of.room)
        most = np.repeat(of.numbers[:, None], num, axis=1)
        if most_s < inf:
            fitting = np.floor(most_s / np.maximum(of.seconds, 1e-30) + 1e-6)
            most = np.minimum(most, np.minimum(fitting, of.room // of.numels[:, None]))
        columns = most.size + num + 1
        high = np.concatenate([most.ravel(), np.full(num, inf), [most_s / self._scale_s]])
        low = np.append(np.zeros(columns - 1), min_s / self._scale_s)
        whole = np.append(np.ones(most.size), np.zeros(num + 1))
        options = {"time_limit": MOST_S, "mip_rel_gap": GAP} if is_whole else {}
        with silenced():
            found = milp(
                np.append(np.zeros(columns - 1), 1.0),
                constraints=LinearConstraint(self._matrix, self._low, self._high),
                bounds=Bounds(low, high),
                integrality=whole if is_whole else None,
                options=options,
            )
        if found.x is None and not is_whole:
            return None
        for key in ("fun", "mip_dual_bound"):
            if found.get(key) is not None:
                found[key] = float(found[key]) * self._scale_s
        return found

    def bound_s(self, min_s: float, most_s: float) -> float:
        """The least T at which the relaxation fits, with what fits of each shape alone."""
        tries = 12 if most_s < inf else 0
        for _ in range(tries):
            middle = (min_s * most_s) ** 0.5
            if self.solve(middle) is None:
                min_s = middle
            else:
                most_s = middle
        return min_s

    def owners(self, found: Any, bound_s: float) -> Owners:
        """The assignment of a solution."""
        shape = self._of.seconds.shape
        numbers = np.rint(found.x[: shape[0] * shape[1]]).reshape(shape)
        cut = np.maximum(0.0, found.x[numbers.size : -1]) * self._whole
        return Owners(numbers, cut, found.fun, bound_s)


def owned_batches(
    batches: Callable[[Constraints], PlanSolution],
    prices: CostModel,
    constraints: Constraints,
    cutoff_s: float,
) -> PlanSolution:
    """The plan with whole matrices; the fastest batches beside which they fit.

    A step is its turns, and then the slowest optimizer: batches and owners meet in memory only.
    So batches are planned for all of the budgets, and for less of them while owners do not fit.
    """
    budgets, bound_s, why_none = constraints.budgets(prices.cluster), 0.0, PlanError(TOO_SLOW)
    rows = replace(constraints, whole_matrices=())
    for part in PARTS:
        less = {i: int(part * budget) for i, budget in enumerate(budgets)}
        try:
            solution = batches(rows.with_budgets(less) if part < 1 else rows)
            bound_s = bound_s or solution.lower_bound_s
            found = with_owners(solution, prices, constraints)
        except PlanError as error:
            if not bound_s:
                raise
            why_none = error
            continue
        if found.predicted.step_time_s > cutoff_s:
            raise PlanError(TOO_SLOW)
        return replace(found, lower_bound_s=bound_s, fastest_s=None)
    raise why_none


def with_owners(
    solution: PlanSolution, model: CostModel, constraints: Constraints
) -> PlanSolution:
    """The plan with the whole matrices that are demanded.

    Batches and what is recomputed stay; state is stored anew, within the room beside them.
    The time is that of Muon (``pricing.matrices``).  Raises ``PlanError`` if nothing fits.
    """
    model = model.for_plan(solution.plan)
    plan, budgets = solution.plan, constraints.budgets(model.cluster)
    shapes = _shapes(model, constraints)
    if not shapes:
        nothing = Owners(np.zeros((0, plan.world_size)), np.array(plan.state_shares), 0.0, 0.0)
        plan = _owned_plan(plan, shapes, nothing, constraints.whole_matrices)
        predicted = model.predict(plan).within(budgets)
        return replace(solution, plan=plan, predicted=predicted)
    room, per_numel = _room(solution, model, constraints)
    alike: dict[object, list[int]] = {}
    for i, rank in enumerate(plan.ranks):
        look = rank.device, rank.microbatch_sizes, rank.recomputed_units, budgets[i]
        alike.setdefault(look, []).append(i)
    for _ in range(MAX_TRIES):
        found = assigned(_problem(model, plan, shapes, np.maximum(room, 0.0)))
        if found is None:
            break
        whole = _owned_plan(plan, shapes, found, constraints.whole_matrices)
        predicted = model.predict(whole).within(budgets)
        stored = np.array([each.stored_numel for each in predicted.ranks], dtype=np.float64)
        total = np.array([float(each.memory.total_bytes) for each in predicted.ranks])
        over = np.maximum(0.0, total - budgets) / per_numel
        if not over.any():
            return replace(
                solution, plan=whole, predicted=predicted, optimizer_bound_s=found.bound_s
            )
        lower = np.where(over > 0, stored - over - 1, room)
        for same in alike.values():  # or the next assignment would be over on another of them
            room[same] = lower[same].min()
    raise PlanError(
        f"plan: matrices of shape {max(shapes, key=prod)} do not fit whole beside the "
        "batches of the plan. Leave out whole_matrices, or plan for a smaller batch."
    )


def _room(
    solution: PlanSolution, model: CostModel, constraints: Constraints
) -> tuple[Floats, Floats]:
    """Elements that each device has room for beside its batch, and bytes of each."""
    ranks, costs = solution.plan.ranks, solution.predicted.ranks
    budgets = constraints.budgets(model.cluster)
    per_numel = np.array([model.bytes_per_numel_range(rank)[1] for rank in ranks])
    used = np.array([float(cost.memory.total_bytes) for cost in costs])
    stored = np.array([float(cost.stored_numel) for cost in costs])
    takes_part = [bool(rank.microbatch_sizes) or rank.state_share > 0 for rank in ranks]
    shares = [
        1.0 if (most := constraints.limits.get(i, NO_LIMITS).max_state_share) is None else most
        for i in range(len(ranks))
    ]
    room = np.minimum(
        stored + (budgets - used) / per_numel, np.array(shares) * model.workload.numel
    )
    return np.where(takes_part, room, 0.0), per_numel


def _shapes(model: CostModel, constraints: Constraints) -> Matrices:
    """The matrices of the units, by shape; a stage may have none."""
    found = Matrices()
    for unit in model.workload.units:
        if is_matched(unit.fqn, constraints.whole_matrices):
            kind = model.workload.kind_of(unit)
            found.update(kind.param_shapes[i] for i in trained_matrices(kind))
    if not found and not constraints.has_one_level:
        raise PlanError(
            "plan: whole_matrices, but no unit that is named as in "
            f"{list(constraints.whole_matrices)} has matrices that are trained. Leave it out."
        )
    return found


def _problem(model: CostModel, plan: Plan, shapes: Matrices, room: Floats) -> OwnersProblem:
    kinds = [rank.device.kind for rank in plan.ranks]
    per_operation = {
        kind: seconds_per_operation(model.profile, model.workload, kind) for kind in set(kinds)
    }
    per_numel = {
        kind: model.profile.device(kind).optimizer_seconds_per_element for kind in set(kinds)
    }
    numels = np.array([float(np.prod(shape)) for shape in shapes])
    operating = np.array([operations(shape) for shape in shapes])
    p, o = (np.array([of[kind] for kind in kinds]) for of in (per_operation, per_numel))
    numbers = np.array([float(number) for number in shapes.values()])
    return OwnersProblem(
        numels=numels,
        numbers=numbers,
        seconds=operating[:, None] * p + numels[:, None] * o,
        room=room,
        seconds_per_numel=o,
        cut_numel=float(model.workload.numel - numels @ numbers),
    )


def _owned_plan(plan: Plan, shapes: Matrices, found: Owners, units: tuple[str, ...]) -> Plan:
    numels = np.array([float(np.prod(shape)) for shape in shapes])
    stored = numels @ found.numbers + found.cut
    shares = (stored / stored.sum()).tolist()
    ranks = tuple(
        replace(
            rank,
            state_share=shares[i],
            owned=tuple(
                Owned(shape=shape, number=int(number))
                for shape, number in zip(shapes, found.numbers[:, i], strict=True)
                if number
            ),
        )
        for i, rank in enumerate(plan.ranks)
    )
    return replace(plan, ranks=ranks, whole_matrices=units)
