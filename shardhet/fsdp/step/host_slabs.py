"""The memory of hosts for inputs of units: whether it is enough, before the first gradient."""

from collections.abc import Sequence

from shardhet.comm.channel import Channel
from shardhet.comm.on_host.memory import available_bytes
from shardhet.fsdp.microbatch.host_inputs import ALIGNMENT, InputsOnHost
from shardhet.fsdp.probing.probe import SeenInput
from shardhet.records.nodes import Nodes
from shardhet.records.plan import Plan, RankPlan

MIB = 2**20


def bytes_on_host(rank: RankPlan, seen: Sequence[SeenInput]) -> int:
    """What the rank's host keeps of a round's inputs."""
    by_tensor = {
        each.tensor: each.bytes_per_sample
        for each in seen
        if rank.keeps_input_on_host(each.fqn)
    }
    unused = ALIGNMENT * len(by_tensor) * rank.num_microbatches
    return int(rank.rank_batch_size * sum(by_tensor.values())) + unused


def reserve_on_hosts(
    inputs: InputsOnHost | None,  # None: the plan keeps none of this rank's on the host
    plan: Plan,
    seen: Sequence[SeenInput],
    *,
    control: Channel,
    nodes: Nodes,
) -> None:
    """Reserve what each rank needs for a call of a new kind.  Collective.

    Raises ``ValueError`` on every rank if the memory of a host is too small for its ranks.
    """
    if not any(rank.inputs_on_host for rank in plan.ranks):
        return
    has = 0 if inputs is None else inputs.slab.nbytes
    told = control.exchange_objects((tuple(seen), available_bytes(), has))
    most = max((each for each, _, _ in told), key=len)  # of a rank with samples
    needed = [bytes_on_host(rank, most) for rank in plan.ranks]
    more = [max(0, n - held) for n, (_, _, held) in zip(needed, told, strict=True)]
    for node in range(len(nodes)):
        here = nodes.positions(node)
        free = min((told[i][1] for i in here if told[i][1] is not None), default=None)
        lacking = sum(more[i] for i in here)
        if free is not None and lacking > free:
            positions = [i for i in here if more[i]]
            raise ValueError(
                f"plan: inputs_on_host: the inputs of positions {positions} need "
                f"{lacking / MIB:,.0f} MiB of their host's memory, which has {free / MIB:,.0f} "
                "MiB. Keep those of fewer units there, or give these devices smaller batches."
            )
    if inputs is not None:
        inputs.reserve(needed[control.position])
