"""A sweep of families that the main experiment does not have; results in more.csv.

python -m experiments.other_peoples_models.more_families --way logits
"""

import sys

from experiments.other_peoples_models import run
from experiments.other_peoples_models.families import FAMILIES
from experiments.other_peoples_models.tasks import SENTENCE, TRANSLATION
from experiments.other_peoples_models.transformers_families import (
    _BART,
    _BERT,
    _GPT,
    _HEADS_OF_8,
    _LLAMA,
    _SWIN,
    _VIT,
    _decoder,
    _encoder,
    _family,
    _picture,
)

MORE = (
    _decoder("Gemma", "Gemma", _HEADS_OF_8),
    _decoder("Cohere2", "Cohere2", _LLAMA),
    _decoder("GLM", "Glm", _HEADS_OF_8),
    _decoder("GLM-4", "Glm4", _HEADS_OF_8),
    _decoder("Nemotron", "Nemotron", _LLAMA),
    _decoder("Helium", "Helium", _HEADS_OF_8),
    _decoder("SmolLM3", "SmolLM3", _LLAMA),
    _decoder("Ministral", "Ministral", _HEADS_OF_8),
    _decoder("ERNIE-4.5", "Ernie4_5", _HEADS_OF_8),
    _decoder("OLMo3", "Olmo3", _LLAMA),
    _decoder("CodeGen", "CodeGen", {**_GPT, "rotary_dim": 4}),
    _decoder("GPT-Neo", "GPTNeo", {**_LLAMA, "num_layers": 2, "num_heads": 4,
                                  "attention_types": [[["global", "local"], 1]]}),
    _decoder("XGLM", "XGLM", {**_LLAMA, "d_model": 32, "ffn_dim": 48, "num_layers": 2,
                             "attention_heads": 4}, is_random=True),
    _decoder("BioGPT", "BioGpt", _BERT, is_random=True),
    _encoder("RoFormer", "RoFormer", {**_BERT, "embedding_size": 32}),
    _encoder("CamemBERT", "Camembert", _BERT),
    _encoder("XLM-RoBERTa", "XLMRoberta", _BERT),
    _encoder("Data2VecText", "Data2VecText", _BERT),
    _encoder("ConvBERT", "ConvBert", {**_BERT, "embedding_size": 32}),
    _encoder("MobileBERT", "MobileBert", {**_BERT, "embedding_size": 16,
                                         "true_hidden_size": 16, "intra_bottleneck_size": 16}),
    _encoder("FNet", "FNet", {**_BERT, "type_vocab_size": 2}),
    _family("BERT for sentences", "BertForSequenceClassification", SENTENCE, _BERT),
    _family("Blenderbot", "BlenderbotForConditionalGeneration", TRANSLATION, _BART),
    _picture("ViT-MSN", "ViTMSN", _VIT),
    _picture("Data2VecVision", "Data2VecVision", _VIT, is_random=True),
    _picture("Swinv2", "Swinv2", _SWIN, is_random=True),
    _picture("DINOv2 with registers", "Dinov2WithRegisters", _VIT),
    _picture("IJEPA", "IJepa", _VIT),
)  # fmt: skip

if __name__ == "__main__":
    FAMILIES.clear()
    FAMILIES.update({family.name: family for family in MORE})
    if "--results" not in sys.argv:
        sys.argv += ["--results", str(run.HERE / "more.csv")]
    run.main()
