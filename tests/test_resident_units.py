"""Frozen weights of ``resident_units`` are gathered once, and only trainable rows later."""

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan, Stage, redistribute
from shardhet.checkpoint import CheckpointError, load, save
from shardhet.fsdp.microbatch.batching import storage_of
from tests.beside import mean_of, squared
from tests.emulated.accelerator import Accelerator
from tests.parity import compare_grads
from tests.selection import one_in
from tests.test_bytes_of_links import computing, over_messages
from tests.test_order import around_collectives
from tests.worlds import on_ranks, run_ranks

WIDTH, RANK, NUM_LAYERS, ITEMSIZE = 6, 2, 3, 8


# A model with adapters inside its units


class Adapted(nn.Module):
    """A frozen linear layer with a trainable adapter of a low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.base(x) + self.up(self.down(x)))
        return x.clone().add_(inner)  # a write to memory that rows may have had


def make_module() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Adapted() for _ in range(NUM_LAYERS))).double()


def inputs(num_samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)


def wrapped(plan: Plan, module: nn.Module | None = None, **options: Any) -> HetFSDP:
    return HetFSDP(module or make_module(), plan, units=[Adapted], **options)


def own(model: HetFSDP) -> Tensor:
    return inputs(model.plan.global_batch_size)[model.plan.sample_indices(model.position)]


def step(model: HetFSDP) -> list[tuple[str, bool]]:
    """A step's launches: what is launched, and whether it is of trainable parameters."""
    launches: list[tuple[str, bool]] = []
    for param in model.parameters():
        param.grad = None
    x = own(model).to(model.device)
    with around_collectives(lambda kind, flat: launches.append((kind, flat.is_trainable))):
        model.backward(model(x).square().sum(), len(x))
    return launches


def gathers_of_frozen(model: HetFSDP) -> int:
    return step(model).count(("gather", False))


def check_grads(model: HetFSDP, module: nn.Module) -> None:
    """This rank's gradients are those of ``module`` in one process."""
    mean_of(module, inputs(model.plan.global_batch_size), loss=squared)
    compare_grads(model, module)


PLAN = Plan.by_hand(
    microbatch_sizes=[2, 1, 0], state_shares=[0.2, 0.5, 0.3], resident_units=True
)


@on_ranks(3)
def test_frozen_weights_are_gathered_once_and_adapters_as_before(rank: int) -> None:
    model, module = wrapped(PLAN), make_module()
    counts = [gathers_of_frozen(model) for _ in range(3)]
    assert counts[1:] == [0, 0], counts
    check_grads(model, module)
    trainable = [launch for launch in step(model) if launch[1]]
    assert trainable.count(("gather", True)) == 2 * NUM_LAYERS - 1
    assert trainable.count(("reduce", True)) == NUM_LAYERS


# Rows that are a part of what stays


