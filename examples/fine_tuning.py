"""Fine-tune a language model on a list of texts; with --lora its adapters alone.

shardhet rehearse examples/fine_tuning.py --cards '4090 | 3090x2' --lora    on this CPU
torchrun --nproc-per-node=3 examples/fine_tuning.py --lora                  on three GPUs
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from shardhet.hf import HetTrainer

texts = [f"{a} and {b} is {a + b}" for a in range(10) for b in range(10)]

# A model and a tokenizer without a download.  Yours: AutoModelForCausalLM.from_pretrained(...)
# and AutoTokenizer.from_pretrained(...), in place of the next eleven lines.
words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
torch.manual_seed(0)  # one model on all ranks
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2
    )
)

if "--lora" in sys.argv:
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
args = TrainingArguments(
    "out",
    num_train_epochs=2,
    per_device_train_batch_size=3,  # on average: the plan deals a batch to unlike cards
    learning_rate=1e-2,
    logging_steps=5,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
)
trainer = HetTrainer(
    model,
    args,
    plan="auto",  # for these cards; or the samples of each, as [6, 2, 2]
    train_dataset=[tokenizer(text) for text in texts],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model("out/model")  # for from_pretrained, or PeftModel.from_pretrained
