"""Units whose parameters are real and whose compute is only time: asleep, or busy.

On a machine whose cores all compute, communication is one more piece of work for the same
cores, and nothing can hide it.  A device whose compute is *slept* leaves the cores to the
collectives, as an accelerator does; everything else (parameters, gradients, autograd,
schedule, collectives) is what it is in training.  Busy compute is the same model with a loop
of matrix products in place of the sleep.

    forward     seconds per sample * samples, then x + one element of the unit's parameter
    backward    twice that, then a whole gradient for the parameter
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Spend = Callable[[float], None]  # be at work for so many seconds

BACKWARD_OVER_FORWARD = 2.0  # as matrix products have it
ROW_NUMEL = 64  # short rows: shards of many ranks are cut at rows
MAX_CREDIT_S = 0.02  # a few turns of the system's scheduler
MATRIX_WIDTH = 128
CALIBRATION_S = 0.05


class Sleeper:
    """Sleeps; what a sleep was too long is taken off the next ones, up to a limit.

    A device knows nothing of the scheduler that wakes its emulation too late.
    """

    def __init__(self) -> None:
        self._owed_s = 0.0

    def __call__(self, seconds: float) -> None:
        """Sleep, on the average, for ``seconds``."""
        if seconds <= 0:
            return
        self._owed_s += seconds
        if self._owed_s > 0:
            start_s = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - start_s
        self._owed_s = max(self._owed_s, -MAX_CREDIT_S)


class Worker:
    """Multiplies matrices, as many as one process alone manages in the time."""

    def __init__(self) -> None:
        self._matrix = torch.ones(MATRIX_WIDTH, MATRIX_WIDTH)
        self._output = torch.empty_like(self._matrix)
        self._product_s = 0.0
        self._calibrate()

    def _calibrate(self) -> None:
        self._multiply(10)
        num_products, start_cpu_s = 0, time.thread_time()
        # The thread's own seconds: the other ranks of the machine calibrate now, too.
        while time.thread_time() - start_cpu_s < CALIBRATION_S:
            self._multiply(10)
            num_products += 10
        self._product_s = (time.thread_time() - start_cpu_s) / num_products

    def __call__(self, seconds: float) -> None:
        """Do what takes ``seconds`` on a core that has nothing else to do."""
        self._multiply(round(seconds / self._product_s))

    def _multiply(self, num_products: int) -> None:
        for _ in range(num_products):
            torch.mm(self._matrix, self._matrix, out=self._output)


class PacedUnit(nn.Module):
    """A parameter of [rows, ROW_NUMEL], and how long a sample takes."""

    def __init__(self, numel: int, spend: Spend) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel // ROW_NUMEL, ROW_NUMEL))
        self.spend = spend
        self.forward_s_per_sample = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of [samples, 1], after the unit's time has passed."""
        return _Paced.apply(x, self.weight, self)


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, unit: PacedUnit) -> Tensor:
        ctx.spend, ctx.shape = unit.spend, weight.shape
        ctx.seconds = len(x) * unit.forward_s_per_sample
        unit.spend(ctx.seconds)
        return x + weight[0, 0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        ctx.spend(BACKWARD_OVER_FORWARD * ctx.seconds)
        # Every element: what is reduced is as long as the parameter.
        weight_grad = grad.sum().expand(ctx.shape)
        return grad if ctx.needs_input_grad[0] else None, weight_grad, None


class PacedModel(nn.Module):
    """Units in a row; returns ``(loss_sum, num_tokens)``, every sample one token."""

    def __init__(self, num_units: int, unit_numel: int, spend: Spend) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PacedUnit(unit_numel, spend) for _ in range(num_units))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x``, [samples, 1]."""
        for block in self.blocks:
            x = block(x)
        return x.sum(), torch.tensor(len(x))

    def units(self) -> list[nn.Module]:
        """In order of execution."""
        return list(self.blocks)

    def set_pace(self, forward_s_per_sample: float) -> None:
        """Of every unit, from now on."""
        for block in self.blocks:
            block.forward_s_per_sample = forward_s_per_sample


def step_seconds(num_units: int, num_samples: int, forward_s_per_sample: float) -> float:
    """What the compute of a step is meant to take on one rank."""
    return num_units * num_samples * forward_s_per_sample * (1 + BACKWARD_OVER_FORWARD)