def _apart(model: HetFSDP) -> set[str]:
    """Units of whose frozen rows this rank has a copy beside what it keeps unsharded."""
    return {
        flat.slots[0].fqn[0]
        for flat in model._flats
        if not flat.is_trainable and flat.flat_shard.numel()
        if storage_of(flat.flat_shard) != flat.unsharded_storage
    }


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
@on_ranks(3)
def test_rows_become_a_part_of_what_stays_unless_somebody_has_them(
    rank: int, device: str
) -> None:
    place = Accelerator() if device == "accelerator" else None
    with nullcontext() if place is None else place.installed():
        options = {} if place is None else {"device": place.device}
        model, module = wrapped(PLAN, **options), make_module()
        before = {fqn: param.detach().clone() for fqn, param in model.named_parameters()}
        kept = model.module[0].base.weight.detach()  # of a program: written through later
        frozen_flats = [flat for flat in model._flats if not flat.is_trainable]
        places = [flat.flat_shard.untyped_storage()._cdata for flat in frozen_flats]
        for _ in range(2):
            step(model)
            check_grads(model, module)
        # A rank that only stores keeps no more than its rows.
        has_rows = {"0"} if kept.numel() else set()
        assert _apart(model) == (has_rows if rank < 2 else {"0", "1", "2"}), _apart(model)
        # Memory that had rows may be anybody's now, for later probes too.
        storages = model._runtime._prober._model.storages()
        stay = [flat.slots[0].fqn[0] in _apart(model) for flat in frozen_flats]
        has = [flat.flat_shard.numel() > 0 for flat in frozen_flats]
        found = [place in storages for place in places]
        assert [a for a, b in zip(found, has, strict=True) if b] == [
            a for a, b in zip(stay, has, strict=True) if b
        ]
        for fqn, param in model.named_parameters():
            assert torch.equal(param, before[fqn]), fqn
        if place is not None and rank < 2:
            frozen = (WIDTH + 1) * WIDTH * ITEMSIZE * NUM_LAYERS
            adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
            own = kept.numel() * ITEMSIZE
            for param in model.parameters():
                param.grad = None
            assert place.memory.allocated_bytes <= frozen + own + adapters * ITEMSIZE + 1024
        with torch.no_grad():
            kept.mul_(2)
        assert gathers_of_frozen(model) == 1
        check_grads(model, _as_it_is(model))
        del kept
        step(model)
        assert not _apart(model) or rank == 2
        with torch.no_grad():
            model.module[1].base.weight.mul_(2)
        assert gathers_of_frozen(model) == 1
        check_grads(model, _as_it_is(model))


@on_ranks(3, fresh_world=True)
def test_a_write_between_forward_and_backward_is_refused_on_all_ranks(rank: int) -> None:
    model = wrapped(PLAN)
    step(model)
    loss = model(own(model)).square().sum()
    if rank == 1:
        with torch.no_grad():
            model.module[1].base.weight.mul_(2)
    with pytest.raises(RuntimeError, match="between forward and backward"):
        model.backward(loss, len(own(model)))


# Bytes


def adapted(plan: Plan, device: torch.device) -> HetFSDP:
    """A model that has taken its first step, in which it was probed."""
    model = wrapped(replace(plan, resident_units=("*",)), device=device)
    step(model)
    return model


@pytest.mark.parametrize("seed", one_in(10, range(10)))
def test_messages_of_a_step_are_those_of_adapters(seed: int) -> None:
    for cases in run_ranks(over_messages, 4, seed, adapted):
        assert [sent for sent, *_ in cases] == [+needed for _, needed, _ in cases]
        assert all(kinds <= {True} for *_, kinds in cases)


# Rows that change


def _double(model: HetFSDP) -> None:
    with torch.no_grad():
        for fqn, param in model.named_parameters():
            if "base" in fqn:
                param.mul_(2)


def _double_in_inference(model: HetFSDP) -> None:
    with torch.inference_mode():
        _double(model)


def _double_data(model: HetFSDP) -> None:
    for fqn, param in model.named_parameters():
        if "base" in fqn:
            param.data.mul_(2)


def _double_on_one_rank(model: HetFSDP) -> None:
    # The rows of one rank alone; others have to hear of it.
    if model.position == 1:
        _double(model)


def _load_doubled(model: HetFSDP) -> None:
    state = make_module().state_dict()
    whole = {fqn: 2 * value if "base" in fqn else value for fqn, value in state.items()}
    model.load_state_dict(whole if model.rank == 0 else None)


def _double_rows(model: HetFSDP) -> None:
    for fqn, box in model.sharded_state_dict().items():
        if "base" in fqn:
            box.tensor.mul_(2)


CHANGES: list[Callable[[HetFSDP], None]] = [
    _double, _double_in_inference, _double_data, _double_on_one_rank, _load_doubled,
    _double_rows,
]  # fmt: skip


