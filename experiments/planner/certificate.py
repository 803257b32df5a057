"""Solve the whole problem a second time by HiGHS alone, if it is small enough.

Every device i takes one candidate c.  Let x_ic say whether it takes c, and s_i what it stores.
Then the problem of ``problem`` is linear:

    minimise    sum_d T_d + T_optimizer
    such that   T_d >= sum_c t_dc x_ic,      T_optimizer >= o_i s_i,
                s_i <= sum_c a_c x_ic,       sum_c x_ic = 1          for every device
                sum b_c x_ic = B,            sum s_i >= S,           x_ic in {0, 1}

It uses no bound, limit or choice of the search.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardhet.planner.problem.problem import Choice, Floats, Ints, Problem
from shardhet.planner.search.assignment import silenced

MAX_VARIABLES = 2_500
MAX_NODES = 50_000
SCALE = 1e4  # of the objective: HiGHS's gap of 1e-6 is absolute, and scipy cannot set it
AGREE = 1e-9  # relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What HiGHS says about a problem."""

    num_variables: int  # integer variables
    objective_s: float | None  # of its best choice, evaluated exactly; None: none found
    bound_s: float | None  # no choice is better; None: it did not begin
    is_solved: bool  # to optimality
    choices: tuple[Choice, ...] = ()

    def agrees_with(self, objective_s: float) -> bool:
        """Whether HiGHS's objective and the given one are equal up to rounding."""
        if self.objective_s is None:
            return False
        return abs(self.objective_s - objective_s) <= AGREE * objective_s


def certify(problem: Problem) -> Certificate:
    """Solve ``problem`` by HiGHS alone; deterministic."""
    columns = _Columns.of(problem)
    if columns.num_choices > MAX_VARIABLES:
        return Certificate(
            num_variables=columns.num_choices, objective_s=None, bound_s=None, is_solved=False
        )
    scale = SCALE / (sum(problem.least_phases_s()) + problem.least_optimizer_s or 1.0)
    solved = _programme(problem, columns, scale).minimise(
        columns, least_optimizer=problem.fixed_optimizer_s * scale
    )
    bound = solved.mip_dual_bound
    bound_s = None if bound is None else float(bound) / scale + problem.fixed_s
    choices: tuple[Choice, ...] = ()
    if solved.x is not None:
        taken = np.flatnonzero(solved.x[: columns.num_choices] > 1 / 2)  # zeros and ones
        pairs = np.stack((columns.group[taken], columns.candidate[taken]))
        pairs, number = np.unique(pairs, axis=1, return_counts=True)
        choices = tuple(
            Choice(int(g), int(c), int(n)) for (g, c), n in zip(pairs.T, number, strict=True)
        )
    value = problem.evaluate(choices) if choices else None
    return Certificate(
        num_variables=columns.num_choices,
        objective_s=None if value is None else value.objective_s,
        bound_s=bound_s,
        is_solved=solved.status == 0,
        choices=choices,
    )


@dataclass(frozen=True, slots=True)
class _Columns:
    """The order of the variables: x, then s in SCALE-ths of S, then T_d, then T_optimizer."""

    device: Ints  # [x]
    group: Ints  # [x]
    candidate: Ints  # [x]
    group_of_device: Ints
    num_phases: int

    @classmethod
    def of(cls, problem: Problem) -> "_Columns":
        """Columns for the candidates that are not dominated."""
        kept = [_undominated(problem, g) for g in range(len(problem.groups))]
        of_device = np.repeat(np.arange(len(problem.groups)), problem.counts.astype(np.int64))
        numbers = [len(kept[g]) for g in of_device]
        device = np.repeat(np.arange(len(of_device)), numbers)
        candidate = np.concatenate([kept[g] for g in of_device])
        return cls(device, of_device[device], candidate, of_device, problem.num_phases)

    @property
    def num_choices(self) -> int:
        """The number of x, which are integers; s begins after them."""
        return len(self.device)

    @property
    def phase(self) -> int:
        """The index where T_d begins."""
        return self.num_choices + len(self.group_of_device)

    @property
    def optimizer(self) -> int:
        """The index of T_optimizer, which is the last."""
        return self.phase + self.num_phases


