"""What no plan can beat, with stages or without: the compute of all devices together.

A device takes at least its least seconds per sample for each unit that it computes, so with
x_ku the samples of units of kind u that all n_k devices of kind k compute,

    minimise T   such that   sum_u t_ku x_ku <= n_k T,   sum_k x_ku >= B n_u

Memory, links and the optimizer are left out.  For stages that are given, ``unit_rates`` says
how fast they are at best.
"""

from collections import Counter

import numpy as np
from scipy.optimize import linprog

from shardhet.planner.candidates.role_times import MAX_MICROBATCH_SIZE
from shardhet.pricing.priced import at_sizes
from shardhet.pricing.setting import Setting


def seconds_per_sample(setting: Setting, largest: int) -> dict[str | None, dict[str, float]]:
    """The least seconds per sample of forward and backward, by kind of device and of unit."""
    sizes = np.arange(1, 1 + min(largest, MAX_MICROBATCH_SIZE))
    found: dict[str | None, dict[str, float]] = {}
    counts = setting.workload.num_units_by_kind
    for kind in dict.fromkeys(device.kind for device in setting.cluster.devices):
        found[kind] = {}
        for name in (name for name, number in counts.items() if number):
            unit = setting.profile.unit(kind, name)
            both = at_sizes(unit.forward_s, len(sizes)) + at_sizes(unit.backward_s, len(sizes))
            found[kind][name] = float((both[1:] / sizes).min())
    return found


def least_step_s(setting: Setting, global_batch_size: int) -> float:
    """Seconds that every step takes at least."""
    least = seconds_per_sample(setting, global_batch_size)
    numbers = Counter(device.kind for device in setting.cluster.devices)
    units = {name: n for name, n in setting.workload.num_units_by_kind.items() if n}
    kinds = list(least)
    num_vars = len(kinds) * len(units) + 1
    rows, limits = [], []
    for i, kind in enumerate(kinds):
        row = np.zeros(num_vars)
        row[i * len(units) : (i + 1) * len(units)] = [least[kind][name] for name in units]
        row[-1] = -numbers[kind]
        rows.append(row)
        limits.append(0.0)
    for j, number in enumerate(units.values()):
        row = np.zeros(num_vars)
        row[j : num_vars - 1 : len(units)] = -1.0
        rows.append(row)
        limits.append(-float(global_batch_size * number))
    cost = np.zeros(num_vars)
    cost[-1] = 1.0
    found = linprog(cost, A_ub=np.array(rows), b_ub=np.array(limits), method="highs")
    return float(found.fun)
