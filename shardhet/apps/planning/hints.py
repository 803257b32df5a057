"""What a plan of another form may gain, said below a plan or beside why there is none."""

from dataclasses import replace

from shardhet.config.planning import Inputs, PlannerConf
from shardhet.planner import Demands, PlanSolution, solve
from shardhet.planner.stages.bound import together_s
from shardhet.pricing.derive import meets_over_gloo

MUCH_OF_SPEEDS = 0.8  # of what devices compute together: with more, stages have little to gain


def stages_hint(conf: PlannerConf, inputs: Inputs, solution: PlanSolution) -> str | None:
    """What stages may gain over a plan without them; None if that is little."""
    setting = inputs.setting
    num_units = sum(bool(unit.fqn) for unit in setting.workload.units)
    if setting.cluster.world_size == 1 or num_units < 2 or meets_over_gloo(setting.cluster):
        return None
    compute_s = together_s(setting, solution.plan.global_batch_size)
    part = compute_s / solution.predicted.step_time_s
    if part >= MUCH_OF_SPEEDS:
        return None
    beside = conf.refused_beside_stages()
    without = f", without {', '.join(beside)}" * bool(beside)
    return (
        f"The devices reach {part:.0%} of what they would compute without links, and without "
        "computing anything twice. Stages, each of which holds a part of the model, may reach "
        f"more: max_stages=4 looks for a pipeline{without}."
    )


def on_host_hint(conf: PlannerConf, inputs: Inputs, demands: Demands) -> str:
    """Whether a plan fits with inputs of units or optimizers in the memory of hosts."""
    if conf.objective == "largest_batch":
        return ""
    for also_inputs, also_optimizer in ((True, False), (False, True), (True, True)):
        wider = replace(
            demands,
            may_keep_inputs_on_host=demands.may_keep_inputs_on_host or also_inputs,
            may_keep_optimizer_on_host=demands.may_keep_optimizer_on_host or also_optimizer,
        )
        if wider == demands:
            continue
        try:
            found = solve(
                inputs.setting,
                global_batch_size=conf.global_batch_size,
                demands=wider,
                tolerance=conf.tolerance,
                is_bounded=False,
            )
        except ValueError:
            continue
        added = {
            "inputs_on_host=true": ("inputs of units", wider.may_keep_inputs_on_host),
            "optimizer_on_host=true": ("optimizers", wider.may_keep_optimizer_on_host),
        }
        return (
            f" With {' and '.join(what for what, is_on in added.values() if is_on)} in the "
            f"memory of hosts a plan fits ({' '.join(k for k in added if added[k][1])}): "
            f"{found.samples_per_s:.4g} samples/s."
        )
    return ""
