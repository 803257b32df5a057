"""NCCL's rules over gloo: every branch for NCCL runs, and what NCCL would refuse is refused.

What is not tensors of the device is refused, and so are pieces that are not contiguous.  A
collective needs all ranks.  With ``async_op`` it runs on a stream of the communicator's own,
which waits for the launching stream; ``wait()`` makes the current stream wait, never the host,
and nothing is ever completed when the host asks.  Messages are launched as one group, and
torch tells the allocator of the stream that they use.  Where a
peer is gone, nothing raises: the device waits, until every communicator is aborted that it
waits in.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardhet.comm import devices, failure
from shardhet.comm.calls import wait_all
from shardhet.comm.groups import KNOWN_NCCL
from tests.emulated.clocks import Event, Stream

if TYPE_CHECKING:
    from tests.emulated.accelerator import Accelerator

_close_gloo = failure._close
# Groups that stand for NCCL's; they outlive an accelerator, as the library keeps them.
_is_nccl: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()
# Groups that the library has made for gloo; all others have NCCL for the device.
_is_gloo: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


@dataclass
class Communicator:
    """One NCCL communicator, as one rank sees it."""

    stream: Stream | None = None
    # What was launched, and on which stream, for a comparison over ranks.
    collectives: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    # Messages by peer: numbers of elements.
    sent: dict[int, list[int]] = field(default_factory=dict)
    received: dict[int, list[int]] = field(default_factory=dict)
    received_bytes: int = 0
    # Whether its stream has priority over compute, which torch asks the environment for.
    has_priority: bool = field(
        default_factory=lambda: os.environ.get("TORCH_NCCL_HIGH_PRIORITY") == "1"
    )


class Launched(NamedTuple):
    """A collective, or a message of this rank, in the order over all communicators."""

    group: str
    name: str
    sizes: tuple[int, ...]
    peer: int | None = None  # of a message, in the world


class Work:
    """A launch with ``async_op``; like torch's, it keeps its tensors until it is waited for."""

    def __init__(self, accelerator: "Accelerator", event: Event, tensors: list[Tensor]) -> None:
        self._accelerator = accelerator
        self._event = event
        self._tensors = tensors

    def wait(self) -> bool:
        self._accelerator.current.wait_event(self._event)
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return False


