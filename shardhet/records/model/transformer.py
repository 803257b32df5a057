"""The kinds of units of a decoder, from its shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardhet.records.model.unit_kind import MOST_UNTILED, TokenWise, UnitKind

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
