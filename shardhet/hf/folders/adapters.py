"""PEFT adapters: how they are initialised on the meta device, and which tensors they save."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

INITIALISERS = (True, "gaussian")  # of LoRA; the others depend on the weights they adapt


def is_adapted(module: nn.Module) -> bool:
    """Whether ``module`` is a PeftModel."""
    return type(module).__module__.startswith("peft.") and hasattr(module, "peft_config")


def initialise_adapter(layer: Any, configs: Mapping[str, Any]) -> None:
    """Initialise a LoRA layer's own parameters; refuses other kinds of adapter by name."""
    if not hasattr(layer, "reset_lora_parameters"):
        raise ValueError(
            f"{type(layer).__name__}: only LoRA can be initialised unit by unit. Build the "
            "model in memory and pass it to HetFSDP."
        )
    for adapter in {*layer.lora_A, *layer.lora_embedding_A}:
        layer.reset_lora_parameters(adapter, configs[adapter].init_lora_weights)


def check_adapters(module: nn.Module) -> None:
    """Raise if a LoRA's initial values depend on the weights it adapts."""
    for name, config in getattr(module, "peft_config", {}).items():
        chosen = getattr(config, "init_lora_weights", True)
        if getattr(config, "use_dora", False):
            chosen = "dora"
        if chosen not in INITIALISERS:
            raise ValueError(
                f"adapter {name!r}: initialising {chosen!r} needs whole weights. Use "
                "init_lora_weights=True or 'gaussian'."
            )


def adapter_state(
    module: Any, adapter: str, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The part of the model's ``tensors`` that PEFT saves, under PEFT's names."""
    from peft import get_peft_model_state_dict

    if module.peft_config[adapter].is_prompt_learning:
        return {"prompt_embeddings": _prompt(module, adapter, tensors)}
    getters = (getattr(module, f"get_{side}_embeddings", None) for side in ("input", "output"))
    are_adapted = any(get and hasattr(get(), "base_layer") for get in getters)
    saved: dict[str, Tensor] = get_peft_model_state_dict(
        module,
        state_dict=dict(tensors),
        adapter_name=adapter,
        save_embedding_layers="auto" if are_adapted else _was_resized(module, adapter),
    )
    return saved


def _was_resized(module: Any, adapter: str) -> bool:
    """Whether embeddings have another number of tokens than the base model on this host has.

    The base model does not hold them then.  PEFT looks for it on the network, too.
    """
    base = module.peft_config[adapter].base_model_name_or_path
    config: Any = getattr(module, "config", None)
    if not base or not hasattr(config, "vocab_size"):
        return False
    try:
        saved = type(config).from_pretrained(base, local_files_only=True)
    except (OSError, ValueError):
        return False
    return bool(saved.vocab_size != config.vocab_size)


def adapter_fqns(module: Any, adapter: str, shapes: Mapping[str, torch.Size]) -> set[str]:
    """The names of the model's tensors that PEFT saves for an adapter."""
    if module.peft_config[adapter].is_prompt_learning:
        _check_prompt(module.peft_config[adapter])
        return {fqn for fqn in shapes if fqn.startswith(_prompt_encoder(adapter))}
    tensors = {fqn: torch.empty(shape, device="meta") for fqn, shape in shapes.items()}
    kept = {id(tensor) for tensor in adapter_state(module, adapter, tensors).values()}
    return {fqn for fqn, tensor in tensors.items() if id(tensor) in kept}


def _check_prompt(config: Any) -> None:
    if config.peft_type not in ("PROMPT_TUNING", "P_TUNING"):
        raise ValueError(
            f"save_pretrained: prompts of {config.peft_type.value} are not saved. Use "
            "model.state_dict(), which is whole on rank zero."
        )


def _prompt_encoder(adapter: str) -> str:
    return f"prompt_encoder.{adapter}."


def _prompt(module: Any, adapter: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The embeddings of a prompt, which PEFT saves in place of what they are computed from."""
    from peft import PromptEncoder

    config, prefix = module.peft_config[adapter], _prompt_encoder(adapter)
    own = {fqn.removeprefix(prefix): t for fqn, t in tensors.items() if fqn.startswith(prefix)}
    if config.peft_type == "PROMPT_TUNING" or config.inference_mode:
        return own["embedding.weight"]
    with torch.device("meta"):
        encoder: Any = PromptEncoder(config)  # type: ignore[no-untyped-call]  # PEFT's
    tokens = module.prompt_tokens[adapter][None].to(own["embedding.weight"].device)
    with torch.no_grad():
        found: Tensor = torch.func.functional_call(encoder, own, (tokens,))
    return found[0]
