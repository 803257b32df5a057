"""State dicts of modules inside a HetFSDP have whole parameters, or are refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardhet.fsdp.module_proxy
from shardhet import HetFSDP, Plan
from tests.checkpoint_cases import Odd
from tests.edge_plans import UNEVEN, every_plan
from tests.ordinary import WITHIN_S, Net, Pair
from tests.small_models import of_transformers
from tests.worlds import ends_all_ranks, on_ranks, run_ranks


def same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert (found[name] - tensor).abs().max() < 1e-12, name


@every_plan
@on_ranks()
def test_they_are_those_of_one_process_on_every_rank(rank: int, plan: Plan) -> None:
    pair = Pair(plan)
    pair.train(
        [torch.optim.SGD(m.parameters(), 0.1) for m in (pair.model, pair.plain)], bar=1e-12
    )
    for found, expected in (
        (pair.module, pair.plain),
        (pair.module.head, pair.plain.head),
        (pair.model.blocks[1], pair.plain.blocks[1]),
        (pair.module.norm, pair.plain.norm),
        (pair.module.blocks[0].inner, pair.plain.blocks[0].inner),
    ):
        same_state(found.state_dict(prefix="of."), expected.state_dict(prefix="of."))
    pair.backward()
    pair.same_grads()


@on_ranks(2)
def test_tied_and_odd_parameters_have_all_their_names(rank: int) -> None:
    torch.manual_seed(8)
    plain = Odd()
    module = Odd()
    module.load_state_dict(plain.state_dict())
    HetFSDP(module, UNEVEN)
    same_state(module.state_dict(), plain.state_dict())


@every_plan
@on_ranks()
def test_they_are_loaded_into_parts_of_the_model(rank: int, plan: Plan) -> None:
    pair = Pair(plan)
    for found in (pair.module, pair.plain):
        found.blocks[1].load_state_dict(found.blocks[0].state_dict())
        found.head.load_state_dict({"bias": torch.ones(3)}, strict=False)
    pair.same_params(0.0)
    pair.backward()
    pair.same_grads()
    for found in (pair.module, pair.plain):
        torch.manual_seed(9)
        found.load_state_dict(Net().state_dict())
    pair.same_params(0.0)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("alone", "['state_dict', 'exchange']"),
        ("keep_vars", "keep_vars=True is not possible"),
        ("misfit", "size mismatch for weight"),
        ("elsewhere", "another module"),
    ],
)
@ends_all_ranks(2)
def test_what_cannot_be_whole_is_refused_on_all_ranks(rank: int, fault: str, says: str) -> None:
    shardhet.fsdp.module_proxy.SECONDS_FOR_ALL_TO_COME = 1.0  # type: ignore[attr-defined]
    pair = Pair(UNEVEN)
    if fault == "alone" and rank == 0:
        pair.module.state_dict()
    elif fault == "keep_vars":
        pair.module.state_dict(keep_vars=True)
    elif fault == "misfit":
        pair.module.head.load_state_dict(nn.Linear(2, 3).state_dict())
    elif fault == "elsewhere":
        (pair.module.head, pair.module.norm)[rank].state_dict()
    pair.model.exchange([])


def use_peft(rank: int) -> None:
    import peft

    warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain, module = (
        peft.get_peft_model(of_transformers("LlamaForCausalLM"), lora) for _ in range(2)
    )
    HetFSDP(module, UNEVEN)
    same_state(peft.get_peft_model_state_dict(module), peft.get_peft_model_state_dict(plain))
    same_state(module.base_model.model.lm_head.state_dict(), plain.lm_head.state_dict())
    for part in (module, module.base_model):
        for name in ("merge_and_unload", "merge_adapter", "save_pretrained", "push_to_hub"):
            if hasattr(part, name):
                with pytest.raises(RuntimeError, match="save_pretrained"):
                    getattr(part, name)()


def test_adapters_are_whole_and_not_merged() -> None:
    pytest.importorskip("peft")
    run_ranks(use_peft, 2, timeout_s=WITHIN_S * 12)
