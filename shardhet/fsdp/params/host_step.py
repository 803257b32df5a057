"""The optimizer's step, and other work on rows, on the processors of the host.

Torch calls ``before_step`` and ``after_step`` around every step of every optimizer.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from shardhet.fsdp.params.optimizer_check import count_moments
from shardhet.fsdp.params.row_group import ShardGroup
from shardhet.fsdp.sharding.comm import CommContext

logger = logging.getLogger("shardhet.fsdp")

# AdamW, elements per second and thread: .92e9 fused and .22e9 with foreach.
TIMES_FASTER_IF_FUSED = 4
FUSED = {"fused": True, "foreach": None}
# Of the steps that show whether a fused kernel is right: elements, for many vector instructions
# and a rest; and what it may round otherwise, in epsilons of the dtype.
NUMEL_TRIED, STEPS_TRIED, ROUNDING = 1003, 3, 16
OF_GRAD_SCALER = ("grad_scale", "found_inf")  # what it lends to fused optimizers

_group_by_param = WeakIdKeyDictionary()  # of parameters of all models
_threads_before: "WeakKeyDictionary[optim.Optimizer, int]" = WeakKeyDictionary()
_advised: "WeakKeyDictionary[optim.Optimizer, bool]" = WeakKeyDictionary()


def know(params: Iterable[nn.Parameter], group: ShardGroup) -> None:
    """Register ``params`` as rows of a HetFSDP, wherever its plan places them."""
    for param in params:
        _group_by_param[param] = group


@contextmanager
def host_threads(comm: CommContext) -> Iterator[None]:
    """A context for work on rows: on the host, with this rank's share of the processors."""
    before, share = torch.get_num_threads(), comm.num_host_threads
    if share in (None, before):
        yield
        return
    torch.set_num_threads(share)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def before_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Prepare a step on rows of the host."""
    group = _group_of(optimizer)
    if group is None:
        return
    comm = group.comm
    if is_new := optimizer not in _advised:
        _advised[optimizer] = True
        check_room(optimizer)
    if comm.num_host_threads is None:
        return
    for name in OF_GRAD_SCALER:
        # They are on the device.  The optimizer would have them copied and not wait for it.
        if isinstance(value := getattr(optimizer, name, None), Tensor):
            setattr(optimizer, name, value.cpu())
    if is_new:
        _advise(optimizer, comm)
    _threads_before[optimizer] = torch.get_num_threads()
    torch.set_num_threads(comm.num_host_threads)


def after_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Give the processors back."""
    before = _threads_before.pop(optimizer, None)
    if before is not None:
        torch.set_num_threads(before)


register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)


def fused_on_host(optimizer: optim.Optimizer) -> optim.Optimizer:
    """The optimizer as it is, or one like it that is fused where its rows are on the host."""
    group = _group_of(optimizer)
    is_on_host = group is not None and group.comm.num_host_threads is not None
    return fused(optimizer) if is_on_host else optimizer


def fused(optimizer: optim.Optimizer) -> optim.Optimizer:
    """One like it, before its first step, that is fused if it may be and leaves that open."""
    is_open = optimizer.defaults.get("fused") is optimizer.defaults.get("foreach") is None
    if not is_open or not can_fuse(optimizer):
        return optimizer
    groups = [{**group, **FUSED} for group in optimizer.param_groups]
    return type(optimizer)(groups, **{**_options_of(optimizer), **FUSED})


def can_fuse(optimizer: optim.Optimizer) -> bool:
    """Whether it has a fused kernel that steps as its plain loop does.

    Tried on a few elements with its settings and dtypes: torch's kernels of some dtypes leave
    weights where they are.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or "fused" not in optimizer.defaults:
        return False
    options = _options_of(optimizer)

    def stepped(way: dict[str, Any]) -> list[Tensor]:
        groups = []
        for group in optimizer.param_groups:
            kinds = {(p.device, p.dtype) for p in group["params"]}
            zeros = [torch.zeros(NUMEL_TRIED, device=d, dtype=t) for d, t in kinds]
            groups.append({**group, "params": [*map(nn.Parameter, zeros)], "lr": 1.0, **way})
        twin = kind(groups, **{**options, **way})
        params = [param for group in groups for param in group["params"]]
        for step in range(STEPS_TRIED):
            for param in params:
                grad = torch.linspace(1, 2 + step, NUMEL_TRIED, device=param.device)
                param.grad = grad.to(param.dtype)
            twin.step()
        return [param.detach() for param in params]

    try:
        pairs = zip(stepped(FUSED), stepped({**FUSED, "fused": False}), strict=True)
        return all(
            torch.allclose(a, b, rtol=ROUNDING * torch.finfo(a.dtype).eps, atol=0)
            for a, b in pairs
        )
    except RuntimeError:  # settings, dtypes and devices that it has no kernel for
        return False


def check_room(optimizer: optim.Optimizer) -> None:
    """Raise ``ValueError`` on every rank if its states do not fit in the host's memory, or the
    plan was made for fewer.
    """
    group = _group_of(optimizer)
    if group is None:
        return
    comm = group.comm
    room = None if comm.num_host_threads is None else comm.host_room
    if comm.holds_for is None and room is None:
        return
    num_moments = count_moments(optimizer)
    why = comm.holds_for and comm.holds_for.mismatch(num_moments=num_moments)
    if why:
        why = (
            f"optimizer {type(optimizer).__name__} keeps more tensors for each parameter than "
            f"the plan has memory for: {why}. Plan for it (num_moments={num_moments} for "
            "plan_for and shardhet plan), or take one that keeps fewer."
        )
    elif room is not None:
        why = room.shortfall(num_moments)
    if why:
        with group.peers.fail_together("optimizer.step"):
            raise ValueError(why)


def _group_of(optimizer: optim.Optimizer) -> ShardGroup | None:
    """The ranks of the HetFSDP whose rows it holds."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            found: ShardGroup | None = _group_by_param.get(param)
            return found
    return None


def _options_of(optimizer: optim.Optimizer) -> dict[str, Any]:
    known = signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def _advise(optimizer: optim.Optimizer, comm: CommContext) -> None:
    """Log how much faster a fused optimizer is, on one rank."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if is_fused or not comm.is_first_on_host:
        return
    name = type(optimizer).__name__
    instead = f"{name}(..., fused=True)" if can_fuse(optimizer) else "AdamW(..., fused=True)"
    logger.warning(
        "optimizer %s: it steps on the host (optimizer_on_host), where %s takes about a "
        "%dth of the time.",
        name,
        instead,
        TIMES_FASTER_IF_FUSED,
    )
