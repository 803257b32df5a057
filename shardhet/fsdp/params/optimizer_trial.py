"""A trial of an optimizer of any class: does it step rows as it does whole parameters?"""

import copy
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardhet.fsdp.microbatch.modes import EagerMode

# Large enough for optimizers that treat small tensors differently (8-bit: below 4,096) or
# matrices with a small side (factored moments: below 128, as a rule), and of whole blocks of
# 256 elements, as parameters of models are: some quantize no others.
TRIAL_SHAPES = ((), (4608,), (256, 131), (256, 129, 3), (256, 3, 3, 3), (256, 3, 3, 3, 1))
TRIAL_CUT = 37  # rows of the first of two parts, which are not of whole blocks
# Of whole parameters, whose sizes count for less than what some compute of them.
WHOLE_SHAPES = ((), (50,), (24, 18), (12, 9, 3), (10, 6, 3, 3), (10, 6, 3, 3, 1))
TRIAL_STEPS = 30  # some look at whole matrices only then and when, or after a warm-up
TRIAL_BAR = 1e3  # in epsilons of the dtype, relative to the largest element or update


class _Part(Enum):
    """Which rows, or else which of the parameters: all, or those of one of two ranks."""

    ALL = slice(None)
    FIRST = slice(TRIAL_CUT)
    SECOND = slice(TRIAL_CUT, None)


def _oddly(step: int, grads: Tensor, params: Tensor) -> Tensor:
    """The gradients of the second part in a step of a trial, by which an optimizer may decide
    what it does: where it looks at all rows, one rank decides otherwise than one process.
    """
    if step == TRIAL_STEPS:
        return torch.full_like(grads, math.inf)
    if step == TRIAL_STEPS - 1:
        return grads * 1e6
    if step == TRIAL_STEPS - 2:
        return torch.zeros_like(grads)
    # All but orthogonal, as where norms follow; some then take away the little that is not.
    if step == TRIAL_STEPS // 3 and grads.dim() > 1:
        along = (grads * params).flatten(1).sum(1) / params.square().flatten(1).sum(1)
        across = grads - params * along.reshape(-1, *(1 for _ in grads.shape[1:]))
        return 1000 * across + params
    return grads


class _Alone(EagerMode):
    """Refuses communication, which would be of other parameters on each rank."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile an optimizer within it."""
        return True

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"it communicates by itself: {func.name()}")
        return func(*args, **kwargs)


