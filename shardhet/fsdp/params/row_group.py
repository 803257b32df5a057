"""The ranks that store the rows of a model, and what they find out together: norms of rows."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from weakref import ReferenceType

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._pytree import tree_map_only

from shardhet.comm import devices
from shardhet.comm.channel import SECONDS_FOR_ALL_TO_COME, Channel
from shardhet.comm.collectives import whole_of
from shardhet.comm.peers import Peers
from shardhet.fsdp.microbatch.modes import FunctionTensor
from shardhet.fsdp.sharding.comm import CommContext
from shardhet.records.layout import Span


@dataclass(frozen=True, slots=True, eq=False)
class ShardGroup:
    """The ranks that store the rows of a model's parameters."""

    comm: CommContext
    control: Channel
    peers: Peers
    model: ReferenceType[Any]  # the HetFSDP that they are of

    def check_is_between_steps(self, params: Sequence[Tensor]) -> None:
        """Raise ``RuntimeError`` on every rank if an optimizer would step ``params`` by the
        gradients of the step before the one that is in progress.
        """
        model = self.model()
        if model is None or model.is_between_steps:
            return
        if any(param.grad is not None for param in params):
            with self.peers.fail_together("optimizer.step"):
                raise RuntimeError(
                    "optimizer.step: the gradients are those of the step before, and the next "
                    f"one has {model.rounds_left} rounds to go. Step, and clear gradients, "
                    "when model.is_between_steps."
                )

    def norm(
        self, local_norms: Sequence[Tensor], order: float, *, num_grads: int, call: str
    ) -> Tensor:
        """The norm of all ranks' ``local_norms`` together, 0-d, float64.  Collective.

        ``num_grads`` counts the gradients, including those of which this rank has no rows.
        """
        device = self.comm.device
        nothing = 0.0 if order >= 0 else math.inf
        local = torch.full((1,), nothing, dtype=torch.float64, device=device)
        if local_norms:
            # A norm of order 0 counts elements, so counts are summed.
            together = torch.stack([norm.to(device) for norm in local_norms]).double()
            local[0] = together.sum() if order == 0 else vector_norm(together, order)
        with self.peers.fail_together(call):
            given = self.control.enter(
                call, [order, num_grads], within_s=SECONDS_FOR_ALL_TO_COME
            )
            if any(row != given[0] for row in given):
                raise ValueError(
                    f"{call}: ranks ask for [order, number of gradients] {given} in plan "
                    "order. Take norms of the same gradients on every rank, including those "
                    "of which a rank has no rows."
                )
            rows = self.comm.reduce_scatter_channel.gather_rows(local)[:, 0]
        return rows.sum() if order == 0 else vector_norm(rows, order)

    def wait_for_device(self, grads: Sequence[Tensor]) -> None:
        """Let the host wait for numbers that it was sent, if it is to compute with them.

        GradScaler copies its scale to where gradients are, and goes on without waiting.
        """
        comm = self.comm
        if not devices.is_on_host(comm.device) and any(map(devices.is_on_host, grads)):
            comm.record_event(comm.current_stream()).synchronize()

    def agree_on_inf(self, found_inf: Tensor) -> None:
        """Set ``found_inf`` on all ranks if it is set on any.  Collective."""
        with self.peers.fail_together("GradScaler"):
            self.control.enter("GradScaler", within_s=SECONDS_FOR_ALL_TO_COME)
            mine = found_inf.reshape(1).double().to(self.comm.device)
            rows = self.comm.reduce_scatter_channel.gather_rows(mine)
        found_inf.copy_(rows.amax().reshape(found_inf.shape))


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of which parameter (or parameters) this rank stores."""

    group: ShardGroup
    fqn: str
    cut: tuple[tuple[Span, ...], ...]  # the rows of each parameter, by position

    @classmethod
    def of_all(cls, several: Sequence["Rows"]) -> "Rows":
        """Of rows in one tensor."""
        fqns, cuts = [each.fqn for each in several], [each.cut for each in several]
        return cls(several[0].group, ", ".join(fqns), sum(cuts, ()))

    @property
    def here(self) -> Span:
        """This rank's."""
        return self.cut[0][self.group.control.position]

    @property
    def is_cut(self) -> bool:
        """Whether more than one rank has some."""
        return sum(span.numel > 0 for cut in self.cut for span in cut) > len(self.cut)

    @property
    def num(self) -> int:
        """How many there are on all ranks."""
        return max(span.stop for span in self.cut[0])

    def is_everywhere(self, peers: Peers) -> bool:
        """Whether it is of the model of ``peers``, and each of its ranks has rows."""
        return self.group.peers is peers and all(span.numel for span in self.cut[0])

    def refuse(self, what: str) -> NoReturn:
        """Raise ``RuntimeError`` here and on the other ranks at their next collective."""
        with self.group.peers.fail_together("a call on rows"):
            if TracingContext.try_get() is not None:
                raise RuntimeError(
                    f"{self.fqn}: torch.compile cannot trace rows of parameters. Call what "
                    "uses them, optimizer.step() as well, outside of what you compile."
                )
            raise RuntimeError(
                f"{what} of {self.fqn} or its gradient, of which this rank has only some rows. "
                "Work element by element, also with tensors of the whole shape (p.mul_(mask)), "
                "or with norms and sums, which are of the whole (p.norm()); "
                "model.state_dict() has whole parameters, and p.grad gradients after "
                "model.backward."
            )
        raise AssertionError("not reached")

    def part(self, start: int, stop: int) -> tuple["Rows", slice]:
        """Those within a range of the whole, and where they are among the rows here."""
        at, here = self.group.control.position, self.here
        parts = [span.intersect(Span(start, max(start, stop))) for span in self.cut[0]]
        place = slice(parts[at].start - here.start, parts[at].stop - here.start)
        cut = tuple(
            Span(part.start - start, part.stop - start) if part.numel else Span(0, 0)
            for part in parts
        )
        return replace(self, cut=(cut,)), place if parts[at].numel else slice(0, 0)

    def whole(self, rows: Tensor) -> Tensor:
        """All ranks' ``rows``, on every rank.  Collective."""
        if torch.is_grad_enabled() and rows.requires_grad:
            self.refuse("use beside another parameter, with gradients enabled,")
        self._meet("p.copy_", [])
        return self.gather(rows)

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' ``rows``, on ranks that are known to call it alike.  Collective."""
        mine, num_rows = rows.detach().as_subclass(Tensor), [s.numel for s in self.cut[0]]
        return whole_of(mine, num_rows, self.group.comm.all_gather_channel)

    def reduce(self, local: float, numel: int, kind: str) -> float:
        """The "sum", "mean", "max" or "min" over the elements of all ranks.  Collective.

        ``local`` is the result for this rank's ``numel`` elements; ignored if it has none.
        """
        given = self._meet(f"p.{kind}", [local, numel])
        parts = [(value, int(count)) for value, count, _ in given if count]
        if not parts:
            return 0.0 if kind == "sum" else math.nan
        if kind == "mean":
            return sum(value * n for value, n in parts) / sum(n for _, n in parts)
        if kind == "sum":
            return sum(value for value, _ in parts)
        largest = torch.tensor([value for value, _ in parts], dtype=torch.float64)
        return float(largest.amax() if kind == "max" else largest.amin())  # NaN stays NaN

    def _meet(self, call: str, mine: list[float]) -> list[list[float]]:
        """What every rank gives, at a call for the same parameter.  Collective."""
        group, mine = self.group, [*mine, zlib.crc32(self.fqn.encode())]
        with group.peers.fail_together(call):
            given = group.control.enter(call, mine, within_s=SECONDS_FOR_ALL_TO_COME)
            if any(row[-1] != mine[-1] for row in given):
                raise ValueError(
                    f"{call}: this rank called it for {self.fqn} or its gradient, another rank "
                    "for another parameter. Call it for the same parameters in the same order "
                    "on every rank."
                )
        return given


