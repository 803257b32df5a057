"""Adapters (LoRA) of models whose weights have 4 or 8 bits: by plan, and in one process.

    python -m experiments.quantized.run                  # all, results.csv and the README
    python -m experiments.quantized.run --only 8-bit     # some; writes nothing

Needs bitsandbytes, which shardhet does not: pip install bitsandbytes.  Each case is trained
twice: by HetTrainer on three ranks that get 4, 3 and 0 of 7 samples, and by a plain Trainer in
this process.  Everything that is logged is compared, and so are the adapters.
"""

import argparse
import tempfile
import warnings
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import transformers
from peft import LoraConfig, get_peft_model

from experiments.common.results import Page, console, markdown_table
from shardhet import Plan
from tests.trainer_options import (
    IN_ROUNDS,
    PLAN,
    VOCAB_SIZE,
    arguments,
    as_torchrun_starts,
    difference,
    padded,
    texts,
)
from tests.worlds import TRANSFORMERS, World, preload

HERE = Path(__file__).parent
CASE_TIMEOUT_S = 300.0
BAR = 1e-5  # relative, in float32
WEIGHTS: dict[str, dict[str, Any]] = {
    "4-bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "4-bit, twice": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "8-bit": {"load_in_8bit": True},
}
PLANS: dict[str, Plan] = {
    "uneven": PLAN,
    "resident": replace(PLAN, resident_units=("*",)),
    "recomputed": Plan.by_hand(
        microbatch_sizes=[2, 3, 0],
        rank_batch_sizes=[4, 3, 0],
        state_shares=[0.5, 0.2, 0.3],
        recompute=True,
    ),
    "in rounds": IN_ROUNDS,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to quantize under one plan."""

    weights: str
    plan: str
    verdict: str  # exact, refused, wrong
    logged_error: float  # the largest of anything logged, relative
    adapter_error: float  # the largest of an adapter's elements, absolute
    reason: str


def main() -> None:
    """Try them and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WEIGHTS)
    only = parser.parse_args().only
    torch.set_num_threads(1)
    preload(*TRANSFORMERS, "bitsandbytes", "peft")
    page, rows = Page(HERE, is_kept=only is None), list[Row]()
    page.tell(f"bitsandbytes {bitsandbytes.__version__}.")
    world = World(PLAN.world_size)
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_hidden_layers=2,
        )
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(f"{folder}/model")
        for weights, plan in product(only or WEIGHTS, PLANS):
            rows.append(row := _tried(world, folder, weights, plan))
            console.print(str(row), markup=False, soft_wrap=True)
    world.close()
    page.tell(as_markdown(rows))
    page.keep({"results.csv": rows})


def _tried(world: World, folder: str, weights: str, plan: str) -> Row:
    expected = trained(transformers.Trainer, folder, weights)
    outcomes = world.run(
        train_by_plan, (folder, weights, plan), timeout_s=CASE_TIMEOUT_S, grace_s=10.0
    )
    found = outcomes[0].value if outcomes[0].has_returned else outcomes[0].message
    errors, reason = (float("nan"), float("nan")), ""
    if isinstance(found, str):
        verdict, reason = "refused", " ".join(found.split())[:240]
    else:
        errors = difference(found, expected)
        verdict = "exact" if max(errors) <= BAR else "wrong"
    return Row(
        weights=weights,
        plan=plan,
        verdict=verdict,
        logged_error=errors[0],
        adapter_error=errors[1],
        reason=reason,
    )


def trained(trainer_class: Any, folder: str, weights: str, **options: Any) -> dict[str, Any]:
    """What is compared: the adapters, everything logged, and predictions."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        f"{folder}/model",
        quantization_config=transformers.BitsAndBytesConfig(
            bnb_4bit_compute_dtype=torch.float32, **WEIGHTS[weights]
        ),
        device_map={"": "cpu"},
    )
    for each in model.modules():
        # On some CPUs a forward for evaluation would lay the weights out anew, for good.
        if isinstance(each, bitsandbytes.nn.Linear4bit):
            each.support_avx512bf16_for_cpu = False
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():  # peft uses deprecated names of transformers
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, lora)
    trainer = trainer_class(
        adapted,
        arguments(
            f"{folder}/{trainer_class.__name__}",
            max_steps=6,
            learning_rate=3e-3,
            logging_steps=1,
            **({} if options else {"per_device_train_batch_size": PLAN.global_batch_size}),
        ),
        train_dataset=texts(31, seed=1),
        data_collator=padded,
        **options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    predicted = trainer.predict(texts(9, seed=3))
    state = getattr(trainer, "het", trainer.model).state_dict()
    return {
        "state": {name: each for name, each in state.items() if "lora" in name},
        "log": trainer.state.log_history,
        "flops": trainer.state.total_flos,
        "predictions": predicted.predictions,
        "label_ids": predicted.label_ids,
    }


def train_by_plan(rank: int, folder: str, weights: str, plan: str) -> Any:
    """On rank zero what ``trained`` returns, or why it is refused."""
    from shardhet.hf import HetTrainer

    warnings.simplefilter("ignore")  # of transformers, of peft
    with as_torchrun_starts(rank, PLAN.world_size):
        try:
            found: Any = trained(HetTrainer, folder, weights, plan=PLANS[plan])
        except ValueError as error:
            found = f"{type(error).__name__}: {error}"
    return found if rank == 0 else None


def as_markdown(rows: list[Row]) -> str:
    """Every case."""
    cells = [
        [
            row.weights,
            row.plan,
            row.verdict,
            *(f"{each:.1e}" for each in (row.logged_error, row.adapter_error)),
            row.reason,
        ]
        for row in rows
    ]
    header = ["weights", "plan", "verdict", "logged, relative", "adapters, absolute", "why"]
    return markdown_table(header, cells)


if __name__ == "__main__":
    main()
