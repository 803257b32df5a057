"""What the units of a model hold and cost: those of one kind, and the kinds of a decoder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated

from shardhet.records.codec import OMITTABLE, Count

_FIGURES = (
    "forward_flops",
    "backward_flops",
    "input_bytes",
    "activation_bytes",
    "transient_bytes",
)
MAX_PARAM_NUMEL = 2**48  # far beyond any model; larger values are typing errors
MOST_UNTILED = 16_384  # tokens of a sample; shorter ones are not worth tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWise:
    """What of a kind is computed token by token, and so may be computed in tiles."""

    forward_flops: Count  # per sample: what tiles compute once more in backward
    activation_bytes: Count  # per sample: of the graph, which is then there of one tile
    rest_bytes: Count  # per sample: what needs room beside a running tile


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
    token_wise: TokenWise | None = None  # None: nothing that is worth tiles
    kv_bytes: Annotated[Count, OMITTABLE] = 0  # per sample: keys and values of its attention

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

    def in_tiles(self, num_tiles: int) -> "UnitKind":
        """The kind if its sequences are computed in so many tiles."""
        part = self.token_wise
        if part is None or num_tiles < 2:
            return self
        of_tile = (part.activation_bytes + self.transient_bytes) // num_tiles
        return replace(
            self,
            backward_flops=self.backward_flops + part.forward_flops,
            activation_bytes=max(0, self.activation_bytes - part.activation_bytes),
            transient_bytes=part.rest_bytes + of_tile,
        )

    def of_tokens(self, share: float) -> "UnitKind":
        """The kind for a device that computes this part of the tokens of its samples.

        Keys and values of all tokens are in its graph, and while it runs twice more: as they
        arrive and are put in order, or their gradients are.
        """

        def of(figure: int) -> int:
            return round(share * figure)

        beside, part = 2 * self.kv_bytes, self.token_wise
        received = self.kv_bytes - of(self.kv_bytes)
        if part is not None:
            part = TokenWise(
                forward_flops=of(part.forward_flops),
                activation_bytes=of(part.activation_bytes),
                rest_bytes=of(part.rest_bytes) + beside,
            )
        grads = None if self.input_grad_bytes is None else of(self.input_grad_bytes)
        return replace(
            self,
            forward_flops=of(self.forward_flops),
            backward_flops=of(self.backward_flops),
            input_bytes=of(self.input_bytes),
            input_grad_bytes=grads,
            activation_bytes=of(self.activation_bytes) + received,
            transient_bytes=of(self.transient_bytes) + beside,
            token_wise=part,
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


INDEX_BYTES = 8  # of a token or a target, an int64
FLOAT32_BYTES = 4  # of norms' statistics and of everything in the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
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
            token_wise=self._if_long(
                forward_flops=2 * self.seq_len * sum(prod(shape) for shape in matrices[2:]),
                activation_bytes=self._hidden_bytes(up_width) + self._tiled_norms_bytes(),
                rest_bytes=4 * self.residual_bytes,  # attention's gradients, and the stream's
            ),
            kv_bytes=2 * self.seq_len * self.kv_width * self.itemsize,
        )

    def _if_long(self, **parts: int) -> TokenWise | None:
        return TokenWise(**parts) if self.seq_len >= MOST_UNTILED else None

    def _hidden_bytes(self, up_width: int) -> int:
        """The hidden layer before and after its nonlinearity, and the product if gated."""
        hidden = up_width + (2 if self.is_gated else 1) * self.hidden_width
        return self.seq_len * hidden * self.itemsize

    def _tiled_norms_bytes(self) -> int:
        """What both norms in tiles do not keep: all but their outputs, and the stream between
        attention and MLP, of which the second keeps a float32 copy otherwise.
        """
        if self.has_biases or self.fuses_norms:
            return 0
        return 2 * self._norm_bytes() - (3 if self._upcasts_norms else 2) * self.residual_bytes

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
        elements = residual + qkv_width + rotated + self.width
        per_token = elements * self.itemsize + self.num_heads * self.wide_itemsize
        of_rest = 2 * self._norm_bytes() + self.seq_len * per_token
        return of_rest + self._hidden_bytes(up_width)

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
        # the norm, the log-probabilities, and the targets with the ignored ones masked
        activation_bytes = (
            self._norm_bytes() + logits * self.wide_itemsize + self.seq_len * INDEX_BYTES
        )
        return UnitKind(
            name="head",
            param_shapes=(*self._with_biases([(self.width,)]), (self.vocab_size, self.width)),
            forward_flops=matrix_flops,
            backward_flops=2 * matrix_flops,
            input_bytes=self.residual_bytes + self.seq_len * INDEX_BYTES,
            input_grad_bytes=self.residual_bytes,
            activation_bytes=activation_bytes,
            transient_bytes=self._head_transient_bytes(),
            token_wise=self._if_long(
                forward_flops=matrix_flops,
                activation_bytes=activation_bytes,
                rest_bytes=self.residual_bytes,  # the gradient of its input
            ),
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
