#!/usr/bin/env bash
# ortools==9.15.6755. Expected: CP-SAT takes objectives with float coefficients; OPTIMAL means that no better plan
# exists, or none within a relative tolerance, whatever the unit. Real: the objective is rounded to whole multiples of
# an absolute precision of about 1e-6. With costs of microseconds written in seconds all of them round to 0: the first
# plan found is called OPTIMAL, 80 % above the best. In milliseconds it is right. Only best_objective_bound shows it
# (0). Where another term of the objective is large, not even that does: 5.000027 for 5.000015, bound 5.0. Source: the
# parameters mip_wanted_precision and mip_max_activity_exponent of CP-SAT. Who is hurt: planners whose objective is a
# short time or a small probability.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check ortools==9.15.6755
fi
export OMP_NUM_THREADS=1
cat > "$work/check.py" <<'PY'
from itertools import permutations

from ortools.sat.python import cp_model

COST = [[4, 7, 3, 8], [6, 5, 9, 4], [8, 3, 7, 5], [5, 6, 4, 7]]
BEST = min(sum(COST[i][p[i]] for i in range(4)) for p in permutations(range(4)))


def assign(unit, beside):
    model = cp_model.CpModel()
    x = [[model.new_bool_var(f"{i},{j}") for j in range(4)] for i in range(4)]
    for i in range(4):
        model.add_exactly_one(x[i])
        model.add_exactly_one(row[i] for row in x)
    other = model.new_int_var(5, 100, "other")
    model.minimize(sum(COST[i][j] * unit * x[i][j] for i in range(4) for j in range(4)) + (1.0 * other if beside else 0.0))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL
    total = sum(COST[i][j] for i in range(4) for j in range(4) if solver.value(x[i][j]))
    print(f"unit {unit}, {'beside a term of 5' if beside else 'alone'}: OPTIMAL at {total}, best {BEST}, "
          f"objective {solver.objective_value:.8g}, bound {solver.best_objective_bound:.8g}")
    return total


for beside in (False, True):
    assert assign(1, beside) == assign(1e-3, beside) == BEST
    assert assign(1e-6, beside) > 1.2 * BEST
    assert assign(1e-8, beside) > 1.2 * BEST
PY
cd "$work"
"$py" check.py
