"""What torch's modules offer besides a forward works on a HetFSDP, or is refused by name."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import shardhet.fsdp.params.state
import shardhet.fsdp.step.unit_by_unit
import shardhet.fsdp.surface
from shardhet import HetFSDP, Plan
from shardhet.comm.channel import Channel
from tests.checkpoint_cases import Odd
from tests.edge_plans import UNEVEN, every_plan
from tests.ordinary import WIDTH, WITHIN_S, Net, Pair, says
from tests.selection import one_in
from tests.worlds import ends_all_ranks, on_ranks, run_ranks, run_ranks_expecting_failure

# State dicts


@on_ranks(2)
def test_state_dict_takes_a_destination_and_a_prefix(rank: int) -> None:
    pair = Pair(UNEVEN)
    destination: dict[str, Any] = {"before": 1}
    found = pair.model.state_dict(destination=destination, prefix="net.")
    assert found is destination
    expected = pair.plain.state_dict(prefix="net.")
    assert list(found) == (["before", *expected] if rank == 0 else ["before"])
    for name, tensor in expected.items() if rank == 0 else ():
        assert torch.equal(found[name], tensor)


def load_from_one(rank: int, plan: Plan, giver: int) -> None:
    pair = Pair(plan)
    torch.manual_seed(8)
    pair.plain = Net()
    pair.plain.offset += 1
    state = pair.plain.state_dict() if rank == giver else [None, {}][rank % 2]
    result = pair.model.load_state_dict(state)
    assert str(result) == "<All keys matched successfully>"
    pair.same_params(0.0)
    assert torch.equal(pair.module.offset, pair.plain.offset)
    pair.backward()
    pair.same_grads()


@every_plan
def test_one_rank_may_give_the_state_to_all(plan: Plan) -> None:
    for giver in range(len(plan.ranks)):
        run_ranks(load_from_one, len(plan.ranks), plan, giver)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("dropped", [0, 1])
@on_ranks(2)
def test_one_name_of_a_tied_parameter_is_enough(
    rank: int, dropped: int, everywhere: bool
) -> None:
    """Of a tied parameter, as files of transformers leave one out."""
    torch.manual_seed(8)
    model, other = HetFSDP(Odd(), UNEVEN), Odd()
    state = dict(other.state_dict())
    names = [fqn for fqn in state if state[fqn].data_ptr() == other.head.weight.data_ptr()]
    assert len(names) == 2
    del state[names[dropped]]
    given = state if everywhere or rank == 0 else None
    assert str(model.load_state_dict(given)) == "<All keys matched successfully>"
    found = model.state_dict()
    if rank == 0:
        assert all(torch.equal(found[fqn], each) for fqn, each in other.state_dict().items())


@pytest.mark.parametrize("everywhere", [True, False])
@on_ranks(2)
def test_a_state_may_be_loaded_in_part(rank: int, everywhere: bool) -> None:
    pair = Pair(UNEVEN)
    torch.manual_seed(8)
    other = Net()
    state = dict(other.state_dict()) | {"extra": torch.ones(2)}
    del state["blocks.1.inner.weight"]
    result = pair.model.load_state_dict(
        state if everywhere or rank == 0 else None, strict=False
    )
    assert result.missing_keys == ["blocks.1.inner.weight"]
    assert result.unexpected_keys == ["extra"]
    pair.plain.load_state_dict(state, strict=False)
    pair.same_params(0.0)


class Quantized(nn.Module):
    """Parameters of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.int64):
            values = torch.arange(24).view(8, 3).to(dtype)
            param = nn.Parameter(values, requires_grad=False)
            self.register_parameter(f"of_{str(dtype)[6:]}", param)
        self.flags = nn.Parameter(torch.arange(9) % 2 == 0, requires_grad=False)
        self.linear = nn.Linear(3, 3)


@on_ranks(2)
def test_parameters_of_any_dtype_are_dealt_out(rank: int) -> None:
    model = HetFSDP(Quantized(), UNEVEN)
    state = {name: tensor.clone() for name, tensor in Quantized().state_dict().items()}
    state = {name: tensor.flip(0) for name, tensor in state.items()}
    model.load_state_dict(state if rank == 1 else None)
    found = model.state_dict()
    for name, tensor in state.items() if rank == 0 else ():
        if "linear" not in name:
            assert torch.equal(found[name], tensor), name


