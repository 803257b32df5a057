#!/usr/bin/env bash
# transformers==5.24.0, torch==2.13.0. Expected: an encoder-decoder that is given decoder_input_ids predicts each word from
# those before it, whoever computes the loss; FSMTForConditionalGeneration's text says "Causal mask will also be used by
# default". Real: its decoder has a causal mask only if use_cache is off. The configuration turns it on, and labels= turns it
# off. Without labels, as with a loss of one's own or label smoothing in Trainer, each position sees all later words, the
# one that it is to predict among them, while training and in evaluation. The loss falls on words that nobody can predict,
# and generation, which has no later words, gets a model that only learned to look ahead. BART's decoder is causal either
# way. Source: FSMTModel.forward, "if not use_cache and input_ids is not None". Who is hurt: whoever trains or scores FSMT
# (wmt19-en-de and its like) by logits.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -n "${FINDINGS_PY:-}" ]; then
  py=$FINDINGS_PY
else
  python3 -m venv "$work/venv"
  py=$work/venv/bin/python
  "$py" -m pip install -q --disable-pip-version-check transformers==5.24.0 torch==2.13.0 numpy==2.4.6
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
cat > "$work/check.py" <<'PY'
import math

import torch
from torch.nn.functional import cross_entropy
from transformers import BartConfig, BartForConditionalGeneration, FSMTConfig, FSMTForConditionalGeneration

WORDS, LENGTH, STEPS = 20, 8, 400
SIZES = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
             encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0)


def fsmt():
    torch.manual_seed(0)
    return FSMTForConditionalGeneration(
        FSMTConfig(langs=["en", "de"], src_vocab_size=WORDS, tgt_vocab_size=WORDS, init_std=0.1, **SIZES))


def bart():
    torch.manual_seed(0)
    return BartForConditionalGeneration(BartConfig(vocab_size=WORDS, init_std=0.1, **SIZES))


def words(number):
    return torch.randint(4, WORDS, (number, LENGTH))


def change(model, **options):
    """Of the logits of all positions but the last, when the last word becomes another."""
    torch.manual_seed(1)
    source, target = words(2), words(2)
    other = target.clone()
    other[:, -1] = (other[:, -1] - 3) % (WORDS - 4) + 4
    with torch.no_grad():
        one, two = (model.eval()(input_ids=source, decoder_input_ids=x, **options).logits for x in (target, other))
    return (one - two)[:, :-1].abs().max().item()


def trained(passes_labels):
    """The loss after training on random words: nobody can predict them from those before."""
    model = fsmt().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        source, labels = words(32), words(32)
        inputs = torch.cat([torch.full((32, 1), 2), labels[:, :-1]], 1)
        if passes_labels:
            loss = model(input_ids=source, decoder_input_ids=inputs, labels=labels).loss
        else:
            logits = model(input_ids=source, decoder_input_ids=inputs).logits
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


found = {"BART": change(bart()), "FSMT": change(fsmt()), "FSMT, use_cache=False": change(fsmt(), use_cache=False)}
for name, most in found.items():
    print(f"{name}: the last word changes earlier logits by {most:.3f}")
own, inner, chance = trained(False), trained(True), math.log(WORDS - 4)
print(f"loss of random words, by chance {chance:.2f}: {own:.2f} from logits, {inner:.2f} with labels=")
assert found["BART"] < 1e-5 and found["FSMT, use_cache=False"] < 1e-5 and found["FSMT"] > 1e-3, found
assert own < 0.8 * chance and inner > 0.9 * chance
PY
cd "$work"
"$py" check.py
