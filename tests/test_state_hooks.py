"""What takes part in torch's state dicts besides parameters and buffers: hooks, extra states,
methods of a model's own, and modules around a HetFSDP.
"""

from typing import Any

import pytest
import torch
from torch import nn

from shardhet import HetFSDP, Plan
from tests.edge_plans import UNEVEN, every_plan
from tests.ordinary import WIDTH, Net
from tests.parity import compare_params
from tests.test_states_inside import same_state
from tests.worlds import ends_all_ranks, on_ranks


class Head(nn.Linear):
    """Saves its weight by another name, twice as large, and an object."""

    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "doubled"] = 2 * destination.pop(prefix + "weight")

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "doubled") / 2
        super()._load_from_state_dict(state, prefix, *others)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head(WIDTH, 3).double()
        self.max = 0.0


def rename(state: dict[str, Any], old: str, new: str) -> None:
    for name in [each for each in state if each.startswith(old)]:
        state[new + name.removeprefix(old)] = state.pop(name)


def hook(model: nn.Module, inside: Any) -> None:
    """Keep the norm under another name; round a block's weights to a grid once loaded."""
    ran: list[str] = []
    inside.ran = ran

    def save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        ran.append("saved")
        rename(state, f"{prefix}norm.", f"{prefix}final.")

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        ran.append("loads")
        rename(state, f"{prefix}final.", f"{prefix}norm.")

    def loaded(module: nn.Module, _: Any) -> None:
        ran.append("loaded")
        with torch.no_grad():
            for each in (inside.blocks[0].outer.weight, inside.offset):
                each.copy_((each * 8).round() / 8)
        inside.max = inside.blocks[1].inner.weight.abs().max().item()

    model.register_state_dict_pre_hook(lambda *_: ran.append("saves"))
    model.register_state_dict_post_hook(save)
    model.register_load_state_dict_pre_hook(load)
    model.register_load_state_dict_post_hook(loaded)


def made(seed: int, seen: int) -> Hooked:
    torch.manual_seed(seed)
    module = Hooked()
    module.head.seen = seen
    return module


@every_plan
@pytest.mark.parametrize("on_model", [False, True])
@on_ranks()
def test_they_take_part_in_those_of_the_model(rank: int, plan: Plan, on_model: bool) -> None:
    plain, module = made(3, 5), made(3, 5)
    model = HetFSDP(module, plan)
    hook(plain, plain)
    hook(model if on_model else module, module)
    found = model.state_dict()
    if rank == 0:
        expected = plain.state_dict()
        assert found.pop("head._extra_state") == expected.pop("head._extra_state")
        same_state(found, expected)
        assert found["offset"] is not module.offset
        assert module.ran == ["saves", "saved"]
        assert found._metadata == expected._metadata  # type: ignore[attr-defined]
    else:
        assert found == {}
        plain.ran.clear()
    other = made(4, 7)
    hook(other, other)
    state = other.state_dict()
    for each in (model, plain):
        assert str(each.load_state_dict(state)) == "<All keys matched successfully>"
        assert each.head.seen == 7
    compare_params(model, plain, bar=0.0, where="here")
    assert torch.equal(module.offset, plain.offset)
    assert (module.max, module.ran[-2:]) == (plain.max, ["loads", "loaded"])
    assert module.ran.count("loaded") == 1


@ends_all_ranks(
    2, "modules ['head'] run code of their own when a state dict is loaded", "on every rank"
)
def test_those_that_load_need_the_state_on_every_rank(rank: int) -> None:
    module = made(3, 5)
    model = HetFSDP(module, UNEVEN)
    model.load_state_dict(made(4, 7).state_dict() if rank == 0 else None)


class Around(nn.Module):
    """Has a model as a part, and a parameter of its own."""

    def __init__(self, inner: nn.Module, value: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), value))
        self.m = inner


@every_plan
@pytest.mark.parametrize("is_hooked", [False, True])
@on_ranks()
def test_a_model_inside_another_module_is_saved_and_loaded(
    rank: int, plan: Plan, is_hooked: bool
) -> None:
    def inner(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return made(seed, seed) if is_hooked else Net()

    plain, parent = Around(inner(3), 1.0), Around(HetFSDP(inner(3), plan), 1.0)
    if is_hooked:
        hook(plain.m, plain.m)
        hook(parent.m, parent.m.module)
    saved, expected = parent.state_dict(), plain.state_dict()
    if rank == 0:
        assert list(saved) == list(expected)
        assert saved._metadata == expected._metadata  # type: ignore[attr-defined]
    source = Around(inner(4), 2.0)
    if is_hooked:
        hook(source.m, source.m)
    state = source.state_dict()
    for each in (plain, parent):
        assert str(each.load_state_dict(state)) == "<All keys matched successfully>"
    compare_params(parent.m, plain.m, bar=0.0, where="here")
    if is_hooked:
        assert parent.m.ran.count("loaded") == 1
    part = {name: each for name, each in state.items() if "norm" not in name} | {"m.x.y": 1}
    for each in (plain, parent) if not is_hooked else ():
        found = each.load_state_dict(part, strict=False)
        assert sorted(found.missing_keys) == ["m.norm.bias", "m.norm.weight"]
        assert found.unexpected_keys == ["m.x.y"]