class Nccl:
    """The communicators of one rank."""

    def __init__(self, accelerator: "Accelerator") -> None:
        self._accelerator = accelerator
        self.communicators: dict[dist.ProcessGroup, Communicator] = {}
        self.launched: list[Launched] = []
        self.blocks_on_loss = False  # as NCCL does, instead of raising what gloo raises
        self.aborts = True  # whether to abort all communicators sets the device free
        self._is_lost = self._is_aborted = False
        self._stuck: set[dist.ProcessGroup] = set()  # whose kernels wait for ever

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of torch's functions, for groups that stand for NCCL's."""
        self._new_group = dist.new_group
        self._originals = {name: getattr(dist, name) for name in self._functions()}
        backend_of = devices.backend_of

        def backend(group: dist.ProcessGroup, device: torch.device) -> str:
            has_nccl = device.index is not None and group not in _is_gloo
            return "nccl" if has_nccl else backend_of(group, device)

        def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
            return device.index is not None or group not in _is_nccl

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(devices, "backend_of", backend))
            stack.enter_context(mock.patch.object(devices, "carries", carries))
            stack.enter_context(mock.patch.object(dist, "new_group", self._make_group))
            stack.enter_context(mock.patch.object(failure, "_abort", self._abort))
            stack.enter_context(mock.patch.object(c10d, "_coalescing_manager", self._grouped))
            for name, function in self._functions().items():
                stack.enter_context(mock.patch.object(dist, name, function))
            yield

    def _functions(self) -> dict[str, Callable[..., Any]]:
        return {
            "all_gather": self._all_gather,
            "all_gather_single": self._all_gather_single,
            "all_reduce": self._all_reduce,
            "batch_isend_irecv": self._messages,
            "broadcast": self._broadcast,
            "reduce": self._reduce,
            "reduce_scatter": self._reduce_scatter,
            "reduce_scatter_single": self._reduce_scatter_single,
        }

    def _make_group(self, ranks: Sequence[int], *, backend: str, **options: Any) -> Any:
        is_nccl = backend in ("nccl", KNOWN_NCCL)
        group = self._new_group(ranks, backend="gloo" if is_nccl else backend, **options)
        (_is_nccl if is_nccl else _is_gloo)[group] = True
        return group

    # Collectives #

    def _all_gather(
        self, outputs: list[Tensor], own: Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        if group not in _is_nccl:
            return self._originals["all_gather"](outputs, own, group=group, async_op=async_op)
        _require(outputs[group.rank()].shape == own.shape, "all_gather: unequal shapes")

        def move() -> None:
            outputs[group.rank()].copy_(own)
            for root, piece in enumerate(outputs):
                self._originals["broadcast"](piece, group=group, group_src=root)

        sizes = tuple(each.numel() for each in outputs)
        return self._collective(
            "all_gather", group, sizes, [own], outputs, async_op, move, sum(sizes) - own.numel()
        )

    def _all_gather_single(
        self, output: Tensor, own: Tensor, group: Any = None, async_op: bool = False
    ) -> Work | None:
        if group not in _is_nccl:
            return self._originals["all_gather_single"](output, own, group, async_op)
        _require(output.numel() == own.numel() * group.size(), "all_gather_single: sizes")

        def move() -> None:
            pieces = list(output.chunk(group.size()))
            self._originals["all_gather"](pieces, own.clone(), group=group)

        received = output.numel() - own.numel()
        sizes = (output.numel(),)
        return self._collective(
            "all_gather_single", group, sizes, [own], [output], async_op, move, received
        )

    def _reduce_scatter(
        self,
        output: Tensor,
        inputs: list[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        if group not in _is_nccl:
            return self._originals["reduce_scatter"](output, inputs, op, group, async_op)
        _require(inputs[group.rank()].shape == output.shape, "reduce_scatter: unequal shapes")
        sizes = tuple(each.numel() for each in inputs)
        return self._collective(
            "reduce_scatter",
            group,
            sizes,
            inputs,
            [output],
            async_op,
            lambda: self._sum(output, inputs, group),
            (group.size() - 1) * output.numel(),
        )

    def _reduce_scatter_single(
        self,
        output: Tensor,
        whole: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        if group not in _is_nccl:
            return self._originals["reduce_scatter_single"](output, whole, op, group, async_op)
        _require(whole.numel() == output.numel() * group.size(), "reduce_scatter_single: sizes")
        return self._collective(
            "reduce_scatter_single",
            group,
            (whole.numel(),),
            [whole],
            [output],
            async_op,
            lambda: self._sum(output, list(whole.chunk(group.size())), group),
            (group.size() - 1) * output.numel(),
        )

    def _all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        original = self._originals["all_reduce"]
        if group not in _is_nccl:
            return original(tensor, op, group=group, async_op=async_op)
        return self._collective(
            "all_reduce",
            group,
            (tensor.numel(),),
            [],
            [tensor],
            async_op,
            lambda: original(tensor, op, group=group),
            tensor.numel(),
        )

    @contextmanager
    def _grouped(self, group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
        """Launch the broadcasts or reductions inside as one, on the current stream."""
        _require(group in _is_nccl, "a group of collectives of another backend")
        self._in_group: list[tuple[Tensor, int, bool]] | None = []  # root, whether it adds up
        yield
        ops, self._in_group = self._in_group, None
        if not ops:
            return
        mine = [tensor for tensor, root, _ in ops if root == group.rank()]
        theirs = [tensor for tensor, root, _ in ops if root != group.rank()]
        adds = ops[0][2]
        _require(all(each[2] == adds for each in ops), "broadcasts and reductions in a group")
        _require(all(tensor.numel() for tensor, *_ in ops), "an empty piece")

        def move() -> None:
            for tensor, root, _ in ops:
                if adds:
                    self._sum_at(root, tensor, tensor, group)
                else:
                    self._originals["broadcast"](tensor, group=group, group_src=root)

        received = sum(tensor.numel() for tensor in (mine if adds else theirs))
        self._collective(
            "reduce" if adds else "broadcast",
            group,
            tuple(tensor.numel() for tensor, *_ in ops),
            [*mine, *theirs] if adds else mine,
            mine if adds else theirs,
            False,
            move,
            received * (group.size() - 1 if adds else 1),
        )

    def _broadcast(self, tensor: Tensor, group: Any = None, group_src: int = 0) -> None:
        if group not in _is_nccl:
            self._originals["broadcast"](tensor, group=group, group_src=group_src)
            return
        assert self._in_group is not None, "broadcasts are launched in groups"
        self._in_group.append((tensor, group_src, False))

    def _reduce(self, tensor: Tensor, group: Any = None, group_dst: int = 0) -> None:
        assert self._in_group is not None, "reductions are launched in groups"
        self._in_group.append((tensor, group_dst, True))

    def _sum(self, output: Tensor, inputs: list[Tensor], group: dist.ProcessGroup) -> None:
        for root, piece in enumerate(inputs):
            self._sum_at(root, output, piece, group)

    def _sum_at(
        self, root: int, output: Tensor, piece: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Store the sum of all ranks' ``piece``, in their order, in the root's ``output``."""
        parts = [torch.empty_like(piece) for _ in range(group.size())]
        is_root = root == group.rank()
        dist.gather(piece.contiguous(), parts if is_root else None, group=group, group_dst=root)
        if is_root:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            output.copy_(total)

    def _collective(
        self,
        name: str,
        group: dist.ProcessGroup,
        sizes: tuple[int, ...],
        reads: list[Tensor],
        writes: list[Tensor],
        async_op: bool,
        move: Callable[[], None],
        num_received: int,
    ) -> Work | None:
        communicator = self._of(group)
        communicator.collectives.append((name, sizes, self._accelerator.current.name))
        self.launched.append(Launched(group.group_name, name, sizes))
        communicator.received_bytes += num_received * (*writes, *reads)[0].element_size()
        return self._launch(name, group, reads, writes, async_op, move)

    def _launch(
        self,
        name: str,
        group: dist.ProcessGroup,
        reads: list[Tensor],
        writes: list[Tensor],
        async_op: bool,
        move: Callable[[], None],
    ) -> Work | None:
        accelerator = self._accelerator
        for tensor in (*reads, *writes):
            shown = f"{name}: a tensor {list(tensor.shape)}"
            _require(accelerator.held(tensor) is not None, f"{shown} not on the device")
            _require(tensor.is_contiguous(), f"{shown} that is not contiguous")
        stream = self._of(group).stream if async_op else accelerator.current
        assert stream is not None
        if async_op:
            stream.wait_stream(accelerator.current)
        accelerator.launch(name, stream, reads=reads, writes=writes)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._move(group, move)
        if not async_op:
            return None
        return Work(accelerator, stream.record_event(), [*reads, *writes])

    def _move(self, group: dist.ProcessGroup, move: Callable[[], None]) -> None:
        if self._is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        if self._is_lost:
            self._stuck.add(group)
            return
        try:
            move()
        except RuntimeError:
            if not self.blocks_on_loss:
                raise
            self._stuck.add(group)
            self._is_lost = self._accelerator.host.is_blocked = True

    def _abort(self, group: dist.ProcessGroup) -> None:
        """Returns once the device is free: kernels of other communicators may be in its way."""
        _close_gloo(group)
        if not self.aborts:
            return
        self._stuck.discard(group)
        while self._stuck:
            time.sleep(0.05)
        self._is_aborted = True
        self._accelerator.host.is_blocked = False

    # Messages #

    def _messages(self, ops: list[dist.P2POp]) -> list[Any]:
        group = ops[0].group
        original = self._originals["batch_isend_irecv"]
        if group not in _is_nccl:
            return list(original(ops))
        communicator = self._of(group)
        reads, writes = [], []
        for op in ops:
            is_send = op.op is dist.isend
            (reads if is_send else writes).append(op.tensor)
            log = communicator.sent if is_send else communicator.received
            log.setdefault(op.group_peer, []).append(op.tensor.numel())
            size, peer = op.tensor.numel(), dist.get_global_rank(group, op.group_peer)
            self.launched.append(Launched(group.group_name, "message", (size,), peer))
            assert communicator.stream is not None
            self._accelerator.record(op.tensor, communicator.stream)
            if not is_send:
                nbytes = op.tensor.numel() * op.tensor.element_size()
                communicator.received_bytes += nbytes

        def move() -> None:
            wait_all(list(original(ops)))  # where the watch sees that this rank waits

        work = self._launch("messages", group, reads, writes, True, move)
        return [work]

    def _of(self, group: dist.ProcessGroup) -> Communicator:
        if group not in self.communicators:
            name = f"NCCL {len(self.communicators)}"
            self.communicators[group] = Communicator(Stream(self._accelerator.host, name))
        return self.communicators[group]


def _require(holds: bool, refused: str) -> None:
    if not holds:
        raise RuntimeError(f"NCCL refuses {refused}")
