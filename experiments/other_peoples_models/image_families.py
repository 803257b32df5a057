"""Models with images, models of diffusers, and those whose caches were refused once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.test_ragged import FLAT, LARGE, SMALL, Grid, model_of, sample_of

Sample = dict[str, Tensor]  # of one sample, each tensor with its rows first
IMAGE, LENGTH, PATCHES = 5, 14, 4  # the token of an image; tokens of a text; of an image
GRIDS: Sequence[Sequence[Grid]] = (
    (),
    (LARGE,),
    (FLAT, SMALL),
)  # of a sample with so many images


@dataclass(frozen=True, kw_only=True)
class Pictured:
    """A model in small, and what it is trained on."""

    name: str
    make: Callable[[], nn.Module]
    sample: Callable[[int], Sample]  # with so many images
    least_images: int = 0  # of a sample
    most_images: int = 0
    of_images: tuple[str, ...] = ()  # arguments that are left out where no sample has an image
    ragged: Mapping[str, Any] | None = None  # of HetFSDP, where it does not know the model
    target: str = "input_ids"  # what is learned; words: the next ones
    config: Mapping[str, Any] = field(default_factory=dict)

    def loss(self, output: Any, target: Tensor) -> tuple[Tensor, int]:
        """A sum in float64, and the number of what it is over."""
        found = output.logits if hasattr(output, "logits") else output.sample
        if target.is_floating_point():
            return (found - target).square().sum(), target.numel()
        if found.dim() == 3 and self.target == "input_ids":
            found, target = found[:, :-1], target[:, 1:]
        flat = found.double().flatten(0, -2)
        return F.cross_entropy(flat, target.flatten(), reduction="sum"), target.numel()


TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
}
VISION_OF_TEXT = {"vision_config": VISION, "text_config": TEXT, "image_token_id": IMAGE}


def of_transformers(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Makes a model of transformers from this configuration."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**options)
        torch.manual_seed(5)
        model: nn.Module = getattr(transformers, name)(made).double()
        return model

    return make


def without_dropped_classes(model: nn.Module) -> nn.Module:
    """DiT without the random loss of classes, which it draws outside of units."""
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return model


def of_diffusers(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Makes a model of diffusers."""

    def make() -> nn.Module:
        import diffusers

        torch.manual_seed(5)
        model: nn.Module = getattr(diffusers, name)(**options).double()
        return model

    return make


