"""Workloads of encoders (BERT, ViT) as counts, without torch.

Their blocks are those of ``Workload.transformer`` with LayerNorm and GELU, except that only
the norms have biases.
"""

from dataclasses import replace

from shardhet.records.workload import ITEMSIZE_BY_DTYPE, UnitKind, Workload

FLOAT32_BYTES = 4


def masked_lm(
    *,
    num_layers: int,
    width: int,
    num_heads: int,
    hidden_width: int,
    vocab_size: int,
    seq_len: int,
    param_dtype: str = "float32",
) -> Workload:
    """A masked language model, as BERT."""
    base = Workload.transformer(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        hidden_width=hidden_width,
        vocab_size=vocab_size,
        seq_len=seq_len,
        is_gated=False,
        has_biases=True,
        param_dtype=param_dtype,
    )
    norm, kinds = ((width,), (width,)), base.kind_by_name
    embedding = replace(
        kinds["embedding"], param_shapes=((vocab_size, width), (seq_len, width))
    )
    head = replace(kinds["head"], param_shapes=(*norm, (vocab_size, width)))
    return replace(base, kinds=(embedding, _block(base, width, hidden_width), head))


def vit(
    *,
    num_layers: int,
    width: int,
    num_heads: int,
    hidden_width: int,
    image_side: int,
    patch_side: int,
    num_classes: int,
    param_dtype: str = "float32",
) -> Workload:
    """A vision transformer, as ViT; a token is an image.

    Raises ``ValueError`` if the patches do not tile the image.
    """
    if patch_side < 1 or image_side % patch_side:
        raise ValueError(
            f"workload: patch_side {patch_side} but it must divide the images' {image_side} "
            "pixels. Use one of its divisors."
        )
    num_patches = (image_side // patch_side) ** 2
    base = Workload.transformer(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        hidden_width=hidden_width,
        vocab_size=num_classes,
        seq_len=num_patches,
        is_gated=False,
        has_biases=True,
        param_dtype=param_dtype,
    )
    itemsize = ITEMSIZE_BY_DTYPE[base.param_dtype]
    residual_bytes = num_patches * width * itemsize
    flops = 2 * num_patches * patch_side**2 * width
    embedding = UnitKind(
        name="embedding",
        param_shapes=((num_patches, width), (width, patch_side**2)),
        forward_flops=flops,
        backward_flops=flops,  # pixels need no gradient
        input_bytes=image_side**2 * FLOAT32_BYTES,
        input_grad_bytes=0,
        activation_bytes=image_side**2 * itemsize,  # the patches
        transient_bytes=2 * residual_bytes,
    )
    head = UnitKind(
        name="head",
        param_shapes=((width,), (width,), (num_classes, width)),
        forward_flops=2 * num_classes * width,
        backward_flops=4 * num_classes * width,
        input_bytes=residual_bytes,
        # the norm's statistics, the mean over patches and the log-probabilities
        activation_bytes=2 * num_patches * FLOAT32_BYTES
        + width * itemsize
        + num_classes * FLOAT32_BYTES,
        transient_bytes=2 * residual_bytes + num_classes * (itemsize + 2 * FLOAT32_BYTES),
    )
    block = _block(base, width, hidden_width)
    return replace(base, kinds=(embedding, block, head), tokens_per_sample=1)


def _block(base: Workload, width: int, hidden_width: int) -> UnitKind:
    """The block kind with no biases on its matrices."""
    norm = ((width,), (width,))
    attention = ((3 * width, width), (width, width))
    mlp = ((hidden_width, width), (width, hidden_width))
    return replace(base.kind_by_name["block"], param_shapes=(*norm, *attention, *norm, *mlp))
