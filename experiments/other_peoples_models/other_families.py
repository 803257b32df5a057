"""Models of timm, torchvision and torch itself."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.other_peoples_models.records import Family
from experiments.other_peoples_models.tasks import (
    IMAGE_SIDE,
    NUM_CLASSES,
    SEQUENCE_FIRST,
    SEQUENCES_FIRST,
    TIMM_IMAGE,
)

TORCHVISION_FOLDER = "TORCHVISION_FOLDER"  # of the environment: where to look for it, too


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


def _picture(source: str, name: str, make: Callable[[], nn.Module], **options: Any) -> Family:
    return Family(
        name=f"{source} {name}",
        source=source,
        task=TIMM_IMAGE,
        make=make,
        # Batch norm wants more than one number a channel, of one sample too.
        seq_len=(1 + options.get("has_batch_norm", False)) * IMAGE_SIDE,
        logits=_of_output,
        **{"is_random": False, **options},
    )


def _of_output(output: Tensor) -> Tensor:
    return output


def _timm(name: str, model_name: str, *, family: dict[str, bool], **config: Any) -> Family:
    def make() -> nn.Module:
        find_torchvision()
        import timm

        return timm.create_model(model_name, num_classes=NUM_CLASSES, **config)

    return _picture("timm", name, make, **family)


TIMM = (
    _timm(
        "ViT",
        "vit_tiny_patch16_224",
        family={},
        img_size=IMAGE_SIDE,
        patch_size=16,
        embed_dim=32,
        depth=2,
        num_heads=4,
    ),
    _timm(
        "Swin",
        "swin_tiny_patch4_window7_224",
        family={"is_random": True},
        img_size=IMAGE_SIDE,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    _timm("ConvNeXt", "convnext_tiny", family={}, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)),
    _timm("ResNet", "resnet18", family={"has_batch_norm": True}, channels=(8, 8, 16, 16)),
)


def _vision_transformer(models: Any) -> nn.Module:
    return models.VisionTransformer(
        IMAGE_SIDE, 16, 2, 4, 32, 48, num_classes=NUM_CLASSES, dropout=0.1
    )


def _swin(models: Any) -> nn.Module:
    return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=NUM_CLASSES)


def _conv_next(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    stages = [block(8, 16, 2), block(16, None, 2)]
    return models.ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=NUM_CLASSES)


def _regnet(models: Any) -> nn.Module:
    blocks = models.regnet.BlockParams(
        [1, 2], [16, 24], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25
    )
    return models.RegNet(blocks, NUM_CLASSES, stem_width=8)


def _efficient_net(models: Any) -> nn.Module:
    block = models.efficientnet.MBConvConfig
    stages = [
        block(1, 3, 1, 8, 8, 1, 1.0, 1.0),
        block(4, 3, 2, 8, 12, 2, 1.0, 1.0),
        block(4, 5, 2, 12, 16, 1, 1.0, 1.0),
    ]
    return models.EfficientNet(stages, 0.2, last_channel=32, num_classes=NUM_CLASSES)


def _torchvision(name: str, make: Callable[[Any], nn.Module], **options: Any) -> Family:
    return _picture("torchvision", name, partial(_with_torchvision, make), **options)


def _with_torchvision(make: Callable[[Any], nn.Module]) -> nn.Module:
    find_torchvision()
    from torchvision import models

    return make(models)


TORCHVISION = (
    _torchvision("ViT", _vision_transformer, is_random=True),
    _torchvision("Swin", _swin, is_random=True),
    _torchvision("ConvNeXt", _conv_next, is_random=True),
    _torchvision("RegNet", _regnet, has_batch_norm=True),
    _torchvision(
        "EfficientNet",
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

OTHERS = (*TIMM, *TORCHVISION, *TORCH)