@on_ranks(1)
def test_one_rank_is_not_given_nothing(rank: int) -> None:
    model = HetFSDP(nn.Linear(2, 2), Plan.even(1, microbatch_size=1))
    for nothing in ({}, None):
        with pytest.raises(ValueError, match="missing \\['bias', 'weight'\\]"):
            model.load_state_dict(nothing)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("assign", "assign=True is not possible"),
        ("keep_vars", "keep_vars=True is not possible"),
        ("shape", "head.weight (1, 6) instead of (3, 6)"),
        ("unexpected", "unexpected ['head.bias2']"),
        ("strict", "ranks differ in strict"),
        ("none", "missing ['blocks.0"),
    ],
)
@ends_all_ranks(2)
def test_states_that_cannot_be_loaded_are_refused(rank: int, fault: str, says: str) -> None:
    pair = Pair(UNEVEN)
    state = pair.plain.state_dict() if rank == 0 else None
    if fault == "assign":
        pair.model.load_state_dict(state, assign=True)
    elif fault == "keep_vars":
        pair.model.state_dict(keep_vars=True)
    elif fault == "shape" and state is not None:
        state["head.weight"] = state["head.weight"][:1]
    elif fault == "unexpected" and state is not None:
        state["head.bias2"] = state["head.bias"]
    elif fault == "strict":
        pair.model.load_state_dict(state, strict=rank == 0)
    pair.model.load_state_dict(state if fault != "none" else None)


def alone_on_rank_zero(rank: int, call: str, over_gloo: bool) -> None:
    doors = (
        shardhet.fsdp.surface,
        shardhet.fsdp.params.state,
        shardhet.fsdp.step.unit_by_unit,
    )
    for module in doors:
        module.SECONDS_FOR_ALL_TO_COME = 1.0  # type: ignore[attr-defined]
    pair = Pair(UNEVEN)
    if over_gloo:
        control = pair.model._control
        object.__setattr__(pair.model, "_control", _without_transport(control))
    if rank == 0:
        if call == "state_dict":
            pair.model.state_dict()
        elif call == "unit_by_unit":
            with pair.model.unit_by_unit():
                pass
        else:
            pair.model.load_state_dict(pair.plain.state_dict())
    dist.barrier()


def _without_transport(channel: Channel) -> Channel:
    return Channel(channel.group, channel.rank_by_position, channel.position)


@pytest.mark.sampled
@pytest.mark.parametrize("over_gloo", [False, True])
@pytest.mark.parametrize("call", ["state_dict", "load_state_dict", "unit_by_unit"])
def test_calls_on_rank_zero_alone_end_all_ranks(call: str, over_gloo: bool) -> None:
    outcomes = run_ranks_expecting_failure(alone_on_rank_zero, 2, call, over_gloo)
    says(outcomes[:1], f"{call}: not all ranks have called it", "outside of `if rank == 0`")
    assert outcomes[1].is_within(WITHIN_S)


# The door to the module inside


@on_ranks(2)
def test_what_the_module_has_is_found_through_the_door(rank: int) -> None:
    pair = Pair(UNEVEN)
    model = pair.model
    assert model.config == {"width": WIDTH}
    assert model.dtype == torch.float64
    before = list(model.module.parameters())
    assert model.num_parameters() == pair.plain.num_parameters()
    after = list(model.module.parameters())
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert model.head is pair.module.head
    assert model.get_submodule("blocks.1.inner") is pair.module.blocks[1].inner
    assert not hasattr(model, "nothing_of_this_name")
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        model.nothing_of_this_name  # noqa: B018
    names = [name for name, _ in model.named_modules()]
    assert names[:4] == ["", "module", "blocks", "blocks.0"]
    assert len(list(model.modules())) == len(list(pair.plain.modules())) + 1
    assert "samples" in repr(model)
    assert "(inner): Linear" in repr(model)
    assert model.eval() is model
    assert not pair.module.training
    assert model.train().training
    assert all(child.training for child in pair.module.modules())
    model.apply(lambda module: setattr(module, "mark", 3))
    assert pair.module.head.mark == 3
    assert [fqn for fqn, _ in model.named_parameters()] == [
        fqn for fqn, _ in pair.plain.named_parameters()
    ]
    for same in (model.double(), model.to("cpu"), model.to(torch.float64), model.cpu()):
        assert same is model
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    assert len(vector) == sum(param.numel() for param in model.parameters())


@every_plan
@on_ranks()
def test_a_method_that_makes_the_optimizer_gets_rows(rank: int, plan: Plan) -> None:
    pair = Pair(plan)
    pair.train([each.configure_optimizers() for each in (pair.model, pair.plain)], bar=1e-9)


def init(pair: Pair) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    pair.model.apply(fill)


def freeze_one(pair: Pair) -> None:
    pair.model.get_parameter("head.weight").requires_grad = False