class Trial:
    """A few steps of copies of an optimizer on small parameters.

    All that one process has, and what each of two ranks has: rows of each, or every other one.
    """

    def __init__(
        self, optimizer: optim.Optimizer, *, has_closure: bool = False, by_rows: bool = True
    ) -> None:
        self._optimizer = optimizer
        self._has_closure = has_closure
        first = optimizer.param_groups[0]["params"][0]
        is_double = first.dtype == torch.float64
        self._dtype = torch.float64 if is_double else torch.float32
        self._device = first.device
        self._by_rows = by_rows
        # By group, the distinct numbers of dimensions of its parameters; each as often as its
        # parameters are dealt out.
        self._dims = [
            sorted(
                dim
                for dim, number in Counter(max(1, p.dim()) for p in group["params"]).items()
                for _ in range(1 if by_rows else min(2, number))
            )
            for group in optimizer.param_groups
        ]

    def error(self) -> float:
        """The largest difference between parts and whole, relative to the tolerance."""
        before, error = self._values(_Part.ALL, 0), 0.0
        for whole, *parts in zip(*map(self._train, _Part), strict=False):  # step by step
            for i, (now, first, second, start) in enumerate(
                zip(whole, *parts, before, strict=True)
            ):
                pairs = [(first, slice(TRIAL_CUT)), (second, slice(TRIAL_CUT, None))]
                if not self._by_rows:
                    pairs = [((first, second)[i % 2], slice(None))]
                for found, rows in pairs:
                    error = max(error, self._difference(found, now[rows], start[rows]))
            if error > 1.0:
                break
        return error

    def _difference(self, found: Tensor, now: Tensor, start: Tensor) -> float:
        """The largest, relative to the tolerance; what is not finite has to be so in both."""
        is_same = (found == now) | (found.isnan() & now.isnan())
        difference = torch.where(is_same, 0.0, (found - now).abs()).max()
        largest = torch.maximum((now - start).abs(), start.abs()).nan_to_num(0.0, 0.0).max()
        if not difference:
            return 0.0
        ratio = float(difference / (TRIAL_BAR * torch.finfo(self._dtype).eps * largest))
        return math.inf if math.isnan(ratio) else ratio

    def num_moments(self) -> int:
        """How many states of the size of its parameter the first parameter has after a step."""
        self._device = torch.device("cpu")
        params = [nn.Parameter(value) for value in self._values(_Part.ALL, 0)]
        optimizer = self._copy_for(params, _Part.ALL)
        for param in params:
            param.grad = torch.ones_like(param)
        with _Alone():
            optimizer.step()
        kept = max(
            (optimizer.state[param].values() for param in params),
            key=lambda states: sum(torch.is_tensor(each) for each in states),
        )
        shapes = {param.shape for param in params if param.dim()}
        return sum(torch.is_tensor(each) and each.shape in shapes for each in kept)

    def _values(self, part: "_Part", number: int) -> list[Tensor]:
        """Random values or gradients; later rows have larger magnitude."""
        values = []
        shapes, rows = (
            (TRIAL_SHAPES, part.value) if self._by_rows else (WHOLE_SHAPES, slice(None))
        )
        for i, dim in enumerate(dim for dims in self._dims for dim in dims):
            generator = torch.Generator().manual_seed(1000 * number + i)
            drawn = torch.randn(shapes[dim], generator=generator, dtype=torch.float64)
            magnitude = torch.linspace(0.1, 3, len(drawn), dtype=torch.float64)
            drawn *= magnitude.reshape(-1, *(1 for _ in drawn.shape[1:]))
            values.append(drawn[rows].to(device=self._device, dtype=self._dtype))
        return values

    def _train(self, part: "_Part") -> Iterator[list[Tensor]]:
        """The parameters after each of the steps."""
        params = [nn.Parameter(value) for value in self._values(part, 0)]
        optimizer = self._copy_for(params, part)
        for step in range(1, TRIAL_STEPS + 1):
            values = self._values(part, step)

            def closure(values: list[Tensor] = values, step: int = step) -> Tensor:
                for i, (param, value) in enumerate(zip(params, values, strict=True)):
                    param.grad = value + param.detach() / 8  # another after it has moved
                    odd = self._odd_rows(part, i)
                    param.grad[odd] = _oddly(step, param.grad[odd], param.detach()[odd])
                return params[0].new_ones(())  # one for all ranks, as a loss is

            closure()
            given: Any = closure if self._has_closure else None
            torch.manual_seed(step)
            try:
                with _Alone():
                    optimizer.step(given)
            except Exception:
                if step < TRIAL_STEPS:
                    raise
                return  # it may refuse what is not finite
            yield [param.detach() for param in params]

    def _odd_rows(self, part: "_Part", i: int) -> slice:
        """Which rows here are the second part's, of a parameter."""
        if not self._by_rows:
            return slice(None if i % 2 else 0)
        return (
            _Part.SECOND.value
            if part is _Part.ALL
            else slice(None if part is _Part.SECOND else 0)
        )

    def _copy_for(self, params: Sequence[nn.Parameter], part: "_Part") -> optim.Optimizer:
        """A new optimizer with the settings of the one on trial, for ``params``."""
        memo: dict[int, Any] = {}
        left: Iterator[nn.Parameter] = iter(params)
        for group, dims in zip(self._optimizer.param_groups, self._dims, strict=True):
            params_by_dim: dict[int, deque[nn.Parameter]] = {}
            for dim in dims:
                params_by_dim.setdefault(dim, deque()).append(next(left))
            for param in group["params"]:
                of_dim = params_by_dim[max(1, param.dim())]
                memo[id(param)] = of_dim[0]
                of_dim.rotate()
        for each in vars(self._optimizer).values():
            if isinstance(each, optim.Optimizer):  # around which it is; without its state too
                memo[id(each.state)] = defaultdict(dict)
        twin: optim.Optimizer = object.__new__(type(self._optimizer))
        left_out = ("state", "step")  # a scheduler binds `step` to the optimizer on trial
        for name, value in vars(self._optimizer).items():
            if name not in left_out and not name.endswith("_hooks"):
                twin.__dict__[name] = copy.deepcopy(value, memo)
        twin.__setstate__({"state": defaultdict(dict)})
        is_dealt = not self._by_rows and part is not _Part.ALL
        here = params[part is _Part.SECOND :: 2] if is_dealt else params
        for group in twin.param_groups:
            known = OrderedDict.fromkeys(group["params"])
            group["params"] = [param for param in known if any(param is p for p in here)]
        return twin
