"""The memory of hosts for inputs of units: whether it is enough, before the first gradient."""

from collections.abc import Sequence

from shardhet.comm.channel import Channel
from shardhet.comm.devices import available_bytes
from shardhet.fsdp.microbatch.host_inputs import ALIGNMENT, InputsOnHost
from shardhet.fsdp.probing.probe import SeenInput
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.records.plan import Plan, pipeline_of
from shardhet.records.stages import rounds_in_flight

MIB = 2**20


class HostSlabs:
    """What the hosts of all ranks keep of inputs of units, and where this rank's are."""

    def __init__(
        self, plan: Plan, comm: CommContext, control: Channel, num_rounds: int
    ) -> None:
        self._plan, self._control, self._nodes = plan, control, comm.nodes
        # By position: rounds that the rank has begun and not finished at most.
        groups = zip(rounds_in_flight(pipeline_of(plan), num_rounds), plan.groups, strict=True)
        self._held = [n for n, group in groups for _ in group]
        self.inputs: InputsOnHost | None = None  # the plan keeps none of this rank's there
        if plan.ranks[control.position].inputs_on_host:
            self.inputs = InputsOnHost(comm, self._held[control.position])

    @property
    def nbytes(self) -> int:
        """Bytes that are set aside for this rank."""
        return 0 if self.inputs is None else self.inputs.nbytes

    def reserve(self, seen: Sequence[SeenInput]) -> None:
        """Reserve what each rank needs for a call of a new kind.  Collective.

        Raises ``ValueError`` on every rank if a host's memory is too small for its ranks.
        """
        if not any(rank.inputs_on_host for rank in self._plan.ranks):
            return
        told = self._control.exchange_objects((tuple(seen), available_bytes(), self.nbytes))
        most = max((each for each, _, _ in told), key=len)  # of a rank with samples
        of_round = [_bytes_on_host(self._plan, i, most) for i in range(len(told))]
        needed = [nbytes * n for nbytes, n in zip(of_round, self._held, strict=True)]
        more = [max(0, n - before) for n, (_, _, before) in zip(needed, told, strict=True)]
        for node in range(len(self._nodes)):
            here = self._nodes.positions(node)
            free = min((told[i][1] for i in here if told[i][1] is not None), default=None)
            lacking = sum(more[i] for i in here)
            if free is not None and lacking > free:
                raise ValueError(
                    f"plan: inputs_on_host: the inputs of positions "
                    f"{[i for i in here if more[i]]} need {lacking / MIB:,.0f} MiB of their "
                    f"host's memory, which has {free / MIB:,.0f} MiB. Keep those of fewer "
                    "units there, or give these devices smaller batches."
                )
        if self.inputs is not None:
            self.inputs.reserve(of_round[self._control.position])


def _bytes_on_host(plan: Plan, position: int, seen: Sequence[SeenInput]) -> int:
    """What the host of the rank at ``position`` keeps of a round's inputs."""
    rank = plan.ranks[position]
    stage = pipeline_of(plan)[plan.groups.index(plan.group_of(position))]
    by_tensor = {
        each.tensor: each.bytes_per_sample
        for each in seen
        if rank.keeps_input_on_host(each.fqn) and stage.has(each.fqn)
    }
    unused = ALIGNMENT * len(by_tensor) * rank.num_microbatches
    return int(rank.rank_batch_size * sum(by_tensor.values())) + unused
