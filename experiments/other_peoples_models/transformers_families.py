"""Models of transformers: of text, pictures and sound."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from experiments.other_peoples_models.records import Family
from experiments.other_peoples_models.tasks import (
    DICTATION,
    IMAGE,
    IMAGE_SIDE,
    MASKED_WORD,
    NEXT_WORD,
    NUM_CLASSES,
    NUM_WORDS,
    PAIR,
    SENTENCE,
    SPECTRUM,
    SPEECH,
    TRANSLATION,
    Task,
)

WITH_ATTENTIONS = (NEXT_WORD, MASKED_WORD, SENTENCE, TRANSLATION, SPECTRUM)
WITH_DROPOUT = (MASKED_WORD, SENTENCE, TRANSLATION)  # in configurations as they come

_TOKENS = {"vocab_size": NUM_WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_LLAMA = {**_TOKENS, **_SMALL, "num_key_value_heads": 2, "max_position_embeddings": 32}
_HEADS_OF_8 = {**_LLAMA, "head_dim": 8}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_BERT = {**_TOKENS, **_SMALL, "max_position_embeddings": 34, "num_labels": NUM_CLASSES}
_ENCODER_AND_DECODER = {
    **_TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_BART = {
    **_ENCODER_AND_DECODER,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_WHISPER = {
    **_ENCODER_AND_DECODER,
    "num_mel_bins": 8,
    "max_source_positions": 11,
    "max_target_positions": 16,
    "decoder_start_token_id": 1,
}
_T5 = {**_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_T5 = {**_T5, "decoder_start_token_id": 0}
# transformers' other ways to compute experts take no float64.
_EAGER = {"experts_implementation": "eager"}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, **_EAGER}
_QWEN3_MOE = {**_EAGER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {
    **_EAGER,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 0,
}
_MAMBA = {**_TOKENS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
_MAMBA2 = {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
_DISTIL = {**_TOKENS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
_MODERN = {
    **_LLAMA,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "local_attention": 6,
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 2,
}
_FALCON = {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_OPT = {**_LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32}
_VIT = {
    **_SMALL,
    "image_size": IMAGE_SIDE,
    "patch_size": 16,  # so 4 patches, and 5 tokens: as many as samples of a rank
    "num_labels": NUM_CLASSES,
}
_SWIN = {
    "image_size": IMAGE_SIDE,
    "patch_size": 4,
    "embed_dim": 16,
    "num_labels": NUM_CLASSES,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_CONV_NEXT = {
    "num_labels": NUM_CLASSES,
    "image_size": IMAGE_SIDE,
    "patch_size": 2,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 2, 1],
    "num_stages": 4,
}
_RES_NET = {
    "num_labels": NUM_CLASSES,
    "embedding_size": 8,
    "hidden_sizes": [16, 24],
    "depths": [2, 2],
    "layer_type": "basic",
}
_WAVES = {
    **_SMALL,
    "vocab_size": NUM_CLASSES,
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
_CALM = {**_WAVES, "apply_spec_augment": False, "layerdrop": 0.0}


def _family(
    name: str,
    class_name: str,
    task: Task,
    base: Mapping[str, Any],
    *,
    lora: tuple[str, ...] = (),
    coarse_units: tuple[str, ...] = (),
    is_moe: bool = False,
    has_attentions: bool | None = None,
    has_batch_norm: bool = False,
    is_random: bool | None = None,
    **config: Any,
) -> Family:
    """Keywords that are not a family's change the configuration."""
    return Family(
        name=name,
        source="transformers",
        task=task,
        make=_maker(class_name, {**base, **config}),
        seq_len=(1 + has_batch_norm) * IMAGE_SIDE if task is IMAGE else 11,
        lora_targets=lora,
        coarse_units=coarse_units,
        is_moe=is_moe,
        has_attentions=task in WITH_ATTENTIONS if has_attentions is None else has_attentions,
        has_batch_norm=has_batch_norm,
        is_random=task in WITH_DROPOUT if is_random is None else is_random,
    )


def _maker(class_name: str, config: Mapping[str, Any]) -> Callable[..., nn.Module]:
    def make(**changes: Any) -> nn.Module:
        import transformers

        model_class = getattr(transformers, class_name)
        return model_class(model_class.config_class(**{**config, **changes}))

    return make


def _decoder(name: str, class_name: str, base: Mapping[str, Any], **options: Any) -> Family:
    return _family(name, f"{class_name}ForCausalLM", NEXT_WORD, base, **options)


def _encoder(name: str, class_name: str, base: Mapping[str, Any], **options: Any) -> Family:
    return _family(name, f"{class_name}ForMaskedLM", MASKED_WORD, base, **options)


def _picture(name: str, class_name: str, base: Mapping[str, Any], **options: Any) -> Family:
    return _family(name, f"{class_name}ForImageClassification", IMAGE, base, **options)


def _bart(name: str, class_name: str, **options: Any) -> Family:
    """With dropout by a function between encoder and decoder layers."""
    coarse = ("model.encoder", "model.decoder")
    return _family(name, class_name, TRANSLATION, _BART, coarse_units=coarse, **options)


def _clip(**changes: Any) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**_TOKENS, **_SMALL, "max_position_embeddings": 16, "projection_dim": 16}
    vision = {**_VIT, "projection_dim": 16}
    return CLIPModel(
        CLIPConfig(
            text_config={**text, **changes},
            vision_config={**vision, **changes},
            projection_dim=16,
        )
    )


