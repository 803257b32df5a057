"""Models of transformers in stages: folders, adapters, texts, and losses by ``loss_fn``."""

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from shardhet import HetFSDP, Plan, Stage
from shardhet.fsdp.sharding.unit import find_units
from tests.parity import compare_grads
from tests.selection import only
from tests.test_hf_folder import MODELS
from tests.worlds import TRANSFORMERS, on_ranks, preload, run_ranks

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
preload(*TRANSFORMERS)

FIRST_CASE_S = 110.0  # every rank imports transformers once, on a busy machine slowly
WORDS = 64


def staged(module: Any, cut: int, num_rounds: int = 2) -> Plan:
    """Two ranks, of which one only stores, before unit number ``cut``, and one after it."""
    units = [unit.fqns[0] for unit in find_units(module, None, merges_tied=False)]
    return Plan.by_hand(
        microbatch_sizes=[2, 0, 2],
        rank_batch_sizes=[3, 0, 3],
        state_shares=[0.3, 0.7, 1.0],
        num_rounds=num_rounds,
        stages=[
            Stage(units=tuple(units[:cut]), num_ranks=2),
            Stage(units=tuple(units[cut:]), num_ranks=1),
        ],
    )


def words_of(num_samples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, WORDS, (num_samples, 7), generator=generator)


def test_the_kind_of_a_loss_is_tried_on_samples_of_one_round() -> None:
    """Also of a batch for evaluation, which may have more rounds than a step."""
    from shardhet.hf.losses import probes_in_stages

    half = [Stage(units=(unit,), num_ranks=1) for unit in ("a", "b")]
    plan = Plan.by_hand(microbatch_sizes=[3, 3], num_rounds=2, stages=half)
    inputs = {"words": words_of(10), "labels": words_of(10)}
    model: Any = SimpleNamespace(plan=plan, position=1, exchange=lambda _: [[10.0], [10.0]])
    for parts in probes_in_stages(model, inputs, ["labels"], 0):
        for part, rows in zip(parts, ([0, 1, 2], [0, 1], [2]), strict=True):
            assert torch.equal(part["words"], inputs["words"][rows])


def loss_of_logits(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of the next words."""
    flat = scores[:, :-1].double().flatten(0, 1)
    loss = cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum")
    return loss, torch.tensor(labels[:, 1:].numel())


def backward_of_mean(plain: Any, words: Tensor) -> float:
    """Gradients of the mean, divided last as in rounds: norms are computed in float32."""
    loss, number = loss_of_logits(plain(words, attention_mask=words > 0).logits, words)
    loss.backward()
    for param in plain.parameters():
        if param.grad is not None:
            param.grad /= number
    return float(loss / number)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, cut", [("llama", 1), ("gpt2", 2), ("gpt2", 4)])
@on_ranks(3, timeout_s=FIRST_CASE_S)
def test_a_loss_inside_of_a_model_output_is_found(rank: int, name: str, cut: int) -> None:
    """Two steps; the model returns its own kind of output, with the loss inside of it."""
    torch.manual_seed(0)
    plain = MODELS[name]().double().eval()
    plan = staged(plain, cut)
    model = HetFSDP(copy.deepcopy(plain), plan, loss_fn=loss_of_logits)
    for step in range(2):
        words = words_of(plan.global_batch_size, step)
        mine = words[plan.sample_indices(model.position)]
        mean = model.forward_backward(mine, attention_mask=mine > 0, loss_inputs=mine)
        plain.zero_grad()
        expected = backward_of_mean(plain, words)
        assert mean == pytest.approx(expected, rel=1e-12)
        compare_grads(model, plain)
        model.zero_grad()


def adapted(rank: int, folder: str, cut: int) -> None:
    """The rest is frozen; before cut 1 no unit has a parameter to train, nor after cut 3."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    from shardhet.hf import save_pretrained

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what peft asks transformers
        plain: Any = get_peft_model(MODELS["llama"]().double(), config).double().eval()
    plan = staged(plain, cut)
    model = HetFSDP(copy.deepcopy(plain), plan, loss_fn=loss_of_logits)
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01)
        for each in (model, plain)
    ]
    for step in range(2):
        words = words_of(plan.global_batch_size, step)
        mine = words[plan.sample_indices(model.position)]
        mean = model.forward_backward(mine, attention_mask=mine > 0, loss_inputs=mine)
        assert mean == pytest.approx(backward_of_mean(plain, words), rel=1e-12)
        compare_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    save_pretrained(model, folder)
    if rank == 0:
        saved = load_file(Path(folder) / "adapter_model.safetensors")
        expected = {
            fqn.replace(".default", ""): param
            for fqn, param in plain.named_parameters()
            if param.requires_grad
        }
        assert saved.keys() == expected.keys()
        for fqn, tensor in saved.items():
            assert (tensor - expected[fqn]).abs().max() < 1e-9, fqn


@pytest.mark.parametrize("cut", only([2], [1, 2, 3]))
def test_adapters_are_trained_and_saved_in_stages(cut: int, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft")
    run_ranks(adapted, 3, str(tmp_path / "adapters"), cut, timeout_s=FIRST_CASE_S)
