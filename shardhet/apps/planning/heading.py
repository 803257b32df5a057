"""What ``shardhet plan`` says before it plans; known without the planner."""

from collections.abc import Iterator

from shardhet.apps.cli.quantities import counted
from shardhet.config.planning import Inputs, PlannerConf
from shardhet.records.profiles import Source


def heading(conf: PlannerConf, inputs: Inputs) -> Iterator[str]:
    """What is planned for, and where the times come from."""
    workload, cluster = inputs.scenario.workload, inputs.scenario.cluster
    kinds = len({device.kind for device in cluster.devices})
    tokens = workload.tokens_per_sample
    frozen = workload.trained_numel < workload.numel
    trained = f" ({workload.trained_numel:,} trained)" if frozen else ""
    yield (
        f"{inputs.name}: {workload.numel:,} parameters{trained} in "
        f"{len(workload.units)} units, "
        f"{workload.param_dtype}; {counted(cluster.world_size, 'device')} of "
        f"{counted(kinds, 'kind')}; a step is "
        f"{counted(conf.global_batch_size, 'sample')}"
        + (f" of {tokens:,} tokens" if tokens > 1 else "")
    )
    yield source_line(inputs)


def source_line(inputs: Inputs) -> str:
    """Whether figures were measured, as far as the profile knows."""
    profile = inputs.scenario.profile
    sources = {device.source for device in profile.devices}
    if Source.DERIVED in sources:
        assumed = inputs.scenario.cluster.assumed
        return " ".join([f"Times are {profile.note}; they were not measured.", assumed]).strip()
    if profile.collectives.source is Source.DERIVED:
        return f"Times were measured, but collectives are {profile.collectives.note}."
    sources.add(profile.collectives.source)
    return "Times were measured." if sources == {Source.MEASURED} else "Times were imported."