_QV = ("q_proj", "v_proj")
_QUERY_VALUE = ("query", "value")
_DEBERTA_UNITS = ("deberta.embeddings", "deberta.encoder")

TEXT = (
    _decoder("Llama", "Llama", _LLAMA, lora=_QV),
    _decoder("Llama, tied", "Llama", _LLAMA, tie_word_embeddings=True),
    _decoder("Qwen2", "Qwen2", _LLAMA, lora=_QV),
    _decoder("Qwen3", "Qwen3", _HEADS_OF_8),
    _decoder("Mistral", "Mistral", _LLAMA, sliding_window=6),
    _decoder("Gemma2", "Gemma2", _HEADS_OF_8, sliding_window=6),
    _decoder("Gemma3", "Gemma3", _HEADS_OF_8, sliding_window=6),
    _family("GPT-2", "GPT2LMHeadModel", NEXT_WORD, _GPT, lora=("c_attn",), is_random=True),
    _decoder("GPT-J", "GPTJ", _GPT, rotary_dim=4),
    _decoder("GPT-NeoX", "GPTNeoX", _LLAMA, lora=("query_key_value",)),
    _decoder("GPT-BigCode", "GPTBigCode", _GPT, is_random=True),
    _decoder("Phi", "Phi", _LLAMA),
    _decoder("Phi3", "Phi3", _LLAMA),
    _decoder("Falcon", "Falcon", _FALCON),
    _decoder("OPT", "OPT", _OPT, is_random=True, lora=_QV),
    _decoder("BLOOM", "Bloom", _TOKENS, hidden_size=32, n_layer=2, n_head=4),
    _decoder("MPT", "Mpt", _TOKENS, d_model=32, n_layers=2, n_heads=4),
    _decoder("StableLM", "StableLm", _LLAMA),
    _decoder("StarCoder2", "Starcoder2", _LLAMA, is_random=True),
    _decoder("Cohere", "Cohere", _LLAMA),
    _decoder("OLMo", "Olmo", _LLAMA),
    _decoder("OLMo2", "Olmo2", _LLAMA),
    _decoder("Granite", "Granite", _LLAMA),
    # Experts, and state spaces
    _decoder("Mixtral", "Mixtral", _LLAMA, is_moe=True, **_EXPERTS),
    _decoder("Qwen3-MoE", "Qwen3Moe", _HEADS_OF_8, is_moe=True, **_QWEN3_MOE),
    _decoder("gpt-oss", "GptOss", _HEADS_OF_8, is_moe=True, **_EXPERTS),
    _decoder("DeepSeek-V3", "DeepseekV3", {**_LLAMA, **_DEEPSEEK}),
    _decoder("Mamba", "Mamba", _MAMBA, has_attentions=False),
    _decoder("Mamba2", "Mamba2", _MAMBA2, has_attentions=False),
    # Encoders, and pairs of an encoder and a decoder
    _encoder("BERT", "Bert", _BERT, lora=_QUERY_VALUE),
    _family("BERT, classes", "BertForSequenceClassification", SENTENCE, _BERT),
    _encoder("RoBERTa", "Roberta", _BERT, lora=_QUERY_VALUE),
    _encoder("DistilBERT", "DistilBert", _DISTIL, max_position_embeddings=34),
    _encoder("ALBERT", "Albert", _BERT, embedding_size=16),
    _encoder("ELECTRA", "Electra", _BERT, embedding_size=16),
    _encoder(
        "DeBERTa-v2", "DebertaV2", _BERT, relative_attention=True, coarse_units=_DEBERTA_UNITS
    ),
    _encoder("MPNet", "MPNet", _BERT),
    _encoder("ModernBERT", "ModernBert", _MODERN),
    _family("T5", "T5ForConditionalGeneration", TRANSLATION, _T5, lora=("q", "v")),
    _family("mT5", "MT5ForConditionalGeneration", TRANSLATION, _T5),
    _bart("BART", "BartForConditionalGeneration", lora=_QV),
    _bart("mBART", "MBartForConditionalGeneration"),
    _bart("Pegasus", "PegasusForConditionalGeneration"),
    _bart("Marian", "MarianMTModel"),
)

PICTURES = (
    _picture("ViT", "ViT", _VIT, lora=_QV),
    _picture("DeiT", "DeiT", _VIT),
    _picture("DINOv2", "Dinov2", _VIT, drop_path_rate=0.1, is_random=True),
    _picture("BEiT", "Beit", _VIT, is_random=True),
    _picture("Swin", "Swin", _SWIN, is_random=True),
    _picture("ConvNeXt", "ConvNext", _CONV_NEXT),
    _picture("ResNet", "ResNet", _RES_NET, has_batch_norm=True),
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
    _family("Whisper", "WhisperForConditionalGeneration", SPECTRUM, _WHISPER),
    _family("Wav2Vec2", "Wav2Vec2ForCTC", DICTATION, _CALM, is_random=True),
    _family("Wav2Vec2, as it comes", "Wav2Vec2ForCTC", DICTATION, _WAVES, is_random=True),
    _family("HuBERT", "HubertForSequenceClassification", SPEECH, _CALM, is_random=True),
)

TRANSFORMERS = (*TEXT, *PICTURES, *SOUND)
