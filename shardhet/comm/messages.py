"""Point-to-point messages between positions of a channel."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from shardhet.comm import devices
from shardhet.comm.calls import Pending, Seats, failing_as_peers


class Messages:
    """Point-to-point messages to post together.

    Empty messages and messages to this rank itself are left out.
    """

    def __init__(self, channel: Seats) -> None:
        self._channel = channel
        self._receives: list[dist.P2POp] = []
        self._sends: list[tuple[int, dist.P2POp]] = []

    def receive(self, tensor: Tensor, position: int) -> None:
        """Fill ``tensor`` with what the peer at ``position`` sends."""
        if tensor.numel() and position != self._channel.position:
            self._receives.append(self._op(dist.irecv, tensor, position))

    def send(self, tensor: Tensor, position: int) -> None:
        """Send ``tensor`` to the peer at ``position``."""
        if tensor.numel() and position != self._channel.position:
            # Each rank starts with its neighbour, so that not all ranks send to the same
            # receiver first.
            distance = (position - self._channel.position) % self._channel.world_size
            self._sends.append((distance, self._op(dist.isend, tensor, position)))

    def _op(
        self, op: Callable[..., dist.Work | None], tensor: Tensor, position: int
    ) -> dist.P2POp:
        peer = self._channel.rank_by_position[position]
        return dist.P2POp(op, tensor, group=self._channel.group, group_peer=peer)

    def post(self, *, finish: Callable[[], None] | None = None) -> Pending:
        """Post the messages; ``finish`` runs when all receives have completed."""
        sends = [op for _, op in sorted(self._sends, key=lambda entry: entry[0])]
        ops = [*self._receives, *sends]
        works: list[dist.Work] = []
        if ops:
            with failing_as_peers():
                works = dist.batch_isend_irecv(ops)
        # NCCL has one operation for the whole group.  The stream that waits for it joins its
        # sends too, also on a rank that only sends.
        is_one_each = not ops or devices.is_on_host(ops[0].tensor)
        num_receives = len(self._receives)
        return Pending(
            receiving=works[:num_receives] if is_one_each else works,
            sending=works[num_receives:] if is_one_each else works,
            finish=finish,
            tensors=[op.tensor for op in ops],
        )
