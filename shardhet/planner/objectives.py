"""Objectives of a plan other than the highest throughput.

``largest_batch``  the largest global batch that fits in one round, and its fastest plan
``least_memory``   the smallest fraction u of the memory budgets at a demanded throughput:
                   minimise u  such that  bytes_i <= u budget_i for all (or the given)
                   devices i,  samples per second >= the demanded throughput

The largest batch runs in microbatches of one sample, which need the least memory.  A device
that computes b samples and recomputes c has room for a_c - p_c b elements of the state.  So
for the n_c devices of a group that take choice c, only the sum B_c of their batches and the
sum s_c of their shares matter (choice 0 computes nothing):

    maximise    sum B_c
    such that   least_c n_c <= B_c <= most_c n_c,     sum_c n_c = N   for every group,
                low_c n_c <= s_c <= cap_c n_c,   s_c <= a_c n_c - p_c B_c,   sum s_c >= S

This is an integer programme whose size does not depend on the number of devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from shardhet.planner.candidates.recompute import recompute_choices
from shardhet.planner.find import NO_DEMANDS, solve
from shardhet.planner.problem.demands import Demands, Role, check_position
from shardhet.planner.problem.problem import Floats
from shardhet.planner.problem.solution import NoRoomForRowsError, PlanError, PlanSolution
from shardhet.planner.problem.state_numels import StateNumels
from shardhet.planner.search.search import DEFAULT_EFFORT, Effort
from shardhet.pricing.cost import CostModel
from shardhet.pricing.setting import Setting
from shardhet.records.plan import EVERY_UNIT, RankPlan

MEMORY_PRECISION = 1e-3  # of the budget fraction
LARGEST_SEARCHED_BATCH = 2**17  # candidates are listed by batch
KIB = 2**10
NUM_SMALLER_BATCHES = 8  # tried if the largest has no plan after rounding to rows
VARIABLES_PER_OPTION = 3  # devices, samples, share of the state


def largest_batch(
    setting: Setting,
    *,
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
) -> PlanSolution:
    """The fastest plan of the largest global batch that was found to fit in one round.

    Raises ``PlanError`` if none does, and ``ValueError`` if a plan may use memory of hosts.
    """
    demands.check(setting.cluster.world_size)
    if demands.may_keep_inputs_on_host or demands.may_keep_optimizer_on_host:
        raise ValueError(
            "plan: the largest batch is known only of plans that keep nothing on hosts. Leave "
            "may_keep_inputs_on_host and may_keep_optimizer_on_host out."
        )
    demands = replace(demands, max_rounds=1)
    largest = largest_batch_size(CostModel(setting), demands)
    if largest > LARGEST_SEARCHED_BATCH:
        model = CostModel(setting)
        per_sample = model.bytes_per_sample(_recomputing(EVERY_UNIT, model))
        raise PlanError(
            f"plan: memory does not limit the batch. A sample needs {per_sample / KIB:,.0f} "
            f"KiB on a device that recomputes everything, so more than "
            f"{LARGEST_SEARCHED_BATCH:,} fit at once, and plans are not searched beyond. Give "
            "global_batch_size and take objective=throughput."
        )
    missed: PlanError | None = None
    stated = sum(demands.rank_batch_size(i) or 0 for i in range(setting.cluster.world_size))
    first, last = max(1, largest, stated), max(1, largest - NUM_SMALLER_BATCHES + 1, stated)
    for batch_size in range(first, last - 1, -1):
        try:
            return solve(
                setting,
                global_batch_size=batch_size,
                demands=demands,
                effort=effort,
            )
        except PlanError as error:
            missed = missed or error
    assert missed is not None
    raise missed


@dataclass(frozen=True, slots=True)
class Option:
    """What a device of a group may do, in microbatches of one sample."""

    group: int
    num_members: int  # devices in each set of equal devices
    least: float  # samples on a device
    most: float
    rooms: tuple[tuple[float, float], ...]  # by moment: room without samples, and less for each
    least_numel: float  # of state on a device
    cap_numel: float


def largest_batch_size(model: CostModel, demands: Demands, *, has_rows: bool = True) -> int:
    """The most samples that fit at once besides the state; 0 if not even one does.

    Shares leave room to be rounded to rows; unless ``has_rows``, no batch is larger.
    """
    bundles: dict[tuple[int, tuple[Role, ...]], int] = {}
    all_roles = demands.roles(model.cluster)
    for positions in demands.bundles(model.cluster.world_size):
        roles = tuple(dict.fromkeys(all_roles[i] for i in positions))
        bundles[len(positions), roles] = bundles.get((len(positions), roles), 0) + 1
    listing = _OptionList(model, demands, has_rows=has_rows)
    options = [
        option
        for g, (size, roles) in enumerate(bundles)
        for option in listing.of_group(g, size, roles)
    ]
    if len({option.group for option in options}) < len(bundles):
        return 0
    return most_samples(options, list(bundles.values()))


def most_samples(options: Sequence[Option], counts: Sequence[int]) -> int:
    """The optimum of the programme, with so many sets of equal devices in each group."""
    from scipy.optimize import LinearConstraint, milp  # imported here: rarely needed

    rows, low, high = _constraints(options, counts)
    samples, integral = np.zeros(rows.shape[1]), np.ones(rows.shape[1])
    samples[1::VARIABLES_PER_OPTION] = [option.num_members for option in options]
    integral[2::VARIABLES_PER_OPTION] = 0
    solved = milp(
        -samples,
        constraints=LinearConstraint(rows, low, high),
        integrality=integral,
        options={"mip_rel_gap": 0.0},
    )
    return 0 if solved.x is None else round(float(samples @ solved.x))


def _constraints(
    options: Sequence[Option], counts: Sequence[int]
) -> tuple[Floats, Floats, Floats]:
    """Rows of the programme over (n, B, s) of every option, and their lower and upper bounds.

    Shares and rooms are in units of the least that a sample takes: HiGHS breaks rows by up to
    1e-6 and drops coefficients of 1e-9 and less (scipy 1.17).
    """
    rooms = [room for option in options for room in option.rooms]
    unit = max(
        min((per_sample for _, per_sample in rooms if per_sample), default=1.0),
        1e-7 * max(start for start, _ in rooms),  # lest the rooms themselves become too large
    )
    num_columns = VARIABLES_PER_OPTION * len(options)
    in_group, stored = np.zeros((len(counts), num_columns)), np.zeros((1, num_columns))
    at_most_zero = []
    for i, option in enumerate(options):
        n, b, s = (VARIABLES_PER_OPTION * i + k for k in range(VARIABLES_PER_OPTION))
        in_group[option.group, n] = 1.0
        stored[0, s] = option.num_members
        for terms in (
            {n: option.least, b: -1.0},
            {n: -option.most, b: 1.0},
            {n: option.least_numel / unit, s: -1.0},
            {n: -option.cap_numel / unit, s: 1.0},
            *(
                {n: -start / unit, b: per_sample / unit, s: 1.0}
                for start, per_sample in option.rooms
            ),
        ):
            row = np.zeros(num_columns)
            row[list(terms)] = list(terms.values())
            at_most_zero.append(row)
    rows = np.concatenate((in_group, stored, np.array(at_most_zero)))
    number, zeros = np.array(counts, dtype=np.float64), np.zeros(len(at_most_zero))
    low = np.concatenate((number, [1.0 / unit], zeros - inf))
    return rows, low, np.concatenate((number, [inf], zeros))


class _OptionList:
    """Lists what devices may do; elements are in units of the whole state."""

    def __init__(self, model: CostModel, demands: Demands, *, has_rows: bool) -> None:
        self._model = model
        self._choices = recompute_choices(model, DEFAULT_EFFORT.recompute_steps)
        self._state = StateNumels.of(model, demands)
        # An even share is known to the row.
        self._row_numel = self._state.row if has_rows and self._state.even is None else 0.0

    def of_group(self, group: int, size: int, roles: Sequence[Role]) -> Iterator[Option]:
        """Idle, then every recompute choice that all roles allow and that fits."""
        stated = [role.limits.rank_batch_size for role in roles]
        fixed = {each for each in stated if each is not None}
        claims = {role.limits.recomputes for role in roles} - {None}
        choices = self._choices
        if claims:
            choices = (choices[-1] if True in claims else choices[0],)
        for patterns in (None, *choices):
            rooms = [each for role in roles for each in self._rooms(role, patterns)]
            least, most = (0, 0) if patterns is None else (1, self._most(rooms))
            if fixed:
                most = min(most, *fixed)
                least = max(least, *fixed)
            start = min(each for each, _ in rooms)
            if least <= most and start >= (self._state.even or 0.0):
                yield Option(
                    group,
                    size,
                    least,
                    most,
                    tuple(
                        (
                            max(0.0, own - self._row_numel) / self._state.whole,
                            per_sample / self._state.whole,
                        )
                        for own, per_sample in rooms
                    ),
                    max(role.limits.state_share or 0.0 for role in roles),
                    min(self._cap_numel(role) for role in roles) / self._state.whole,
                )

    def _rooms(
        self, role: Role, patterns: tuple[str, ...] | None
    ) -> Iterator[tuple[float, float]]:
        """Room for state without samples, and how much less it is for each sample, in the
        moments of an idle (None) or of a computing device.
        """
        model, kind = self._model, role.device_kind
        if patterns is None:
            left = role.budget_bytes - model.profile.device(kind).reserved_bytes
            yield left / model.bytes_per_stored_numel, 0.0
            return
        rank = _recomputing(patterns, model)
        samples = iter(model.moments(rank).sample_bytes.tolist())
        for own, per_numel in model.lines(rank, kind, np.array([0]), np.array([1])):
            pairs = zip(own[:, 0].tolist(), per_numel[:, 0].tolist(), strict=True)
            for own_bytes, of_numel in pairs:
                yield (role.budget_bytes - own_bytes) / of_numel, next(samples) / of_numel

    def _most(self, rooms: Sequence[tuple[float, float]]) -> int:
        """The most samples that leave room, for the even share if that is demanded."""
        most = 2 * LARGEST_SEARCHED_BATCH
        for start, slope in rooms:
            room = start - (self._state.even or 0.0)
            if room < 0:
                return 0
            most = min(most, int(room / slope)) if slope else most
        return most

    def _cap_numel(self, role: Role) -> float:
        """The most elements that a device may store: all of the state, or a demanded share."""
        if self._state.even is not None:
            return self._state.even
        limits = role.limits
        shares = [
            each for each in (limits.max_state_share, limits.state_share) if each is not None
        ]
        return self._state.whole * min(shares, default=1.0)


def _recomputing(patterns: tuple[str, ...], model: CostModel) -> RankPlan:
    tiled = EVERY_UNIT if model.may_tile else ()
    return RankPlan(
        microbatch_sizes=(), state_share=0.0, recomputed_units=patterns, tiled_units=tiled
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """A plan with a bound on how little memory any plan needs."""

    solution: PlanSolution
    budget_fraction: float  # u: no counted device uses more than this part of its budget
    lower_bound: float  # no plan with the demanded throughput has a smaller u


def least_memory(
    setting: Setting,
    *,
    global_batch_size: int,
    min_samples_per_s: float,
    devices: Sequence[int] = (),
    demands: Demands = NO_DEMANDS,
    effort: Effort = DEFAULT_EFFORT,
) -> LeastMemory:
    """The plan whose fullest device is least full, among those that are fast enough.

    Only ``devices`` (positions) count, or all if it is empty; the others may fill their
    budgets.  Raises ``PlanError`` if even the fastest plan is too slow.
    """
    demands.check(setting.cluster.world_size)
    for i in devices:
        check_position("devices", i, setting.cluster.world_size)
    spared = devices or range(setting.cluster.world_size)
    budgets = [
        demands.budget_bytes(setting.cluster, i) for i in range(setting.cluster.world_size)
    ]

    def solved(fraction: float) -> PlanSolution:
        return solve(
            setting,
            global_batch_size=global_batch_size,
            demands=demands.with_budgets({i: int(fraction * budgets[i]) for i in spared}),
            effort=effort,
        )

    def fraction_of(solution: PlanSolution) -> float:
        ranks = solution.predicted.ranks
        return max(ranks[i].memory.total_bytes / max(1, budgets[i]) for i in spared)

    def attempt(fraction: float) -> tuple[PlanSolution | None, bool]:
        """A plan that is fast enough, if one was found, and whether none can exist."""
        try:
            found = solved(fraction)
        except PlanError as error:
            return None, not isinstance(error, NoRoomForRowsError)
        if found.samples_per_s >= min_samples_per_s:
            return found, False
        return None, found.lower_bound_s > global_batch_size / min_samples_per_s

    best = solved(1.0)
    if best.samples_per_s < min_samples_per_s:
        raise PlanError(
            f"plan: {min_samples_per_s:.6g} samples/s are demanded but the fastest plan "
            f"reaches {best.samples_per_s:.6g}. Lower the throughput that is demanded."
        )
    high, low, proven = fraction_of(best), 0.0, 0.0
    while high - low > MEMORY_PRECISION:
        middle = (low + high) / 2
        found, is_impossible = attempt(middle)
        if found is not None:
            best, high = found, fraction_of(found)
        else:
            low, proven = middle, middle if is_impossible else proven
    while low - proven > MEMORY_PRECISION:  # neither found nor impossible in between
        middle = (proven + low) / 2
        if attempt(middle)[1]:
            proven = middle
        else:
            low = middle
    solution = replace(best, predicted=best.predicted.within(budgets))
    return LeastMemory(solution=solution, budget_fraction=high, lower_bound=proven)