def call_inside(pair: Pair, name: str) -> None:
    with torch.no_grad():
        getattr(pair.model, name)(torch.ones(2, WIDTH, dtype=torch.float64))


def replace_data(pair: Pair) -> None:
    for param in pair.model.parameters():
        param.data = param.data.clone()


def from_vector(pair: Pair) -> None:
    params = list(pair.model.parameters())
    vector = torch.nn.utils.parameters_to_vector(params)
    torch.nn.utils.vector_to_parameters(vector + 1, params)


def ask_for_optimizer_state(pair: Pair) -> None:
    optimizer = optim.AdamW(pair.model.parameters())
    options = StateDictOptions(full_state_dict=True)
    get_optimizer_state_dict(pair.module, optimizer, options=options)


def merge(pair: Pair) -> None:
    pair.model.module.merge_adapter = pair.model.module.head.extra_repr  # as a PeftModel has it
    pair.model.merge_adapter()


CAST = "parameters cannot be moved or cast"
READS = ": reads or writes parameters"
OUTSIDE = "outside of HetFSDP's forward"
REPLACED = "its data were replaced"
FAULTS: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "to half": (lambda pair: pair.model.half(), CAST),
    "to float": (lambda pair: pair.model.to(torch.float32), CAST),
    "to meta": (lambda pair: pair.model.to("meta"), CAST),
    "freeze": (
        lambda pair: pair.model.requires_grad_(requires_grad=False),
        "Freeze and unfreeze parameters before wrapping",
    ),
    "freeze one": (
        freeze_one,
        "head.weight: requires_grad was changed",
    ),
    "add module": (
        lambda pair: pair.model.add_module("more", nn.Linear(2, 2)),
        "'more' cannot be added to it",
    ),
    "add buffer": (
        lambda pair: pair.model.register_buffer("more", torch.ones(2)),
        "Add it to the model before wrapping",
    ),
    "share": (lambda pair: pair.model.share_memory(), "cannot be shared with other processes"),
    "copy": (lambda pair: copy.deepcopy(pair.model), "it cannot be copied"),
    "in ddp": (
        lambda pair: nn.parallel.DistributedDataParallel(pair.model),
        "it cannot be wrapped in DistributedDataParallel",
    ),
    "compile": (lambda pair: torch.compile(pair.model), "Compile its units before wrapping"),
    "copy head": (
        lambda pair: copy.deepcopy(pair.model.module.head),
        "a module inside it cannot be copied",
    ),
    "average": (
        lambda pair: optim.swa_utils.AveragedModel(pair.model),
        "ema = [p.detach().clone() for p in model.parameters()]",
    ),
    "pickle": (
        lambda pair: torch.save(pair.model, io.BytesIO()),
        "Save model.state_dict() instead",
    ),
    "pickle head": (
        lambda pair: torch.save(pair.model.head, io.BytesIO()),
        "a module inside it cannot be copied or pickled",
    ),
    "model state": (
        lambda pair: get_model_state_dict(pair.model),
        "Instead call on every rank model.state_dict()",
    ),
    "optimizer state": (
        ask_for_optimizer_state,
        "shardhet.checkpoint.save(model, optimizer, folder)",
    ),
    "read": (lambda pair: pair.model.read_head(), f"model.read_head{READS}"),
    "norm": (lambda pair: pair.model.size_of_head(), f"model.size_of_head{READS}"),
    "write": (lambda pair: pair.model.zero_head(), f"model.zero_head{READS}"),
    "init": (init, f"model.apply{READS}"),
    "call unit": (
        lambda pair: pair.model.embed(torch.ones(2, WIDTH, dtype=torch.float64)),
        OUTSIDE,
    ),
    "call submodule": (lambda pair: call_inside(pair, "head"), OUTSIDE),
    "call module of root": (lambda pair: call_inside(pair, "norm"), OUTSIDE),
    "replace data": (replace_data, REPLACED),
    "from vector": (from_vector, REPLACED),
    "merge": (merge, "It adds whole adapters to weights"),
}


def misuse(rank: int, fault: str, culprits: Sequence[int]) -> None:
    pair = Pair(UNEVEN)
    pair.backward()
    if rank in culprits:  # what one rank does ends all
        FAULTS[fault][0](pair)
    pair.backward()


@pytest.mark.parametrize("fault", one_in(3, FAULTS))
def test_what_cannot_be_right_is_refused(fault: str) -> None:
    says(run_ranks_expecting_failure(misuse, 2, fault, (0, 1)), FAULTS[fault][1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", one_in(3, FAULTS))
def test_and_on_one_rank_ends_all(fault: str) -> None:
    says(run_ranks_expecting_failure(misuse, 2, fault, (0,)), FAULTS[fault][1])
