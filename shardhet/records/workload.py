"""The model to train, as counts and bytes: its units and what one sample costs in each.

Units of one kind (the blocks of a transformer) are alike and are described once.  The
numbers are per sample, so that they apply to any microbatch; what does not grow with the
microbatch (parameters, gradients) follows from the shapes.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, Self

from shardhet.records.codec import OMITTABLE, Bounds, Count, Document, PositiveInt, repeated
from shardhet.records.layout import FlatLayout
from shardhet.records.plan import HoldsFor, PlannedUnit
from shardhet.records.units import FLOAT32_BYTES, DecoderShape, UnitKind

__all__ = ["FLOAT32_BYTES", "ITEMSIZE_BY_DTYPE", "Unit", "UnitKind", "Workload"]

ITEMSIZE_BY_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit of the model; fqn ``""`` is the root, which is unsharded for the whole step."""

    fqn: str
    kind: str  # the name of a UnitKind


@dataclass(frozen=True, kw_only=True)
class Workload(Document):
    """A model, its units in order of execution, and the precision it is trained in."""

    document_name: ClassVar[str] = "workload"
    document_version: ClassVar[int] = 1
    kinds: tuple[UnitKind, ...]
    units: tuple[Unit, ...]
    tokens_per_sample: PositiveInt = 1  # for throughput
    param_dtype: str = "float32"  # of parameters in flight and of compute
    reduce_dtype: str = "float32"  # of gradients while they are reduced
    # The mean over all elements: 16 is a float32 parameter, its gradient and two Adam moments.
    state_bytes_per_element: Annotated[float, Bounds(minimum=0.5, maximum=1e4)] = 16.0
    num_moments: Annotated[Count, OMITTABLE] = 2  # that the optimizer keeps per parameter

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.kinds]
        fqns = [unit.fqn for unit in self.units]
        for values, what in ((names, "kinds"), (fqns, "units")):
            twice = [repr(value) for value in repeated(values)]
            if twice:
                raise ValueError(
                    f"workload: {what} {', '.join(twice)} appear twice. Name each once."
                )
        unknown = sorted({unit.kind for unit in self.units} - set(names))
        if unknown or not self.units:
            raise ValueError(
                f"workload: it has {len(self.units)} units, of unknown kinds {unknown}. List "
                "at least one unit, and describe the kind of each in kinds."
            )
        for key in ("param_dtype", "reduce_dtype"):
            if getattr(self, key) not in ITEMSIZE_BY_DTYPE:
                raise ValueError(
                    f"workload: {key} is {getattr(self, key)!r} but must be one of "
                    f"{', '.join(ITEMSIZE_BY_DTYPE)}."
                )
        if self.numel < 1:
            raise ValueError("workload: it has no parameters. Give at least one kind some.")

    @cached_property
    def kind_by_name(self) -> dict[str, UnitKind]:
        """The kinds by name."""
        return {kind.name: kind for kind in self.kinds}

    def kind_of(self, unit: Unit) -> UnitKind:
        """The unit's kind, which says what it holds and costs."""
        return self.kind_by_name[unit.kind]

    @cached_property
    def num_units_by_kind(self) -> dict[str, int]:
        """How many units of each kind compute (the root only holds parameters)."""
        counts = dict.fromkeys((kind.name for kind in self.kinds), 0)
        for unit in self.units:
            counts[unit.kind] += unit.fqn != ""
        return counts

    @cached_property
    def planned_units(self) -> tuple[PlannedUnit, ...]:
        """The description of the model that a plan contains."""
        return tuple(
            PlannedUnit(fqn=unit.fqn, numel=self.kind_of(unit).numel) for unit in self.units
        )

    @cached_property
    def numel(self) -> int:
        """The number of elements in all parameters of the model."""
        return sum(self.kind_of(unit).numel for unit in self.units)

    @cached_property
    def trained_numel(self) -> int:
        """The number of elements in the parameters that have gradients."""
        return sum(self.kind_of(unit).trained_numel for unit in self.units)

    @property
    def grad_bytes_per_element(self) -> float:
        """Bytes of gradients, in ``state_bytes_per_element``, and of each moment.

        With the part t that is trained and k moments, 1 + (1 + k) t tensors of one size.
        """
        trained_part = self.trained_numel / self.numel
        num_tensors = 1 + (1 + self.num_moments) * trained_part
        return trained_part * self.state_bytes_per_element / num_tensors

    @property
    def holds_for(self) -> HoldsFor:
        """What a plan says of the workload that it was made for."""
        return HoldsFor(
            param_dtype=self.param_dtype,
            tokens_per_sample=self.tokens_per_sample,
            num_moments=self.num_moments,
        )

    def with_moments(self, num_moments: int) -> Self:
        """The workload with an optimizer that keeps ``num_moments`` tensors per parameter."""
        more_bytes = (num_moments - self.num_moments) * self.grad_bytes_per_element
        return replace(
            self,
            num_moments=num_moments,
            state_bytes_per_element=self.state_bytes_per_element + more_bytes,
        )

    def gathered_bytes(self, kind: UnitKind) -> int:
        """Bytes of all parameters of one unit when they are communicated."""
        if kind.gathered_bytes is not None:
            return kind.gathered_bytes
        return kind.numel * self.param_itemsize

    @cached_property
    def frozen_units(self) -> tuple[Unit, ...]:
        """The units with frozen parameters, in order of execution."""
        return tuple(unit for unit in self.units if self.frozen_bytes(self.kind_of(unit)))

    def frozen_bytes(self, kind: UnitKind) -> int:
        """Bytes of the frozen parameters of one unit when they are communicated."""
        if not kind.frozen_params:
            return 0
        return max(0, self.gathered_bytes(kind) - kind.trained_numel * self.param_itemsize)

    def cast_bytes(self, kind: UnitKind) -> int:
        """Bytes of what is gathered of one unit and not stored in the same dtype."""
        as_stored = self.frozen_bytes(kind) if kind.frozen_as_stored else 0
        return self.gathered_bytes(kind) - as_stored

    @property
    def param_itemsize(self) -> int:
        """Bytes of a parameter element when it is communicated."""
        return ITEMSIZE_BY_DTYPE[self.param_dtype]

    @property
    def reduce_itemsize(self) -> int:
        """Bytes of a gradient element while it is reduced."""
        return ITEMSIZE_BY_DTYPE[self.reduce_dtype]

    def layouts(self) -> tuple[FlatLayout, ...]:
        """The flat layout of each unit, in execution order, stored on a single device."""
        return self._layouts

    @cached_property
    def _layouts(self) -> tuple[FlatLayout, ...]:
        by_kind = {kind.name: FlatLayout.of_shapes(kind.param_shapes) for kind in self.kinds}
        return tuple(by_kind[unit.kind] for unit in self.units)

    @classmethod
    def transformer(
        cls,
        *,
        num_layers: int,
        width: int,
        num_heads: int,
        vocab_size: int,
        seq_len: int,
        num_kv_heads: int | None = None,
        hidden_width: int | None = None,
        is_gated: bool = True,
        has_biases: bool = False,
        fuses_norms: bool = False,
        param_dtype: str = "float32",
        reduce_dtype: str = "float32",
        state_bytes_per_element: float = 16.0,
    ) -> Self:
        """A decoder as ``shardhet.models.decoder`` builds it: embedding, blocks, head.

        ``is_gated`` selects SwiGLU (three matrices in the MLP) over GELU (two matrices);
        ``has_biases`` selects the form of GPT-2: biases everywhere and LayerNorm.  Forward
        takes two FLOPs per matrix element and token, with attention over the full T x T
        square; backward takes twice as many (PaLM, appendix B).

        ``fuses_norms`` says that RMSNorm is one kernel, as in torch on CUDA, and not composed
        of several, as on CPU.  Attention is one kernel on both, and keeps no scores.
        """
        for key, value in (("num_layers", num_layers), ("width", width), ("seq_len", seq_len)):
            if value < 1:
                raise ValueError(f"workload: {key} is {value} but must be at least 1.")
        if num_heads < 1 or width % num_heads:
            raise ValueError(
                f"workload: width {width} but it must be a multiple of num_heads {num_heads}."
            )
        shape = DecoderShape(
            width=width,
            num_heads=num_heads,
            kv_width=width // num_heads * (num_kv_heads or num_heads),
            hidden_width=hidden_width or 4 * width,
            vocab_size=vocab_size,
            seq_len=seq_len,
            is_gated=is_gated,
            has_biases=has_biases,
            fuses_norms=fuses_norms,
            itemsize=ITEMSIZE_BY_DTYPE.get(param_dtype, 4),
        )
        blocks = tuple(Unit(fqn=f"blocks.{i}", kind="block") for i in range(num_layers))
        return cls(
            kinds=(shape.embedding(), shape.block(), shape.head()),
            units=(
                Unit(fqn="embedding", kind="embedding"),
                *blocks,
                Unit(fqn="head", kind="head"),
            ),
            tokens_per_sample=seq_len,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            state_bytes_per_element=state_bytes_per_element,
        )
