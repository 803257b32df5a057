"""What ``shardhet plan max_stages=N`` says of a pipeline, and of other uses of the devices."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from math import ceil

from shardhet.apps.cli.quantities import MIB, duration
from shardhet.apps.planning.fewer_devices import named, ranges
from shardhet.config.planning import Inputs, PlannerConf
from shardhet.planner import Constraints, PlanSolution
from shardhet.planner.stages.find import find_pipeline
from shardhet.planner.stages.solution import PipelineSolution
from shardhet.records.cluster import Cluster, Link
from shardhet.records.workload import Workload


def pipeline_below(
    conf: PlannerConf, inputs: Inputs, constraints: Constraints, cutoff_s: float
) -> PipelineSolution | None:
    """A pipeline whose step is shorter than this; None if none was found."""
    found = find_pipeline(
        inputs.setting,
        global_batch_size=conf.global_batch_size,
        smaller=conf.part_of(inputs),
        max_stages=conf.max_stages,
        constraints=constraints,
        tolerance=conf.tolerance,
        cutoff_s=cutoff_s,
    )
    return None if found is None or found.step_time_s >= cutoff_s else found


def units_in_short(fqns: Sequence[str], of_model: Sequence[str]) -> str:
    """Units in few words: ``embed, layers 0-17``, without what all names begin with."""
    paths = [fqn.split(".") for fqn in of_model if fqn]
    by_place = zip(*(path[:-1] for path in paths), strict=False)
    num_shared = len([*takewhile(lambda names: len(set(names)) == 1, by_place)])
    while num_shared and any(path[num_shared].isdigit() for path in paths):
        num_shared -= 1  # "layers" says what the numbers are of
    found: list[tuple[str, list[int]]] = []
    for fqn in fqns:
        *names, last = fqn.split(".")[num_shared:]
        name = ".".join(names if last.isdigit() else [*names, last])
        if not found or found[-1][0] != name:
            found.append((name, []))
        found[-1][1].extend([int(last)] if last.isdigit() else [])
    return ", ".join(f"{name} {ranges(numbers)}".strip() for name, numbers in found)


def pipeline_lines(found: PipelineSolution, cluster: Cluster) -> Iterator[str]:
    """What is in flight, who is left out, and what goes over the links between stages."""
    price = found.predicted
    in_flight = ", ".join(map(str, price.in_flight))
    seconds = ", ".join(duration(times.round_s) for times in price.times)
    yield f"A round takes {seconds}; at most {in_flight} are in flight."
    if unused := unused_in(found, cluster):
        yield f"Left out: {named(cluster, unused)}. Start no ranks there."
    yield "shardhet train plan=file runs plans with stages (docs/limits.md)."
    for i, (hop, pair) in enumerate(zip(price.hops, pairwise(price.times), strict=True)):
        number = f"{hop.num_links} x " * (hop.num_links > 1)
        back = (
            f"{_mib(hop.back_bytes)} back: {duration(hop.seconds)} and {duration(hop.back_s)}"
        )
        if hop.back_bytes == hop.nbytes:
            back = f"as much back: {duration(hop.seconds)} each"
        yield (
            f"Stage {i} hands stage {i + 1} {_mib(hop.nbytes)} a round over "
            f"{number}{_gbit_per_s(hop.link):,.4g} Gbit/s, and gets {back}, beside rounds of "
            f"{duration(max(each.round_s for each in pair))}."
        )


def pipeline_proof(found: PipelineSolution, workload: Workload) -> str:
    """What was proven of the pipeline."""
    return (
        f"No plan in {workload.param_dtype}, with stages or without, is predicted to "
        f"be more than {ceil(100 * found.relative_gap)}% faster: the compute alone takes all "
        f"devices {duration(found.lower_bound_s)}. Cuts, rounds and rounds in flight were "
        "improved until no neighbour was faster; nothing proves that they are the best."
    )


def unused_in(found: PipelineSolution, cluster: Cluster) -> list[int]:
    """The positions of devices that no stage has."""
    return [i for i in range(cluster.world_size) if i not in found.places]


def _mib(nbytes: int) -> str:
    mib = nbytes / MIB
    return f"{mib:,.{0 if mib >= 10 else 2}f} MiB"


def beside_line(found: PipelineSolution, flat: PlanSolution | None) -> str:
    """What all devices reach without stages, where that is ``flat``; None: nothing fits."""
    if flat is None:
        return "Without stages no plan fits."
    flat_s = flat.predicted.step_time_s
    more = flat_s / found.step_time_s
    return f"Without stages: {duration(flat_s)} a step, {more:.2f} times as long."


def _gbit_per_s(link: Link) -> float:
    return link.bandwidth_bytes_per_s * 8 / 1e9
