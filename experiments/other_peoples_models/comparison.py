"""Two runs held against each other, step by step."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan

from torch import Tensor

from shardhet.records.layout import Span

MISMATCH = float("inf")  # None for a gradient, another shape, another name


@dataclass(kw_only=True)
class Step:
    """What a step of plain torch leaves."""

    loss: float
    norm: float
    grads: dict[str, Tensor | None]  # before clipping
    params: dict[str, Tensor]  # after the optimizer
    buffers: dict[str, Tensor]
    logits: Tensor | None = None  # of the evaluation before it


@dataclass(kw_only=True)
class Errors:
    """The largest differences seen so far, relative."""

    unit_by_param: Mapping[str, str]
    by_quantity: dict[str, float] = field(
        default_factory=lambda: {"loss": 0.0, "grad": 0.0, "state": 0.0}
    )
    worst: dict[str, str] = field(default_factory=dict)  # where these are

    def see(self, quantity: str, error: float, where: str) -> None:
        """Take an error in; what is no number counts as a mismatch."""
        error = MISMATCH if isnan(error) else error
        if error > self.by_quantity[quantity]:
            self.by_quantity[quantity] = error
            self.worst[quantity] = where

    def see_number(self, quantity: str, found: float, expected: float, where: str) -> None:
        """Relative to what was expected."""
        self.see(quantity, abs(found - expected) / max(abs(expected), 1e-30), where)

    def see_rows(
        self,
        quantity: str,
        found: Mapping[str, Tensor | None],
        expected: Mapping[str, Tensor | None],
        rows: Mapping[str, Span] | None,
        where: str,
    ) -> None:
        """Tensors, or this rank's rows of them, relative to the largest of their unit, or of
        the buffers of their module: a mean that is zero beside its variance is rounding.
        """
        if found.keys() != expected.keys():
            names = sorted(found.keys() ^ expected.keys())
            self.see(quantity, MISMATCH, f"{where}: one of two has {names[:3]}")
            return
        largest = self._largest(expected)
        for name, tensor in expected.items():
            own = found[name]
            if own is None or tensor is None:
                if (own is None) != (tensor is None):
                    text = "None" if own is None else "a tensor"
                    self.see(quantity, MISMATCH, f"{where}: {name} is {text}")
                continue
            part = tensor if rows is None else _rows(tensor, rows[name])
            if own.shape != part.shape:
                self.see(quantity, MISMATCH, f"{where}: {name} has {tuple(own.shape)}")
            elif part.numel():
                scale = largest[self._unit(name, tensor)]
                error = float((own.double() - part.double()).abs().max())
                self.see(quantity, error / max(scale, 1e-30), f"{where}: {name}")

    def _unit(self, name: str, tensor: Tensor) -> str:
        own = name.rpartition(".")[0] if tensor.is_floating_point() else name
        return self.unit_by_param.get(name, own)

    def _largest(self, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
        largest: dict[str, float] = {}
        for name, tensor in tensors.items():
            if tensor is not None and tensor.numel():
                unit = self._unit(name, tensor)
                largest[unit] = max(largest.get(unit, 0.0), float(tensor.double().abs().max()))
        return largest


def compare_steps(
    found: Sequence[Step], expected: Sequence[Step], unit_by_param: Mapping[str, str]
) -> Errors:
    """Two runs of plain torch."""
    errors = Errors(unit_by_param=unit_by_param)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        errors.see_number("loss", one.loss, other.loss, f"step {i}")
        errors.see_rows("grad", one.grads, other.grads, None, f"step {i}")
        errors.see_rows("state", dict(one.params), dict(other.params), None, f"step {i}")
    return errors


def _rows(tensor: Tensor, rows: Span) -> Tensor:
    whole = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return whole[rows.start : rows.stop]


def quiet() -> None:
    """No warnings of other packages from here on."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they are now."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def sum_in_order(grads: Sequence[Tensor | None]) -> Tensor | None:
    """The sum in the given order; None where all are."""
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    total = present[0].clone()
    for grad in present[1:]:
        total += grad
    return total


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest number expected."""
    if found.shape != expected.shape:
        return MISMATCH
    if not expected.numel():
        return 0.0
    scale = max(float(expected.double().abs().max()), 1e-30)
    return float((found.double() - expected.double()).abs().max()) / scale
