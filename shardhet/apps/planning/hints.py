"""What a plan of another form may gain, said below a plan or beside why there is none."""

from dataclasses import replace

from shardhet.config.planning import Inputs, PlannerConf
from shardhet.planner import Demands, PlanSolution, solve
from shardhet.planner.stages.bound import seconds_per_sample

MUCH_OF_SPEEDS = 0.8  # of what devices compute together: with more, stages have little to gain


def stages_hint(inputs: Inputs, solution: PlanSolution) -> str | None:
    """What stages may gain over a plan without them; None if that is little."""
    setting = inputs.setting
    cluster, batch = setting.cluster, solution.plan.global_batch_size
    seconds = seconds_per_sample(setting, batch)
    kinds = [unit.kind for unit in setting.workload.units if unit.fqn]
    if cluster.world_size == 1 or len(kinds) < 2:
        return None
    samples_per_s = sum(
        1 / sum(map(seconds[device.kind].__getitem__, kinds)) for device in cluster.devices
    )
    part = batch / samples_per_s / solution.predicted.step_time_s
    if part >= MUCH_OF_SPEEDS:
        return None
    return (
        f"The devices reach {part:.0%} of what they would compute without links, and without "
        "computing anything twice. Stages, each of which holds a part of the model, may reach "
        "more: max_stages=4 looks for a pipeline."
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
