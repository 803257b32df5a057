"""Models of pictures and of sound, and those of timm, torchvision and torch itself."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.other_peoples_models.records import Family, Task
from experiments.other_peoples_models.tasks import (
    DICTATION,
    IMAGE,
    IMAGE_SIDE,
    NUM_CLASSES,
    NUM_WORDS,
    PAIR,
    SEQUENCE_FIRST,
    SEQUENCES_FIRST,
    SPECTRUM,
    SPEECH,
    TIMM_IMAGE,
)
from experiments.other_peoples_models.text_families import transformers_maker

TORCHVISION_FOLDER = "TORCHVISION_FOLDER"  # of the environment: where to look for it, too

_VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIDE,
    "patch_size": 16,  # so 4 patches, and 5 tokens: as many as samples of a rank
    "num_labels": NUM_CLASSES,
}
_TEXT_TOWER = {
    "vocab_size": NUM_WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "projection_dim": 16,
}
_WAVES = {
    "vocab_size": NUM_CLASSES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_labels": NUM_CLASSES,
    "classifier_proj_size": 16,
    "ctc_zero_infinity": True,
    "ctc_loss_reduction": "mean",  # over samples; as it comes it is a sum, not to be multiplied
    "pad_token_id": 0,
    "mask_time_length": 2,
}
_CALM = {"apply_spec_augment": False, "layerdrop": 0.0}
_WHISPER = {
    "vocab_size": NUM_WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 11,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def _family(
    name: str,
    class_name: str,
    task: Task,
    base: Mapping[str, Any],
    *,
    lora: tuple[str, ...] = (),
    has_attentions: bool = False,
    has_batch_norm: bool = False,
    is_random: bool = False,
    **config: Any,
) -> Family:
    is_picture = task is IMAGE
    return Family(
        seq_len=(2 if has_batch_norm else 1) * IMAGE_SIDE if is_picture else 11,
        name=name,
        source="transformers",
        task=task,
        make=transformers_maker(class_name, base, **config),
        lora_targets=lora,
        has_attentions=has_attentions,
        has_batch_norm=has_batch_norm,
        is_random=is_random,
    )


def _clip(**changes: Any) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    vision = {**_VIT, "projection_dim": 16}
    return CLIPModel(
        CLIPConfig(
            text_config={**_TEXT_TOWER, **changes},
            vision_config={**vision, **changes},
            projection_dim=16,
        )
    )


PICTURES = (
    _family("ViT", "ViTForImageClassification", IMAGE, _VIT, lora=("q_proj", "v_proj")),
    _family("DeiT", "DeiTForImageClassification", IMAGE, _VIT),
    _family(
        "DINOv2",
        "Dinov2ForImageClassification",
        IMAGE,
        _VIT,
        drop_path_rate=0.1,
        is_random=True,
    ),
    _family("BEiT", "BeitForImageClassification", IMAGE, _VIT, is_random=True),
    _family(
        "Swin",
        "SwinForImageClassification",
        IMAGE,
        {"image_size": IMAGE_SIDE, "patch_size": 4, "embed_dim": 16, "num_labels": NUM_CLASSES},
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        is_random=True,
    ),
    _family(
        "ConvNeXt",
        "ConvNextForImageClassification",
        IMAGE,
        {"num_labels": NUM_CLASSES, "image_size": IMAGE_SIDE, "patch_size": 2},
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1],
        num_stages=4,
    ),
    _family(
        "ResNet",
        "ResNetForImageClassification",
        IMAGE,
        {"num_labels": NUM_CLASSES, "embedding_size": 8},
        hidden_sizes=[16, 24],
        depths=[2, 2],
        layer_type="basic",
        has_batch_norm=True,
    ),
    Family(
        name="CLIP",
        source="transformers",
        task=PAIR,
        make=_clip,
        logits=lambda output: torch.stack((output.text_embeds, output.image_embeds), 1),
        takes_no_default=True,
        is_random=False,
    ),
)

SOUND = (
    Family(
        name="Whisper",
        source="transformers",
        task=SPECTRUM,
        make=transformers_maker("WhisperForConditionalGeneration", _WHISPER),
        is_random=False,
        has_attentions=True,
    ),
    _family("Wav2Vec2", "Wav2Vec2ForCTC", DICTATION, {**_WAVES, **_CALM}, is_random=True),
    _family("Wav2Vec2, as it comes", "Wav2Vec2ForCTC", DICTATION, _WAVES, is_random=True),
    _family(
        "HuBERT",
        "HubertForSequenceClassification",
        SPEECH,
        {**_WAVES, **_CALM},
        is_random=True,
    ),
)


# Of other packages


def find_torchvision() -> None:
    """Make ``import torchvision`` work where it lies in a folder of its own.

    A build for another torch has operators that do not load; its models do without them.
    """
    folder = os.environ.get(TORCHVISION_FOLDER)
    if folder is None or "torchvision" in sys.modules:
        return
    sys.path.append(folder)
    register_fake = torch.library.register_fake

    def tolerant(op: Any, *args: Any, **options: Any) -> Callable[[Any], Any]:
        def register(function: Any) -> Any:
            try:
                return register_fake(op, *args, **options)(function)
            except RuntimeError:  # there is no such operator
                return function

        return register

    torch.library.register_fake = tolerant  # type: ignore[assignment]
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = register_fake


def _of_output(output: Tensor) -> Tensor:
    return output


def _of_timm(name: str, **options: Any) -> Callable[..., nn.Module]:
    def make(**changes: Any) -> nn.Module:
        find_torchvision()
        import timm

        return timm.create_model(name, num_classes=NUM_CLASSES, **options, **changes)

    return make


def _picture(name: str, source: str, make: Callable[..., nn.Module], **options: Any) -> Family:
    return Family(
        name=name,
        source=source,
        task=TIMM_IMAGE,
        make=make,
        # Batch norm wants more than one number a channel, of one sample too.
        seq_len=(2 if options.get("has_batch_norm") else 1) * IMAGE_SIDE,
        logits=_of_output,
        **{"is_random": False, **options},
    )


_SMALL_VIT = {
    "img_size": IMAGE_SIDE,
    "patch_size": 16,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
}


def _vision_transformer(**changes: Any) -> nn.Module:
    find_torchvision()
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        IMAGE_SIDE, 16, 2, 4, 32, 48, num_classes=NUM_CLASSES, dropout=0.1, **changes
    )


def _swin(**changes: Any) -> nn.Module:
    find_torchvision()
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        [4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=NUM_CLASSES, **changes
    )


def _conv_next(**changes: Any) -> nn.Module:
    find_torchvision()
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 2)]
    return ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=NUM_CLASSES, **changes)


def _regnet(**changes: Any) -> nn.Module:
    find_torchvision()
    from torchvision.models.regnet import BlockParams, RegNet

    blocks = BlockParams([1, 2], [16, 24], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return RegNet(blocks, NUM_CLASSES, stem_width=8, **changes)


def _efficient_net(**changes: Any) -> nn.Module:
    find_torchvision()
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stages = [
        MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0),
        MBConvConfig(4, 3, 2, 8, 12, 2, 1.0, 1.0),
        MBConvConfig(4, 5, 2, 12, 16, 1, 1.0, 1.0),
    ]
    return EfficientNet(stages, 0.2, last_channel=32, num_classes=NUM_CLASSES, **changes)


TIMM = (
    _picture("timm ViT", "timm", _of_timm("vit_tiny_patch16_224", **_SMALL_VIT)),
    _picture(
        "timm Swin",
        "timm",
        _of_timm(
            "swin_tiny_patch4_window7_224",
            img_size=IMAGE_SIDE,
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
        ),
        is_random=True,
    ),
    _picture(
        "timm ConvNeXt",
        "timm",
        _of_timm("convnext_tiny", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    ),
    _picture(
        "timm ResNet",
        "timm",
        _of_timm("resnet18", channels=(8, 8, 16, 16)),
        has_batch_norm=True,
    ),
)

TORCHVISION = (
    _picture("torchvision ViT", "torchvision", _vision_transformer, is_random=True),
    _picture("torchvision Swin", "torchvision", _swin, is_random=True),
    _picture("torchvision ConvNeXt", "torchvision", _conv_next, is_random=True),
    _picture(
        "torchvision RegNet",
        "torchvision",
        _regnet,
        has_batch_norm=True,
    ),
    _picture(
        "torchvision EfficientNet",
        "torchvision",
        _efficient_net,
        has_batch_norm=True,
        coarse_units=("features",),
        is_random=True,
    ),
)


class Tagger(nn.Module):
    """A word of each vector of a sequence, by ``nn.LSTM`` as it comes: sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 10, num_layers=2, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(20, NUM_CLASSES)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- as nn.LSTM calls it
        output, _ = self.lstm(input)
        return self.head(output)


TORCH = (
    Family(
        name="nn.Transformer",
        source="torch",
        task=SEQUENCES_FIRST,
        make=lambda: nn.Transformer(12, 2, 2, 2, 24),
        batch_dim=1,
        logits=_of_output,
    ),
    Family(
        name="nn.LSTM",
        source="torch",
        task=SEQUENCE_FIRST,
        make=Tagger,
        batch_dim=1,
        logits=_of_output,
    ),
    Family(
        name="nn.LSTM, alone",
        source="torch",
        task=SEQUENCE_FIRST,
        make=lambda: nn.LSTM(12, NUM_CLASSES),
        batch_dim=1,
        logits=lambda output: output[0],
        is_random=False,
        takes_loss_fn=False,
    ),
)

OTHERS = (*PICTURES, *SOUND, *TIMM, *TORCHVISION, *TORCH)