@dataclass
class _Programme:
    """Rows of a linear programme, and the bounds of each."""

    entries: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(
        self, *parts: tuple[Ints, Ints, Floats], least: float = -np.inf, most: float = 0.0
    ) -> None:
        """Add rows from the (row, column, coefficient) of each part; rows count from 0."""
        number = 1 + max(int(rows.max()) for rows, _, _ in parts)
        first = len(self.low)
        self.entries += [(first + rows, columns, values) for rows, columns, values in parts]
        self.low += [least] * number
        self.high += [most] * number

    def minimise(self, columns: _Columns, *, least_optimizer: float) -> Any:
        """The result of ``scipy.optimize.milp``."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # imported here: slow
        from scipy.sparse import csr_array

        num_columns = columns.optimizer + 1
        rows, places, values = (np.concatenate(e) for e in zip(*self.entries, strict=True))
        shape = (len(self.low), num_columns)
        matrix = csr_array((values, (rows, places)), shape=shape)
        objective, integrality = np.zeros(num_columns), np.zeros(num_columns)
        objective[columns.phase :] = 1.0
        integrality[: columns.num_choices] = 1
        least, most = np.zeros(num_columns), np.full(num_columns, np.inf)
        most[: columns.num_choices] = 1.0
        least[columns.optimizer] = least_optimizer
        with silenced():
            return milp(
                objective,
                integrality=integrality,
                bounds=Bounds(least, most),
                constraints=LinearConstraint(matrix, self.low, self.high),
                options={"mip_rel_gap": 0.0, "node_limit": MAX_NODES},
            )


def _programme(problem: Problem, columns: _Columns, scale: float) -> _Programme:
    """The rows of the programme above, with seconds multiplied by ``scale``."""
    programme = _Programme()
    # In SCALE-ths of S, because HiGHS lets a row be off by 1e-6.
    num_devices, state = len(columns.group_of_device), (problem.state_numel or 1.0) / SCALE
    x, devices = np.arange(columns.num_choices), np.arange(num_devices)
    of_x = (columns.group, columns.candidate)
    stored, ones = devices + columns.num_choices, np.ones(num_devices)
    in_one_row = np.zeros(columns.num_choices, dtype=np.int64)
    programme.add((columns.device, x, np.ones(len(x))), least=1.0, most=1.0)
    for d in range(problem.num_phases):
        time = (devices, np.full(num_devices, columns.phase + d), -ones)
        programme.add((columns.device, x, problem.costs[d][of_x] * scale), time)
    per_numel = np.array([group.optimizer_s_per_numel for group in problem.groups])
    optimizer_s = per_numel[columns.group_of_device] * state * scale
    time = (devices, np.full(num_devices, columns.optimizer), -ones)
    programme.add((devices, stored, optimizer_s), time)
    programme.add((devices, stored, ones), (columns.device, x, -problem.room[of_x] / state))
    size = float(problem.global_batch_size)
    programme.add((in_one_row, x, problem.batch[of_x]), least=size, most=size)
    whole = problem.state_numel / state
    programme.add((devices * 0, stored, ones), least=whole, most=np.inf)
    return programme


def _undominated(problem: Problem, g: int) -> Ints:
    """Candidates of a group that no other one of the same batch beats in every respect."""
    group = problem.groups[g]
    kept = []
    for batch in np.unique(group.batch):
        same = np.flatnonzero(group.batch == batch)
        costs, room = group.costs[:, same], group.room[same]
        for i, index in enumerate(same):
            beats = (costs <= costs[:, [i]]).all(axis=0) & (room >= room[i])
            is_equal = (costs == costs[:, [i]]).all(axis=0) & (room == room[i])
            # Of equal candidates, the first stays.
            if not (beats & ~is_equal).any() and not is_equal[:i].any():
                kept.append(index)
    return np.array(kept, dtype=np.int64)
