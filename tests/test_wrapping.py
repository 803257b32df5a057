"""Which modules become units, found or named, on models of several kinds."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.fsdp.sharding.unit import find_units
from tests.worlds import run_ranks

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class GPT(nn.Module):
    def __init__(self, *, num_blocks: int = 3, ties: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        if ties:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def fqns(root: nn.Module, wanted: Any = None, **how: Any) -> list[tuple[str, ...]]:
    return [unit.fqns for unit in find_units(root, wanted, **how)]


def single(*names: str) -> list[tuple[str, ...]]:
    return [(name,) for name in names]


def warned_of(rank: int, plan: Plan) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        HetFSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan, units=["0", "1"])
    return [str(each.message) for each in caught]


def test_patterns_that_name_no_unit_are_told() -> None:
    plan = Plan.by_hand(
        microbatch_sizes=[1],
        recompute=[["1", "layers.*"]],
        inputs_on_host=[["1", "layers.0"]],
        two_level_units=["0", "head"],
    )
    [found] = run_ranks(warned_of, 1, plan)
    named = "but no unit is named so. The model has 2 units: 0, 1, ..."
    assert found == [
        f"plan: recomputed_units has ['layers.*'] {named}",
        f"plan: inputs_on_host has ['layers.0'] {named}",
        f"plan: two_level_units has ['head'] {named}",
    ]
    known = Plan.by_hand(microbatch_sizes=[1], recompute=[["1"]], two_level_units=["", "0"])
    assert run_ranks(warned_of, 1, known) == [[]]


# Found


def test_a_language_model_is_its_embedding_its_blocks_and_its_head() -> None:
    assert fqns(GPT()) == single("embedding", "blocks.0", "blocks.1", "blocks.2", "head")


def test_an_embedding_tied_to_the_head_is_one_unit_with_it() -> None:
    assert fqns(GPT(ties=True)) == [
        ("embedding", "head"),
        *single("blocks.0", "blocks.1", "blocks.2"),
    ]


def test_units_are_the_modules_themselves() -> None:
    model = GPT(ties=True)
    tied, *blocks = find_units(model, None)
    assert tied.modules == (model.embedding, model.head)
    assert [unit.modules for unit in blocks] == [(block,) for block in model.blocks]


def test_the_layers_of_a_transformer_encoder_are_units() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    assert fqns(nn.TransformerEncoder(layer, 3)) == single("layers.0", "layers.1", "layers.2")


def test_both_stacks_of_a_transformer_are_found() -> None:
    model = nn.Transformer(WIDTH, 2, 2, 2, 32, batch_first=True)
    assert fqns(model) == single(
        "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"
    )


def test_a_sequential_net_is_its_layers_with_parameters() -> None:
    net = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    assert fqns(net) == single("0", "2", "4")


def test_blocks_are_the_outermost_repetition() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    assert fqns(net) == single("0", "1")


def test_lists_are_no_units_because_nobody_calls_them() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
    model.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 64), "b": nn.Linear(WIDTH, 64)})
    units = find_units(model, None)
    assert [unit.fqns[0] for unit in units] == [
        "stages.0.0",
        "stages.0.1",
        "stages.1.0",
        "heads.a",
        "heads.b",
    ]
    assert not any(
        isinstance(m, nn.ModuleList | nn.ModuleDict) for unit in units for m in unit.modules
    )


def test_what_is_tiny_stays_with_the_root_unless_it_is_the_last_that_must_be_kept() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1, bias=False))
    assert fqns(model) == single("0", "1")
    assert fqns(model, keeps_last=True) == single("0", "1", "2")


def test_a_block_that_hangs_in_two_places_is_one_unit() -> None:
    model = nn.Sequential(block := Block(), nn.ReLU(), block, Block())
    assert fqns(model) == single("0", "3")


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.ReLU())])
def test_a_model_without_parts_is_all_root(model: nn.Module) -> None:
    assert fqns(model) == []


def test_models_on_the_meta_device_are_found_alike() -> None:
    with torch.device("meta"):
        model = GPT(ties=True)
    assert fqns(model) == fqns(GPT(ties=True))


# Named


def test_units_may_be_named_by_class_by_fqn_or_both() -> None:
    model = GPT()
    blocks = single("blocks.0", "blocks.1", "blocks.2")
    assert fqns(model, [Block]) == blocks
    assert fqns(model, ["blocks.1"]) == single("blocks.1")
    assert fqns(model, [Block, "head"]) == [*blocks, ("head",)]
    assert fqns(model, ["head", Block, nn.Embedding]) == [("embedding",), *blocks, ("head",)]
    assert fqns(model, []) == []


def test_units_may_be_named_by_patterns_which_are_of_the_outermost_modules() -> None:
    model = GPT()
    blocks = single("blocks.0", "blocks.1", "blocks.2")
    assert fqns(model, ["blocks.*"]) == fqns(model, ["bloc*"]) == blocks
    assert fqns(model, ["blocks.[02]", "head"]) == [blocks[0], blocks[2], ("head",)]
    assert fqns(model, ["*.linears.0"]) == [(f"blocks.{i}.linears.0",) for i in range(3)]
    with pytest.raises(ValueError, match=r"'layers\.\*' is not a module of GPT.*blocks\.0"):
        find_units(model, ["layers.*"])


def test_named_units_that_share_a_parameter_become_one() -> None:
    assert fqns(GPT(ties=True), ["head", "embedding"]) == [("embedding", "head")]


def test_a_parameter_that_the_root_uses_too_does_not_merge_units() -> None:
    model = nn.Module()
    model.one, model.two = nn.Linear(8, 8), nn.Linear(8, 8)
    model.two.weight = model.weight = model.one.weight
    assert fqns(model, ["one", "two"]) == single("one", "two")


def test_units_tied_in_a_chain_become_one() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[2].weight = model[0].weight
    model[3].bias = model[2].bias
    assert fqns(model, [nn.Linear]) == [("0", "2", "3"), ("1",)]


@pytest.mark.parametrize(
    "wanted, candidate",
    [
        ("block.0", "blocks.0"),
        ("heads", "head"),
        ("embeding", "embedding"),
        ("blocks.3", "blocks.2"),
    ],
)
def test_a_name_that_misses_is_answered_with_those_that_come_close(
    wanted: str, candidate: str
) -> None:
    with pytest.raises(ValueError, match=rf"units: '{wanted}' is not a .*\b{candidate}\b"):
        find_units(GPT(), [wanted])


def test_a_class_that_misses_is_answered_with_the_classes_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"units: 'TransformerEncoderLayer' is not a module of GPT"
    ) as caught:
        find_units(GPT(), [nn.TransformerEncoderLayer])
    assert "LayerNorm" in str(caught.value)
    assert "leave units out" in str(caught.value)


def test_the_model_itself_is_no_unit() -> None:
    with pytest.raises(ValueError, match="units: ''"):
        find_units(GPT(), [""])


@pytest.mark.parametrize(
    "wanted", [[Block, nn.LayerNorm], ["blocks", "blocks.0"], [Block, "blocks.1.linears.0"]]
)
def test_a_unit_inside_a_unit_is_refused_by_name(wanted: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"units: 'blocks\S*' contains 'blocks\S*'.* not both"):
        find_units(GPT(), wanted)


class Around(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base


def test_wrappers_around_a_model_without_blocks_are_no_units() -> None:
    """A unit around the whole model, as PEFT's, would have its loss, which is a mean."""
    model = nn.Sequential(nn.Embedding(4, WIDTH), nn.Linear(WIDTH, 4))
    assert fqns(Around(Around(model))) == single("base.base.0", "base.base.1")
