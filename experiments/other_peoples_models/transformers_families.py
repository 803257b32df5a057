"""Models of transformers, of text, pictures and sound: those of families.yaml."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from experiments.other_peoples_models import tasks
from experiments.other_peoples_models.records import Family
from experiments.other_peoples_models.tasks import IMAGE, IMAGE_SIDE, Task

OWN = ("coarse_units", "is_moe", "has_attentions", "has_batch_norm", "is_random")
WITH_DROPOUT = (tasks.MASKED_WORD, tasks.SENTENCE, tasks.TRANSLATION)  # as they come
WITH_ATTENTIONS = (*WITH_DROPOUT, tasks.NEXT_WORD, tasks.SPECTRUM)


def _families() -> Iterator[Family]:
    known = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
    for group in known["groups"]:
        task: Task = getattr(tasks, group["task"])
        for name, (class_name, base, changes) in group["families"].items():
            own: dict[str, Any] = {
                "has_attentions": task in WITH_ATTENTIONS,
                "is_random": task in WITH_DROPOUT,
                **{key: changes.pop(key) for key in OWN if key in changes},
            }
            lora = tuple(changes.pop("lora", ()))
            make = _maker(class_name + group.get("ending", ""), known["bases"][base] | changes)
            if class_name == "CLIPModel":
                make = _clip(known["bases"])
                own |= {
                    "logits": lambda out: torch.stack((out.text_embeds, out.image_embeds), 1),
                    "takes_no_default": True,
                }
            own["coarse_units"] = tuple(own.get("coarse_units", ()))
            side = (1 + own.get("has_batch_norm", False)) * IMAGE_SIDE
            yield Family(
                name=name,
                source="transformers",
                task=task,
                make=make,
                seq_len=side if task is IMAGE else 11,
                lora_targets=lora,
                **own,
            )


def _maker(class_name: str, config: Mapping[str, Any]) -> Callable[..., nn.Module]:
    def make(**changes: Any) -> nn.Module:
        import transformers

        model_class = getattr(transformers, class_name)
        return model_class(model_class.config_class(**{**config, **changes}))

    return make


def _clip(bases: Mapping[str, Any]) -> Callable[..., nn.Module]:
    def make(**changes: Any) -> nn.Module:
        from transformers import CLIPConfig, CLIPModel

        text = {**bases["tokens"], **bases["small"], "max_position_embeddings": 16}
        configs = {"text_config": text, "vision_config": bases["vit"]}
        both = {"projection_dim": 16, **changes}
        made = {name: {**each, **both} for name, each in configs.items()}
        return CLIPModel(CLIPConfig(**made, projection_dim=16))

    return make


TRANSFORMERS = tuple(_families())
