"""Two bidirectional models: a masked language model and an image classifier.

    tokens -> embedding -> blocks -> head -> (loss_sum, num_tokens)                 MaskedLm
    pixels -> embedding -> blocks -> head -> (loss_sum, num_images, num_correct)    Vit

The blocks are those of BERT and ViT, with a norm before each part.  As in the decoder, the
head contains the loss, and every module with parameters of its own has ``reset_parameters``.

Shape suffixes: B batch, T tokens or patches, D width, V vocabulary or classes, H heads,
C channels of one head, S side of an image, P pixels of a patch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardhet.models.decoder import Projection, next_token_loss

EMBEDDING_INIT_STD = 0.3  # as in the decoder; learned positions start much smaller
POSITION_INIT_STD = 0.02  # as in BERT


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The shape of the blocks."""

    width: int
    num_layers: int
    num_heads: int
    hidden_width: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.num_heads != 0:
            raise ValueError(
                f"width: {self.width} but it must be a multiple of num_heads {self.num_heads}. "
                "Change one of them."
            )


class EncoderBlock(nn.Module):
    """Attention to all positions, then an MLP with GELU, each after a norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.width
        out_init_gain = (2 * config.num_layers) ** -0.5
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = Projection(width, 3 * width)
        self.attention_out = Projection(width, width, init_gain=out_init_gain)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = Projection(width, config.hidden_width)
        self.mlp_out = Projection(config.hidden_width, width, init_gain=out_init_gain)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self._attend(self.attention_norm(x_BTD)))
        hidden_BTF = F.gelu(self.mlp_in(self.mlp_norm(x_BTD)))
        return x_BTD + self.dropout(self.mlp_out(hidden_BTF))

    def _attend(self, x_BTD: Tensor) -> Tensor:
        qkv_BTHC = self.qkv(x_BTD).unflatten(-1, (3 * self.num_heads, -1))
        q_BHTC, k_BHTC, v_BHTC = qkv_BTHC.transpose(1, 2).chunk(3, dim=1)
        mixed_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BHTC, v_BHTC)
        return self.attention_out(mixed_BHTC.transpose(1, 2).flatten(2))


class TokenEmbedding(nn.Module):
    """The sum of one row per token and one row per position."""

    def __init__(self, vocab_size: int, seq_len: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(vocab_size, width))
        self.position = nn.Parameter(torch.empty(seq_len, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token, std=EMBEDDING_INIT_STD)
        nn.init.normal_(self.position, std=POSITION_INIT_STD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.token) + self.position[: tokens_BT.shape[1]]


class TokenHead(nn.Module):
    """Returns the summed loss over the masked positions, and their number."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = Projection(width, vocab_size, init_gain=0.5)

    def forward(self, x_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        return next_token_loss(self.projection(self.norm(x_BTD)), targets_BT)


class MaskedLm(nn.Module):
    """A masked language model: predicts the tokens at masked positions, as BERT does."""

    def __init__(self, config: EncoderConfig, *, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, seq_len, config.width)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.head = TokenHead(config.width, vocab_size)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        loss_sum, num_tokens = self.head(x_BTD, targets_BT)
        return loss_sum, num_tokens


class PatchEmbedding(nn.Module):
    """Square patches, each projected to the width, plus one row per position."""

    def __init__(self, image_side: int, patch_side: int, width: int) -> None:
        super().__init__()
        if image_side % patch_side != 0:
            raise ValueError(
                f"patch_side: {patch_side} but it must divide the images' {image_side} pixels. "
                "Use one of its divisors."
            )
        self.patch_side = patch_side
        self.projection = Projection(patch_side**2, width)
        self.position = nn.Parameter(torch.empty((image_side // patch_side) ** 2, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position, std=POSITION_INIT_STD)

    def forward(self, images_BSS: Tensor) -> Tensor:
        side = self.patch_side
        patches = images_BSS.unfold(1, side, side).unfold(2, side, side)
        patches_BTP = patches.flatten(3).flatten(1, 2).to(self.position.dtype)
        return self.projection(patches_BTP) + self.position


class ClassHead(nn.Module):
    """Returns the summed loss and the numbers of images and hits; pools over positions."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = Projection(width, num_classes, init_gain=0.5)

    def forward(self, x_BTD: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_BV = self.projection(self.norm(x_BTD).mean(dim=1))
        loss_dtype = torch.promote_types(logits_BV.dtype, torch.float32)
        loss_sum = F.cross_entropy(logits_BV.to(loss_dtype), labels_B, reduction="sum")
        num_correct = (logits_BV.argmax(dim=1) == labels_B).sum()
        return loss_sum, (labels_B >= 0).sum(), num_correct


class Vit(nn.Module):
    """A vision transformer over square images of one channel."""

    def __init__(
        self, config: EncoderConfig, *, image_side: int, patch_side: int, num_classes: int
    ) -> None:
        super().__init__()
        self.embedding = PatchEmbedding(image_side, patch_side, config.width)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.head = ClassHead(config.width, num_classes)

    def forward(self, images_BSS: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_BTD = self.embedding(images_BSS)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        loss_sum, num_images, num_correct = self.head(x_BTD, labels_B)
        return loss_sum, num_images, num_correct
