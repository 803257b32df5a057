"""Seconds of a unit from the specification of a device.

A unit is priced kernel by kernel, by the roofline of Williams, Waterman and Patterson (2009).
With P the peak FLOP/s of the device in the dtype of compute and B = MEMORY_FRACTION of the
bandwidth of its memory:

- A product of R rows with an N x K matrix takes

      max(2 K (R N + W) / (e P),  bytes of both factors and of the result / B).

  e is the part of the peak that large products reach on this kind of device
  (``shardhet.pricing.efficiency``).  W is the occupancy that small shapes get: results are
  computed in waves of tiles, the last of which is half empty on average, so a product costs W
  elements more than it has (NVIDIA, "Matrix Multiplication Background User's Guide", wave
  quantization).  W is HALF_WAVE_NUMEL, fitted by ``experiments/derived``.
- R follows from the FLOPs: the FLOPs of forward are 2 R N K, summed over the unit's matrices.
  The products of attention, in which there is no parameter, count as rows too.
- Backward computes two products for each one of forward: the gradient of the rows and that
  of the matrix, which a frozen matrix does not have.
- All other kernels read and write memory.  Forward writes and reads once what the unit keeps
  for backward; backward moves twice as much.  Backward also adds the gradient of every
  parameter to a sum in float32.
- On a device that does not hold its clock, a visit that would take t seconds takes
  t (1 + min(s t, MAX_SLOWDOWN - 1)).
- No kernel takes less than KERNEL_S, and a visit has KERNELS_PER_UNIT or more.

How long the host takes to launch them is not in here, but in ``shardhet.pricing.derive``.
"""

from dataclasses import dataclass
from math import prod
from typing import Self

from shardhet.pricing.efficiency import HALVES, Efficiency
from shardhet.records.kinds import DeviceKind
from shardhet.records.workload import ITEMSIZE_BY_DTYPE, UnitKind

MEMORY_FRACTION = 0.8  # of the memory's bandwidth that streaming kernels reach
HALF_WAVE_NUMEL, HALF_WAVE_NUMEL_16_BITS = 7e4, 5e5  # tiles are larger in 16 bits
MAX_SLOWDOWN = 3.0  # the largest that was measured is 2.7, of an L4 in float32
ACTIVATION_PASSES = 2  # every activation is written once and read once
BACKWARD_FACTOR = 2  # of what backward moves over what forward does
# Of a parameter: the gradient is read, and the sum in float32 is read and written.  A gradient
# in 16 bits is first converted to float32.
GRAD_BYTES, GRAD_BYTES_16_BITS = 12, 18
KERNEL_S = 1e-5
KERNELS_PER_UNIT = 20  # of a transformer block, forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The peaks of a device in one dtype."""

    flops_per_s: float
    bytes_per_s: float
    itemsize: int
    half_wave_numel: float
    grad_bytes: int  # moved per parameter and microbatch

    @classmethod
    def of(cls, kind: DeviceKind, dtype: str) -> Self:
        """From a specification; raises ``ValueError`` if the kind lacks the dtype."""
        is_half = dtype in HALVES
        return cls(
            flops_per_s=kind.peak(dtype),
            bytes_per_s=MEMORY_FRACTION * kind.memory_bandwidth_bytes_per_s,
            itemsize=ITEMSIZE_BY_DTYPE[dtype],
            half_wave_numel=HALF_WAVE_NUMEL_16_BITS if is_half else HALF_WAVE_NUMEL,
            grad_bytes=GRAD_BYTES_16_BITS if is_half else GRAD_BYTES,
        )

    def forward_s(self, unit: UnitKind, size: int, efficiency: Efficiency) -> float:
        """Seconds of the unit's forward on a microbatch of this size."""
        rows, matrices = _rows(unit, size), matrices_of(unit)
        products_s = sum(
            self._product_s(rows, depth=depth, width=width, part=efficiency.forward)
            for width, depth, _ in matrices
        )
        return self._visit_s(products_s + self._moved_s(unit, size), 1, efficiency)

    def backward_s(self, unit: UnitKind, size: int, efficiency: Efficiency) -> float:
        """Seconds of the unit's backward on a microbatch of this size."""
        rows, matrices = _rows(unit, size), matrices_of(unit)
        part = efficiency.backward
        products_s = sum(
            self._product_s(rows, depth=width, width=depth, part=part)
            + is_trained * self._product_s(width, depth=rows, width=depth, part=part)
            for width, depth, is_trained in matrices
            if unit.backward_flops
        )
        moved_s = BACKWARD_FACTOR * self._moved_s(unit, size)
        moved_s += unit.trained_numel * self.grad_bytes / self.bytes_per_s
        return self._visit_s(products_s + moved_s, BACKWARD_FACTOR, efficiency)

    def _product_s(self, rows: float, *, depth: float, width: float, part: float) -> float:
        """Seconds of the product of [rows, depth] with [depth, width]."""
        if not rows * depth * width:
            return 0.0
        flops = 2 * depth * (rows * width + self.half_wave_numel)
        nbytes = self.itemsize * (rows * depth + depth * width + rows * width)
        return max(flops / (part * self.flops_per_s), nbytes / self.bytes_per_s)

    def _moved_s(self, unit: UnitKind, size: int) -> float:
        nbytes = ACTIVATION_PASSES * size * (unit.activation_bytes + unit.input_bytes)
        return nbytes / self.bytes_per_s

    def _visit_s(self, seconds: float, factor: int, efficiency: Efficiency) -> float:
        slowed_s = seconds * (1 + min(efficiency.slowdown_per_s * seconds, MAX_SLOWDOWN - 1))
        return max(slowed_s, factor * KERNELS_PER_UNIT * KERNEL_S)


def matrices_of(unit: UnitKind) -> list[tuple[int, int, bool]]:
    """Width and depth of every product with a parameter, and whether the parameter is trained.

    Empty if the unit does not multiply at all.
    """
    if not unit.forward_flops:
        return []
    frozen = frozenset(unit.frozen_params)
    return [
        (shape[0], prod(shape[1:]), i not in frozen)
        for i, shape in enumerate(unit.param_shapes)
        if len(shape) > 1
    ]


def _rows(unit: UnitKind, size: int) -> float:
    numel = sum(width * depth for width, depth, _ in matrices_of(unit))
    return size * unit.forward_flops / (2 * numel) if numel else 0.0