def vector_norm(norms: Tensor, order: float) -> Tensor:
    """The norm of a tensor's elements."""
    norm: Tensor = torch.linalg.vector_norm(norms, order)
    return norm


def local_norm(rows: Tensor, order: float) -> Tensor:
    """The norm of rows, of which there may be none."""
    if rows.numel():
        return vector_norm(rows, order)
    return torch.full((), 0.0 if order >= 0 else math.inf, dtype=rows.dtype, device=rows.device)


Kwargs = dict[str, Any]
_plainly = torch._C.DisableTorchFunctionSubclass


class ShardNorm(FunctionTensor):
    """A norm, or a vector of norms, of which this rank has computed only its part.

    Its data are NaN; any use of it in Python gets the norms over all ranks.
    """

    _locals: list[tuple[ShardGroup | None, Tensor]]  # by entry; None: of a whole tensor
    _order: float

    @classmethod
    def of(
        cls, parts: list[tuple[ShardGroup | None, Tensor]], order: float, *, is_vector: bool
    ) -> "ShardNorm":
        """A ShardNorm of the local norm of each entry."""
        first = parts[0][1]
        mark = torch.full((), math.nan, dtype=first.dtype, device=first.device)
        norm = (mark.expand(len(parts)) if is_vector else mark).as_subclass(cls)
        norm._locals, norm._order = parts, order
        return norm

    @classmethod
    def _call(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Stack without communication; compute all else, such as norms, over all ranks."""
        if func is torch.stack and not kwargs and len(args) == 1:
            return _stacked(args[0])
        if func is Tensor.to and not kwargs and isinstance(args[1], torch.device):
            return args[0]
        if func in _METADATA:
            with _plainly():
                return func(*args, **kwargs)
        if func is torch.linalg.vector_norm and isinstance(args[0], ShardNorm):
            order, dims = order_and_dims(func, args, kwargs)
            if order == args[0]._order and order != 0 and not dims:
                return args[0]._total()
        args, kwargs = tree_map_only(ShardNorm, ShardNorm.resolved, (args, kwargs))
        return func(*args, **kwargs)

    def _total(self) -> Tensor:
        """The norm of all entries over all ranks, in one collective.  Collective."""
        with _plainly():
            groups = list(dict.fromkeys(group for group, _ in self._locals))
            totals = []
            for group in groups:
                norms = [norm for each, norm in self._locals if each is group]
                if group is None:
                    totals.append(vector_norm(torch.stack(norms).double(), self._order))
                else:
                    call = "torch.nn.utils.get_total_norm"
                    totals.append(
                        group.norm(norms, self._order, num_grads=len(norms), call=call)
                    )
            total = vector_norm(torch.stack(totals), self._order)
            return total.to(device=self.device, dtype=self.dtype)

    def resolved(self) -> Tensor:
        """The norm over all ranks, entry by entry.  Collective."""
        with _plainly():
            norms = [
                group.norm([norm], self._order, num_grads=1, call="p.norm")
                if group
                else norm.double()
                for group, norm in self._locals
            ]
            whole = torch.stack([norm.to(self.device) for norm in norms]).to(self.dtype)
            self._locals = [(None, norm) for norm in whole]
            return whole if self.dim() else whole[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.resolved().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.resolved()


_METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "shape", "is_sparse", "requires_grad", "is_cuda", "layout")
)


def _stacked(norms: Sequence[Tensor]) -> Tensor:
    """A stack of 0-d norms: a ShardNorm if all have one order, else resolved over all ranks."""
    rows = [norm for norm in norms if isinstance(norm, ShardNorm)]
    is_of_one_kind = len({norm._order for norm in rows}) == 1
    if not is_of_one_kind or any(norm.dim() for norm in norms):
        return torch.stack([n.resolved() if isinstance(n, ShardNorm) else n for n in norms])
    parts = [
        norm._locals[0] if isinstance(norm, ShardNorm) else (None, norm.detach())
        for norm in norms
    ]
    return ShardNorm.of(parts, rows[0]._order, is_vector=True)


def order_and_dims(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs
) -> tuple[float | None, tuple[int, ...]]:
    """Order and dims of a call of one of torch's norms; an order of None is a matrix norm."""
    names = ("p", "dim") if func in (torch.norm, Tensor.norm) else ("ord", "dim")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    order, dims = given.get(names[0]), given.get("dim")
    if func is torch.linalg.norm and order is not None and args[0].dim() > 1 and dims is None:
        return None, ()
    if order is None or (order == "fro"):
        order = 2.0
    if isinstance(order, str):
        order = float(order) if order in ("inf", "-inf") else None
    dims = () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    return None if order is None else float(order), dims
