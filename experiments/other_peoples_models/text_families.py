"""Language models of transformers: decoders, encoders, pairs of both, experts, state spaces."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from experiments.other_peoples_models.records import Family, Task
from experiments.other_peoples_models.tasks import (
    MASKED_WORD,
    NEXT_WORD,
    NUM_CLASSES,
    NUM_WORDS,
    SENTENCE,
    TRANSLATION,
)

_TOKENS = {"vocab_size": NUM_WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_HEADS_OF_8 = {**_LLAMA, "head_dim": 8}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_BERT = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 34,
    "num_labels": NUM_CLASSES,
}
_BART = {
    **_TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {**_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_T5 = {**_T5, "decoder_start_token_id": 0}
# transformers' other ways to compute experts take no float64.
_EAGER = {"experts_implementation": "eager"}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, **_EAGER}
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


def transformers_maker(
    class_name: str, base: Mapping[str, Any], **config: Any
) -> Callable[..., nn.Module]:
    """Makes a model of that class; keywords change its configuration."""

    def make(**changes: Any) -> nn.Module:
        import transformers

        model_class = getattr(transformers, class_name)
        return model_class(model_class.config_class(**{**base, **config, **changes}))

    return make


def _family(
    name: str,
    class_name: str,
    task: Task,
    base: Mapping[str, Any],
    *,
    lora: tuple[str, ...] = (),
    coarse_units: tuple[str, ...] = (),
    is_moe: bool = False,
    has_attentions: bool = True,
    is_random: bool = True,
    **config: Any,
) -> Family:
    return Family(
        name=name,
        source="transformers",
        task=task,
        make=transformers_maker(class_name, base, **config),
        lora_targets=lora,
        coarse_units=coarse_units,
        is_moe=is_moe,
        has_attentions=has_attentions,
        is_random=is_random,
    )


def _decoder(name: str, class_name: str, base: Mapping[str, Any], **options: Any) -> Family:
    return _family(name, class_name, NEXT_WORD, base, **{"is_random": False, **options})


_QV = ("q_proj", "v_proj")

DECODERS = (
    _decoder("Llama", "LlamaForCausalLM", _LLAMA, lora=_QV),
    _decoder("Llama, tied", "LlamaForCausalLM", _LLAMA, tie_word_embeddings=True),
    _decoder("Qwen2", "Qwen2ForCausalLM", _LLAMA, lora=_QV),
    _decoder("Qwen3", "Qwen3ForCausalLM", _HEADS_OF_8),
    _decoder("Mistral", "MistralForCausalLM", _LLAMA, sliding_window=6),
    _decoder("Gemma2", "Gemma2ForCausalLM", _HEADS_OF_8, sliding_window=6),
    _decoder("Gemma3", "Gemma3ForCausalLM", _HEADS_OF_8, sliding_window=6),
    _decoder("GPT-2", "GPT2LMHeadModel", _GPT, lora=("c_attn",), is_random=True),
    _decoder("GPT-J", "GPTJForCausalLM", _GPT, rotary_dim=4),
    _decoder("GPT-NeoX", "GPTNeoXForCausalLM", _LLAMA, lora=("query_key_value",)),
    _decoder("GPT-BigCode", "GPTBigCodeForCausalLM", _GPT, is_random=True),
    _decoder("Phi", "PhiForCausalLM", _LLAMA),
    _decoder("Phi3", "Phi3ForCausalLM", _LLAMA),
    _decoder(
        "Falcon",
        "FalconForCausalLM",
        _TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    _decoder(
        "OPT",
        "OPTForCausalLM",
        _LLAMA,
        ffn_dim=48,
        word_embed_proj_dim=32,
        is_random=True,
        lora=_QV,
    ),
    _decoder("BLOOM", "BloomForCausalLM", _TOKENS, hidden_size=32, n_layer=2, n_head=4),
    _decoder("MPT", "MptForCausalLM", _TOKENS, d_model=32, n_layers=2, n_heads=4),
    _decoder("StableLM", "StableLmForCausalLM", _LLAMA),
    _decoder("StarCoder2", "Starcoder2ForCausalLM", _LLAMA, is_random=True),
    _decoder("Cohere", "CohereForCausalLM", _LLAMA),
    _decoder("OLMo", "OlmoForCausalLM", _LLAMA),
    _decoder("OLMo2", "Olmo2ForCausalLM", _LLAMA),
    _decoder("Granite", "GraniteForCausalLM", _LLAMA),
)

EXPERTS = (
    _decoder("Mixtral", "MixtralForCausalLM", _LLAMA, is_moe=True, **_EXPERTS),
    _decoder(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        _HEADS_OF_8,
        is_moe=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        **_EAGER,
    ),
    _decoder("gpt-oss", "GptOssForCausalLM", _HEADS_OF_8, is_moe=True, **_EXPERTS),
    _decoder("DeepSeek-V3", "DeepseekV3ForCausalLM", _LLAMA, **_DEEPSEEK),
)

STATE_SPACES = (
    _decoder(
        "Mamba",
        "MambaForCausalLM",
        _TOKENS,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        has_attentions=False,
    ),
    _decoder(
        "Mamba2",
        "Mamba2ForCausalLM",
        _TOKENS,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
        has_attentions=False,
    ),
)

ENCODERS = (
    _family("BERT", "BertForMaskedLM", MASKED_WORD, _BERT, lora=("query", "value")),
    _family("BERT, classes", "BertForSequenceClassification", SENTENCE, _BERT),
    _family("RoBERTa", "RobertaForMaskedLM", MASKED_WORD, _BERT, lora=("query", "value")),
    _family(
        "DistilBERT",
        "DistilBertForMaskedLM",
        MASKED_WORD,
        _TOKENS,
        dim=32,
        hidden_dim=48,
        n_layers=2,
        n_heads=4,
        max_position_embeddings=34,
    ),
    _family("ALBERT", "AlbertForMaskedLM", MASKED_WORD, _BERT, embedding_size=16),
    _family("ELECTRA", "ElectraForMaskedLM", MASKED_WORD, _BERT, embedding_size=16),
    _family(
        "DeBERTa-v2",
        "DebertaV2ForMaskedLM",
        MASKED_WORD,
        _BERT,
        relative_attention=True,
        coarse_units=("deberta.embeddings", "deberta.encoder"),
    ),
    _family("MPNet", "MPNetForMaskedLM", MASKED_WORD, _BERT),
    _family(
        "ModernBERT",
        "ModernBertForMaskedLM",
        MASKED_WORD,
        _LLAMA,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=6,
        num_hidden_layers=4,
        global_attn_every_n_layers=2,
    ),
)


def _bart(name: str, class_name: str, **options: Any) -> Family:
    """With dropout by a function between encoder and decoder layers."""
    coarse = ("model.encoder", "model.decoder")
    return _family(name, class_name, TRANSLATION, _BART, coarse_units=coarse, **options)


PAIRS = (
    _family("T5", "T5ForConditionalGeneration", TRANSLATION, _T5, lora=("q", "v")),
    _family("mT5", "MT5ForConditionalGeneration", TRANSLATION, _T5),
    _bart("BART", "BartForConditionalGeneration", lora=_QV),
    _bart("mBART", "MBartForConditionalGeneration"),
    _bart("Pegasus", "PegasusForConditionalGeneration"),
    _bart("Marian", "MarianMTModel"),
)

TEXT = (*DECODERS, *EXPERTS, *STATE_SPACES, *ENCODERS, *PAIRS)