def _as_it_is(model: HetFSDP) -> nn.Module:
    """The plain model with the values that HetFSDP has now."""
    module = make_module()
    [whole] = [state for state in model._control.exchange_objects(model.state_dict()) if state]
    module.load_state_dict(whole)
    return module


@on_ranks(3)
def test_rows_that_anybody_writes_are_gathered_again(rank: int) -> None:
    for change in CHANGES:
        model = wrapped(PLAN)
        step(model)
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                change(model)
                assert gathers_of_frozen(model), change
            check_grads(model, _as_it_is(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = gathers_of_frozen(model)
        assert bool(again) == (change is _double_data), change


@on_ranks(3)
def test_a_read_of_data_is_warned_of(rank: int) -> None:
    model = wrapped(PLAN)
    step(model)
    next(model.parameters()).data.norm()
    with pytest.warns(UserWarning, match=r"0.base.weight, or a parameter beside it: its .data"):
        step(model)


@on_ranks(3, fresh_world=True)
def test_unfreezing_is_refused_by_name(rank: int) -> None:
    model = wrapped(PLAN)
    step(model)
    dict(model.named_parameters())["0.base.weight"].requires_grad_()
    with pytest.raises(RuntimeError, match=r"0.base.weight: requires_grad was changed"):
        step(model)


@on_ranks(3)
def test_a_checkpoint_is_gathered_anew(rank: int, tmp_path: Path) -> None:
    model = wrapped(PLAN)
    _double(model)
    save(model, None, tmp_path / "saved")
    other = wrapped(PLAN)
    step(other)
    load(other, None, tmp_path / "saved")
    assert gathers_of_frozen(other)
    assert not gathers_of_frozen(other)
    check_grads(other, _as_it_is(model))


@on_ranks(3)
def test_rows_move_to_other_plans(rank: int) -> None:
    model, module = wrapped(PLAN), make_module()
    step(model)
    all_of_them = 2 * NUM_LAYERS - 1  # residents are gathered by the probe of the first step
    for sizes, shares, resident, counts in (
        ([1, 1, 2], [0.0, 0.9, 0.1], True, [0, 0]),
        ([0, 3, 1], [1.0, 0.0, 0.0], True, [0, 0]),
        ([1, 1, 1], [0.3, 0.3, 0.4], False, [all_of_them, all_of_them]),
        ([2, 0, 2], [0.3, 0.3, 0.4], ["1", "2"], [2, 2]),
    ):
        plan = Plan.by_hand(
            microbatch_sizes=sizes, state_shares=shares, resident_units=resident
        )
        model.zero_grad()
        redistribute(model, None, plan)
        assert [gathers_of_frozen(model) for _ in counts] == counts
        check_grads(model, module)
    model.zero_grad()
    with pytest.raises(CheckpointError, match="resident_units has 'nobody'"):
        redistribute(model, None, replace(plan, resident_units=("nobody",)))


# Outside of steps


def _doubled() -> nn.Module:
    module = make_module()
    for fqn, param in module.named_parameters():
        if "base" in fqn:
            param.data.mul_(2)
    return module


@on_ranks(3)
def test_calls_outside_of_steps_are_right_and_ranks_that_store_keep_nothing(rank: int) -> None:
    """Generation and evaluation, on ranks that only store too, before and after training."""
    model, module = wrapped(PLAN), make_module()
    x = inputs(4)
    for trained in (False, True):
        if trained:
            step(model)
        with model.unit_by_unit():
            for _ in range(2 + rank):
                assert torch.allclose(model.module(x), module(x), rtol=1e-12, atol=1e-14)
        with torch.no_grad():
            mine = x[[rank]] if rank else x[:0]
            assert torch.allclose(model(mine), module(mine), rtol=1e-12, atol=1e-14)
    storages = [
        flat._unsharded.untyped_storage().nbytes()
        for flat in model._flats
        if not (flat.is_trainable or flat._is_shard_itself)
    ]
    assert all(storages) == (model.position in computing(PLAN))
    assert any(storages) == all(storages)
    _double(model)
    with model.unit_by_unit():
        assert torch.allclose(model.module(x), _doubled()(x), rtol=1e-12, atol=1e-14)
    assert not gathers_of_frozen(model)
    check_grads(model, _doubled())


# Other precision, other places


@on_ranks(3)
def test_precision_is_as_without_residents(rank: int) -> None:
    """Frozen weights are stored in float32 or in bfloat16, and gathered in bfloat16."""
    for stored in (torch.float32, torch.bfloat16):
        results = []
        for plan in (PLAN, replace(PLAN, resident_units=())):
            module = make_module().float()
            for each in module:
                each.base.to(stored)
            model = wrapped(plan, module, param_dtype=torch.bfloat16)
            frozen = [gathers_of_frozen(model) for _ in range(3)]
            assert frozen[1:] == ([0, 0] if plan.resident_units else [2 * NUM_LAYERS - 1] * 2)
            results.append([p.grad for p in model.parameters() if p.grad is not None])
        assert all(map(torch.equal, *results))


# What is refused


@pytest.mark.parametrize(
    ("resident", "message"),
    [
        ("nobody", "resident_units has 'nobody' but no unit is named so"),
        ("1", "resident_units has '1' but units 1 have no frozen parameter"),
    ],
)
@on_ranks(3, fresh_world=True)
def test_units_without_frozen_parameters_are_refused_by_name(
    rank: int, resident: str, message: str
) -> None:
    module = make_module()
    module[1].requires_grad_()
    plan = replace(PLAN, resident_units=("0", resident))
    with pytest.raises((ValueError, RuntimeError), match=message):
        wrapped(plan, module)


# Stages


def keeps(model: HetFSDP, fqns: Sequence[str]) -> bool:
    """Whether this rank has unsharded just these units' frozen weights, between steps."""
    return all(
        bool(flat._unsharded.untyped_storage().nbytes()) == (flat._unit_fqn in fqns)
        for flat in model._flats
        if not (flat.is_trainable or flat._is_shard_itself)
    )


@on_ranks(4)
def test_each_stage_keeps_its_own_frozen_weights(rank: int) -> None:
    """In steps, called one by one, and after one rank of one stage has written its rows."""
    plan = Plan.by_hand(
        microbatch_sizes=[2, 1, 0, 3],
        state_shares=[0.3, 0.7, 0.4, 0.6],
        num_rounds=2,
        stages=[Stage(units=("0",), num_ranks=2), Stage(units=("[12]",), num_ranks=2)],
        resident_units=True,
    )
    model = wrapped(plan, loss_fn=lambda y: (y.square().sum(), torch.tensor(len(y))))
    expected, x = make_module(), inputs(4)
    for _ in range(2):
        for callers in (range(4), (3,)):
            model.zero_grad()
            model.forward_backward(own(model))
            assert keeps(model, [["0"], ["0"], [], ["1", "2"]][model.position])
            check_grads(model, expected)
            with model.unit_by_unit():
                if model.position in callers:
                    assert torch.allclose(model.module(x), expected(x), rtol=1e-12, atol=1e-14)
        if model.position == 3:
            _double(model)
        expected = _as_it_is(model)


def test_plans_with_residents_are_kept_in_files() -> None:
    plan = Plan.by_hand(microbatch_sizes=[1, 1], resident_units=["blocks.*"])
    assert plan.resident_units == ("blocks.*",)
    assert Plan.from_json(plan.to_json()) == plan
    older = json.loads(Plan.by_hand(microbatch_sizes=[1]).to_json())
    del older["resident_units"]
    assert Plan.from_json(json.dumps(older)) == Plan.by_hand(microbatch_sizes=[1])
    with pytest.raises(ValueError, match=r"Write \['blocks'\]"):
        Plan.by_hand(microbatch_sizes=[1], resident_units="blocks")