def words(num_images: int = 0) -> Sample:
    """A text, with tokens for as many images as it has."""
    ids = torch.cat(
        [torch.full((PATCHES * num_images,), IMAGE), torch.randint(10, 40, (LENGTH,))]
    )
    ids = ids[:LENGTH][None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def with_pictures(num_images: int) -> Sample:
    """A text, and the pictures that are in it."""
    return {**words(num_images), "pixel_values": drawn(num_images, 3, 8, 8)}


def with_kinds(num_images: int) -> Sample:
    """The same with the kind of each token, where images come first."""
    found = with_pictures(num_images)
    return {**found, "token_type_ids": (found["input_ids"] != IMAGE).long()}


def with_places(num_images: int) -> Sample:
    """A text, and a place for one picture, which is zero without."""
    pixels = drawn(1, 1, 3, 8, 8) * num_images
    return {**words(num_images), "pixel_values": pixels}


def drawn(*shape: int) -> Tensor:
    """Random numbers in float64."""
    return torch.randn(shape, dtype=torch.float64)


def pictures_by_tokens(batch: Mapping[str, Any]) -> Tensor:
    """How many images each sample has."""
    counts: Tensor = (batch["input_ids"] == IMAGE).sum(1) // PATCHES
    return counts


def noised(num_images: int = 0) -> Sample:
    """As a UNet takes it."""
    return {
        "sample": drawn(1, 4, 8, 8),
        "timestep": torch.randint(0, 1000, (1,)),
        "encoder_hidden_states": drawn(1, 3, 16),
        "target": drawn(1, 4, 8, 8),
    }


def with_classes(num_images: int = 0) -> Sample:
    """As a DiT takes it."""
    return {
        "hidden_states": drawn(1, 4, 8, 8),
        "timestep": torch.randint(0, 1000, (1,)),
        "class_labels": torch.randint(0, 5, (1,)),
        "target": drawn(1, 4, 8, 8),
    }


def packed(num_images: int = 0) -> Sample:
    """As Flux takes it; places of tokens are the same for all samples."""
    return {
        "hidden_states": drawn(1, 6, 4),
        "encoder_hidden_states": drawn(1, 3, 16),
        "pooled_projections": drawn(1, 8),
        "timestep": torch.rand(1, dtype=torch.float64),
        "guidance": torch.rand(1, dtype=torch.float64),
        "target": drawn(1, 6, 4),
    }


def prompted(num_images: int = 0) -> Sample:
    """As SD3 takes it."""
    return {
        "hidden_states": drawn(1, 4, 8, 8),
        "encoder_hidden_states": drawn(1, 3, 16),
        "pooled_projections": drawn(1, 8),
        "timestep": torch.randint(0, 1000, (1,)),
        "target": drawn(1, 4, 8, 8),
    }


def picture(num_images: int = 0) -> Sample:
    """As an autoencoder takes it."""
    return {"sample": drawn(1, 3, 8, 8), "target": drawn(1, 3, 8, 8)}


class Placed(nn.Module):
    """Flux with places of tokens that are made in the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **more: Any) -> Any:
        """Of the inner model."""
        lengths = encoder_hidden_states.shape[1], hidden_states.shape[1]
        texts, images = (
            torch.stack([torch.arange(n)] * 3, 1).double().to(hidden_states.device)
            for n in lengths
        )
        return self.inner(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            txt_ids=texts,
            img_ids=images,
            **more,
        )


RAGGED = {"pixel_values": pictures_by_tokens}
T5: dict[str, Any] = {
    "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def translated(num_images: int = 0) -> Sample:
    """A text and its translation."""
    return {**words(), "decoder_input_ids": torch.randint(10, 40, (1, 6))}


def heard(num_images: int = 0) -> Sample:
    """Features of sound, and what is said."""
    return {
        "input_features": drawn(1, 16, 8),
        "decoder_input_ids": torch.randint(10, 40, (1, 6)),
    }


def judged(num_images: int = 0) -> Sample:
    """A text and its reward."""
    return {**words(), "target": drawn(1, 1)}


FAMILIES = (
    Pictured(
        name="Qwen2-VL",
        make=lambda: model_of("qwen2_vl"),
        sample=lambda n: sample_of(GRIDS[n]),
        most_images=2,
        of_images=("pixel_values", "image_grid_thw"),
    ),
    Pictured(
        name="Qwen2.5-VL",
        make=lambda: model_of("qwen2_5_vl"),
        sample=lambda n: sample_of(GRIDS[n]),
        most_images=2,
        of_images=("pixel_values", "image_grid_thw"),
    ),
    Pictured(
        name="LLaVA",
        make=of_transformers(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            **{
                **VISION_OF_TEXT,
                "vision_config": {**VISION, "model_type": "clip_vision_model"},
            },
        ),
        sample=with_pictures,
        most_images=2,
        of_images=("pixel_values",),
        ragged=RAGGED,
    ),
    Pictured(
        name="PaliGemma",
        make=of_transformers(
            "PaliGemmaForConditionalGeneration",
            "PaliGemmaConfig",
            **{
                **VISION_OF_TEXT,
                "vision_config": {
                    **VISION,
                    "projection_dim": 16,
                    "model_type": "siglip_vision_model",
                },
                "text_config": {**TEXT, "model_type": "gemma"},
                "projection_dim": 16,
                "hidden_size": 16,
            },
        ),
        sample=with_kinds,
        most_images=1,
        of_images=("pixel_values",),
        ragged=RAGGED,
    ),
    Pictured(
        name="SmolVLM",
        make=of_transformers(
            "SmolVLMForConditionalGeneration",
            "SmolVLMConfig",
            **{
                **VISION_OF_TEXT,
                "text_config": {**TEXT, "model_type": "llama"},
                "scale_factor": 1,
            },
        ),
        sample=with_places,
        most_images=1,
        of_images=("pixel_values",),
    ),
    Pictured(
        name="SmolVLM, one image each",
        make=of_transformers(
            "SmolVLMForConditionalGeneration",
            "SmolVLMConfig",
            **{
                **VISION_OF_TEXT,
                "text_config": {**TEXT, "model_type": "llama"},
                "scale_factor": 1,
            },
        ),
        sample=with_places,
        least_images=1,
        most_images=1,
        of_images=("pixel_values",),
    ),
    Pictured(
        name="UNet2DCondition",
        make=of_diffusers(
            "UNet2DConditionModel",
            sample_size=8,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=16,
            attention_head_dim=4,
            norm_num_groups=4,
        ),
        sample=noised,
        target="target",
    ),
    Pictured(
        name="DiT",
        make=lambda: without_dropped_classes(
            of_diffusers(
                "DiTTransformer2DModel",
                num_attention_heads=2,
                attention_head_dim=8,
                in_channels=4,
                out_channels=4,
                num_layers=2,
                sample_size=8,
                num_embeds_ada_norm=5,
            )()
        ),
        sample=with_classes,
        target="target",
    ),
    Pictured(
        name="Flux",
        make=lambda: Placed(
            of_diffusers(
                "FluxTransformer2DModel",
                in_channels=4,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=12,
                num_attention_heads=2,
                joint_attention_dim=16,
                pooled_projection_dim=8,
                guidance_embeds=True,
                axes_dims_rope=(4, 4, 4),
            )()
        ),
        sample=packed,
        target="target",
    ),
    Pictured(
        name="SD3",
        make=of_diffusers(
            "SD3Transformer2DModel",
            sample_size=8,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=8,
            pos_embed_max_size=8,
        ),
        sample=prompted,
        target="target",
    ),
    Pictured(
        name="AutoencoderKL",
        make=of_diffusers(
            "AutoencoderKL",
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            norm_num_groups=4,
            sample_size=8,
        ),
        sample=picture,
        target="target",
    ),
    Pictured(
        name="LLaVA-OneVision",
        make=of_transformers(
            "LlavaOnevisionForConditionalGeneration",
            "LlavaOnevisionConfig",
            **{
                **VISION_OF_TEXT,
                "vision_config": {**VISION, "model_type": "siglip_vision_model"},
                "text_config": {**TEXT, "model_type": "qwen2"},
            },
        ),
        sample=words,
    ),
    Pictured(
        name="Mllama",
        make=of_transformers(
            "MllamaForConditionalGeneration",
            "MllamaConfig",
            text_config={**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]},
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
                "vision_output_dim": 32,
                "intermediate_layers_indices": [0],
            },
            image_token_id=IMAGE,
        ),
        sample=words,
    ),
    Pictured(
        name="ESM",
        make=of_transformers(
            "EsmForMaskedLM",
            "EsmConfig",
            **{**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            position_embedding_type="rotary",
        ),
        sample=words,
    ),
    Pictured(
        name="LongT5",
        make=of_transformers("LongT5ForConditionalGeneration", "LongT5Config", **T5),
        sample=translated,
        target="decoder_input_ids",
    ),
    Pictured(
        name="Speech2Text",
        make=of_transformers(
            "Speech2TextForConditionalGeneration",
            "Speech2TextConfig",
            vocab_size=40,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            conv_channels=16,
            input_feat_per_channel=8,
            dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            pad_token_id=0,
        ),
        sample=heard,
        target="decoder_input_ids",
    ),
    Pictured(
        name="Jamba",
        make=of_transformers(
            "JambaForCausalLM",
            "JambaConfig",
            **{name: value for name, value in TEXT.items() if name != "head_dim"},
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            num_experts=2,
            num_experts_per_tok=1,
            use_mamba_kernels=False,
            mamba_d_state=4,
            experts_implementation="eager",
        ),
        sample=words,
    ),
    Pictured(
        name="reward model",
        make=of_transformers(
            "LlamaForSequenceClassification", "LlamaConfig", **TEXT, num_labels=1
        ),
        sample=judged,
        target="target",
    ),
)
