"""The model to train, as counts and bytes: its units and what one sample costs in each.

Units of one kind (the blocks of a transformer) are alike and are described once.  The
numbers are per sample, so that they apply to any microbatch; what does not grow with the
microbatch (parameters, gradients) follows from the shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Annotated, ClassVar, Self

from shardhet.records.codec import OMITTABLE, Bounds, Count, Document, PositiveInt, repeated
from shardhet.records.layout import FlatLayout
from shardhet.records.plan import HoldsFor, PlannedUnit

_FIGURES = (
    "forward_flops",
    "backward_flops",
    "input_bytes",
    "activation_bytes",
    "transient_bytes",
)
ITEMSIZE_BY_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
INDEX_BYTES = 8  # of a token or a target, an int64
MAX_PARAM_NUMEL = 2**48  # far beyond any model; larger values are typing errors
FLOAT32_BYTES = 4  # of norms' statistics and of everything in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    """What every unit of one kind holds, and what one sample costs in it."""

    name: str
    param_shapes: tuple[tuple[int, ...], ...]  # in module order
    forward_flops: Count  # per sample
    backward_flops: Count  # per sample, recomputation not included
    input_bytes: Count  # per sample: kept from forward to backward even if recomputed
    activation_bytes: Count  # per sample: what the unit's graph holds besides its inputs
    transient_bytes: Count  # per sample: what a running microbatch needs besides its graph
    input_grad_bytes: Count | None = None  # those of inputs that have a gradient; None: all
    frozen_params: Annotated[tuple[Count, ...], OMITTABLE] = ()  # indices into param_shapes
    # Whether frozen parameters are stored in the dtype in which they are gathered.
    frozen_as_stored: Annotated[bool, OMITTABLE] = False
    # Of all parameters when gathered; None: each element in the workload's param_dtype.  Packed
    # weights of 4 bits, for instance, are gathered as they are stored.
    gathered_bytes: Count | None = None

    def __post_init__(self) -> None:
        for shape in self.param_shapes:
            if any(dim < 0 for dim in shape) or prod(shape) > MAX_PARAM_NUMEL:
                raise ValueError(
                    f"workload: kind {self.name!r} has a parameter of shape {shape} but no "
                    f"dimension may be negative, and at most {MAX_PARAM_NUMEL} elements are in "
                    "one parameter. Fix the shape."
                )
        if unknown := [i for i in self.frozen_params if not 0 <= i < len(self.param_shapes)]:
            raise ValueError(
                f"workload: kind {self.name!r} has frozen_params {unknown} but "
                f"{len(self.param_shapes)} parameters. Give indices of param_shapes."
            )
        if (self.input_grad_bytes or 0) > self.input_bytes:
            raise ValueError(
                f"workload: kind {self.name!r} has input_grad_bytes "
                f"{self.input_grad_bytes} but input_bytes {self.input_bytes}. Fix the larger."
            )
        for key in _FIGURES:
            if getattr(self, key) < 0:
                raise ValueError(
                    f"workload: kind {self.name!r} has {key} {getattr(self, key)} but it must "
                    "be at least 0. Fix the figure."
                )

    @property
    def numel(self) -> int:
        """The number of elements in all parameters of one unit."""
        return sum(prod(shape) for shape in self.param_shapes)

    @property
    def trained_numel(self) -> int:
        """The number of elements in the parameters that have gradients."""
        return self.numel - sum(prod(self.param_shapes[i]) for i in self.frozen_params)

    @property
    def max_trained_numel(self) -> int:
        """The number of elements in the largest parameter that has a gradient."""
        trained = set(range(len(self.param_shapes))) - set(self.frozen_params)
        return max((prod(self.param_shapes[i]) for i in trained), default=0)

    @property
    def max_row_numel(self) -> int:
        """The number of elements in the longest row; rows are never split."""
        return max((max(1, prod(shape[1:])) for shape in self.param_shapes), default=1)


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
        shape = _Shape(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The shape of a transformer; D width, F hidden width, T tokens, V vocabulary."""

    width: int
    num_heads: int
    kv_width: int
    hidden_width: int
    vocab_size: int
    seq_len: int
    is_gated: bool
    has_biases: bool
    fuses_norms: bool
    itemsize: int

    @property
    def residual_bytes(self) -> int:
        """Bytes of one sample of the residual stream, [T, D]."""
        return self.seq_len * self.width * self.itemsize

    def embedding(self) -> UnitKind:
        """The token embedding, one row per token."""
        return UnitKind(
            name="embedding",
            param_shapes=((self.vocab_size, self.width),),
            forward_flops=0,
            backward_flops=0,
            input_bytes=self.seq_len * INDEX_BYTES,
            input_grad_bytes=0,
            activation_bytes=0,
            transient_bytes=self.residual_bytes,
        )

    def block(self) -> UnitKind:
        """Attention and MLP, each after a norm."""
        qkv_width = self.width + 2 * self.kv_width
        up_width = (2 if self.is_gated else 1) * self.hidden_width
        matrices = [
            (qkv_width, self.width),
            (self.width, self.width),
            (up_width, self.width),
            (self.width, self.hidden_width),
        ]
        attention, mlp = self._with_biases(matrices[:2]), self._with_biases(matrices[2:])
        norm = self._with_biases([(self.width,)])
        matrix_flops = 2 * self.seq_len * sum(prod(shape) for shape in matrices)
        score_flops = 2 * self.seq_len**2 * self.width  # queries times keys; as many for values
        return UnitKind(
            name="block",
            param_shapes=(*norm, *attention, *norm, *mlp),
            forward_flops=matrix_flops + 2 * score_flops,
            backward_flops=2 * (matrix_flops + 2 * score_flops),
            input_bytes=self.residual_bytes,
            activation_bytes=self._block_activation_bytes(qkv_width, up_width),
            # A gated hidden layer needs the gradients of its halves, each padded to the full
            # width, and their sum; an ungated one its gradient before and after the
            # nonlinearity.
            transient_bytes=(3 if self.is_gated else 2)
            * self.seq_len
            * up_width
            * self.itemsize,
        )

    def _block_activation_bytes(self, qkv_width: int, up_width: int) -> int:
        """What a block saves for backward besides its input, in bytes per sample.

        It is what autograd saves with an attention that does not keep its scores:

        - what each norm keeps (``_norm_bytes``);
        - the residual stream between attention and MLP, unless the norm keeps a float32 copy;
        - q, k and v, and q and k once more if they are rotated;
        - the output of the attention and one sum per head;
        - the hidden layer before and after its nonlinearity, and the product if it is gated.
        """
        residual = 0 if self._upcasts_norms else self.width
        rotated = 0 if self.has_biases else self.width + self.kv_width
        hidden = up_width + (2 if self.is_gated else 1) * self.hidden_width
        elements = residual + qkv_width + rotated + self.width + hidden
        per_token = elements * self.itemsize + self.num_heads * self.wide_itemsize
        return 2 * self._norm_bytes() + self.seq_len * per_token

    @property
    def wide_itemsize(self) -> int:
        """Bytes of a number in the norms' statistics and in the loss: at least float32."""
        return max(self.itemsize, FLOAT32_BYTES)

    @property
    def _upcasts_norms(self) -> bool:
        is_composed = not (self.has_biases or self.fuses_norms)
        return is_composed and self.itemsize < FLOAT32_BYTES

    def _norm_bytes(self) -> int:
        """What a norm keeps in the graph besides its input, in bytes per sample.

        LayerNorm keeps its output and two statistics, a fused RMSNorm its output and one.
        RMSNorm as torch composes it on CPU keeps its output before and after scaling, one
        statistic, and a float32 copy of inputs that are narrower than float32.
        """
        if self.has_biases or self.fuses_norms:
            num_statistics = 2 if self.has_biases else 1
            return self.residual_bytes + num_statistics * self.seq_len * self.wide_itemsize
        copies = FLOAT32_BYTES if self._upcasts_norms else 0
        per_token = self.width * (self.itemsize + self.wide_itemsize + copies)
        return self.seq_len * (per_token + self.wide_itemsize)

    def head(self) -> UnitKind:
        """The last norm, the projection to the vocabulary and the loss."""
        logits = self.seq_len * self.vocab_size
        matrix_flops = 2 * logits * self.width
        return UnitKind(
            name="head",
            param_shapes=(*self._with_biases([(self.width,)]), (self.vocab_size, self.width)),
            forward_flops=matrix_flops,
            backward_flops=2 * matrix_flops,
            input_bytes=self.residual_bytes + self.seq_len * INDEX_BYTES,
            input_grad_bytes=self.residual_bytes,
            # the norm, the log-probabilities, and the targets with the ignored ones masked
            activation_bytes=self._norm_bytes()
            + logits * self.wide_itemsize
            + self.seq_len * INDEX_BYTES,
            transient_bytes=self._head_transient_bytes(),
        )

    def _head_transient_bytes(self) -> int:
        """Transient bytes at the fuller of two moments of backward, less what is freed by then.

        Either two gradients of the logits are alive, or (with few logits) the gradients
        inside the norm.
        """
        wide = self.wide_itemsize
        in_loss = 2 * self.vocab_size * wide - INDEX_BYTES
        upcast = self.width * self.itemsize if self._upcasts_norms else 0
        in_norm = 3 * self.width * wide + upcast
        if self.fuses_norms:
            in_norm = 2 * self.width * self.itemsize  # of its output and of its input
        in_norm -= self.vocab_size * wide + INDEX_BYTES + wide
        return self.seq_len * max(in_loss, in_norm)

    def _with_biases(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        if not self.has_biases:
            return tuple(shapes)
        return tuple(part for shape in shapes for part in (shape, shape[:1]))
