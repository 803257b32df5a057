"""Inputs of recomputed units in the memory of the host: exact, in order, and gone meanwhile."""

import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan, redistribute
from shardhet.comm import devices
from shardhet.fsdp.microbatch.host_inputs import HostInput
from shardhet.fsdp.step import runtime
from shardhet.models.decoder import Decoder, DecoderConfig
from tests.beside import Beside
from tests.emulated.accelerator import Accelerator
from tests.selection import one_in
from tests.worlds import on_ranks, run_ranks, run_ranks_expecting_failure

MODEL = DecoderConfig(
    vocab_size=16, width=8, num_layers=4, num_heads=2, num_kv_heads=1, hidden_width=8, seq_len=4
)
INPUT_BYTES = MODEL.seq_len * MODEL.width * 8  # of a block, per sample


# Memory


def blocks_on_host(num_microbatches: int = 3, **changes: Any) -> Plan:
    return Plan.by_hand(
        microbatch_sizes=[2],
        num_microbatches=[num_microbatches],
        recompute=True,
        inputs_on_host=[["blocks.*"]],
        **changes,
    )


def tokens(num_samples: int, seq_len: int = MODEL.seq_len) -> Tensor:
    return torch.randint(0, MODEL.vocab_size, (num_samples, seq_len))


class Spied:
    """The store of a model, and what it keeps of blocks."""

    def __init__(self, model: HetFSDP) -> None:
        store = model._runtime._inputs
        assert store is not None
        self.store = store
        self.entered: list[Any] = []  # weak references to storages
        self.num_on_device: list[int] = []  # in each backward turn
        self._own = store.keep, store.reach
        store.keep, store.reach = self._keep, self._reach  # type: ignore[method-assign]

    @property
    def inputs(self) -> list[HostInput]:
        return [each for kept in self.store._now.kept for each in kept.own]

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(each() is not None for each in self.entered)

    @property
    def copied_bytes(self) -> tuple[int, int]:
        return self.store.copies_out.num_bytes, self.store.copies_in.num_bytes

    def _keep(self, fqn: str, tensors: Any, *others: Any) -> Any:
        self.entered += [weakref.ref(t.untyped_storage()) for t in tensors if t.dim() == 3]
        return self._own[0](fqn, tensors, *others)

    def _reach(self, number: int) -> None:
        self._own[1](number)
        self.num_on_device.append(sum(each._tensor is not None for each in self.inputs))


def test_inputs_leave_the_device_in_forward_and_come_back_one_by_one() -> None:
    model = HetFSDP(Decoder(MODEL).double(), blocks_on_host(num_rounds=2))
    spied = Spied(model)
    for i in range(4):
        out, into = spied.copied_bytes
        spied.entered.clear()
        loss = model(tokens(6), tokens(6))
        assert len(spied.entered) == MODEL.num_layers
        assert spied.num_alive == 0
        assert [each._tensor for each in spied.inputs] == [None] * MODEL.num_layers
        model.backward(*loss)
        assert spied.num_on_device[-6:] == [1, 2, 2, 2, 1, 0]  # head, blocks, embedding
        nbytes = MODEL.num_layers * 6 * INPUT_BYTES
        assert spied.copied_bytes == (out + nbytes, into + nbytes)
        assert not spied.inputs
        assert model.step == (i + 1) // 2
        if i == 1:
            model.zero_grad()
    with torch.no_grad():
        model(tokens(6), tokens(6))
    model.eval()
    with torch.no_grad():
        model(tokens(60), tokens(60))
    assert spied.copied_bytes == (out + nbytes, into + nbytes)


def test_an_unfinished_step_leaves_nothing() -> None:
    model = HetFSDP(Decoder(MODEL).double(), blocks_on_host())
    spied = Spied(model)
    first = model(tokens(6), tokens(6))
    loss = model(tokens(6), tokens(6))
    assert len(spied.inputs) == MODEL.num_layers
    model.backward(*loss)
    assert not spied.inputs
    with pytest.raises(RuntimeError, match="a gradient arrived for the output"):
        first[0].backward()


def test_what_backward_passes_over_is_let_go() -> None:
    """The results of two blocks are used by nothing."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, x: Tensor) -> Any:
            y = self.blocks[1](self.blocks[0](x).tanh())
            self.blocks[3](self.blocks[2](y))
            return y.square().sum(), len(x)

    torch.manual_seed(0)
    module = Unused().double()
    plan = Plan.by_hand(microbatch_sizes=[2], recompute=True, inputs_on_host=[["*"]])
    both = Beside(module, plan, units=[nn.Linear])
    for _ in range(2):
        both.step(torch.randn(2, 3).double())
    assert not both.model._runtime._inputs._now.kept  # type: ignore[union-attr]


def test_longer_samples_find_room() -> None:
    model = HetFSDP(Decoder(MODEL).double(), blocks_on_host())
    alone = Decoder(MODEL).double()
    alone.load_state_dict(model.state_dict())
    spied, sizes = Spied(model), []
    for seq_len in (2, 4, 4, 3):
        batch = tokens(6, seq_len)
        loss = model(batch, batch)
        model.backward(*loss)
        expected = alone(batch, batch)
        (expected[0] / expected[1]).backward()
        sizes.append(spied.store.nbytes)
        for (fqn, param), own in zip(alone.named_parameters(), model.parameters(), strict=True):
            assert own.grad is not None
            assert param.grad is not None
            assert torch.allclose(own.grad, param.grad, rtol=1e-12, atol=1e-14), fqn
        alone.zero_grad()
        model.zero_grad()
    assert sizes == sorted(sizes)
    assert sizes[1] == sizes[-1]


class Shared(nn.Module):
    """One tensor is an input of all its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        encoded = y = self.encoder(x)
        for layer in self.layers:
            y = layer(y, encoded).tanh()
        return y.square().sum(), x.shape[0]


def test_a_tensor_that_feeds_many_units_is_copied_once() -> None:
    torch.manual_seed(0)
    module = Shared().double()
    plan = Plan.by_hand(
        microbatch_sizes=[2], num_microbatches=[2], recompute=True, inputs_on_host=True
    )
    model = HetFSDP(copy.deepcopy(module), plan, units=[nn.Linear, nn.Bilinear])
    spied, x = Spied(model), torch.randn(4, 4, dtype=torch.float64)
    model.backward(*model(x))
    loss_sum, count = module(x)
    (loss_sum / count).backward()
    for param, own in zip(module.parameters(), model.parameters(), strict=True):
        assert own.grad is not None
        assert param.grad is not None
        assert torch.allclose(own.grad, param.grad, rtol=1e-12, atol=1e-14)
    # encoded, and what the second and the third layer are passed besides
    assert spied.store.copies_out.num_copies == 3


class Changing(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.where = where

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x = self.layers[0](x)
        y = self.layers[1](x)
        x.add_(1.0)
        y = y if self.where == "last" else self.layers[2](y)
        return y.sum(), len(y)


@pytest.mark.parametrize("where", ["between", "last"])
def test_an_input_that_is_changed_after_its_unit_is_refused(where: str) -> None:
    plan = Plan.by_hand(microbatch_sizes=[2], recompute=True, inputs_on_host=True)
    model = HetFSDP(Changing(where), plan, units=[nn.Linear])
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"unit 'layers\.1'.*changed in place after"):
        model.backward(*model(x))


# Hosts


def _with_little_memory(rank: int, available: list[int]) -> None:
    plan = Plan.by_hand(
        microbatch_sizes=[1, 2],
        num_microbatches=[1, 50],
        recompute=[False, True],
        inputs_on_host=[False, True],
    )
    with mock.patch.object(runtime, "available_bytes", return_value=available[rank]):
        model = HetFSDP(Decoder(MODEL).double(), plan)
        mine = [1, 100][model.position]
        model.backward(*model(tokens(mine), tokens(mine)))


def test_too_little_memory_of_a_host_is_said_on_every_rank() -> None:
    run_ranks(_with_little_memory, 2, [2**20, 2**20])
    outcomes = run_ranks_expecting_failure(_with_little_memory, 2, [2**20, 10_000])
    for each in outcomes:
        assert each.exception_name == "ValueError"
        assert "plan: inputs_on_host: the inputs of positions [1] need " in each.message


def test_where_pinning_is_refused_the_memory_is_pageable() -> None:
    accelerator = Accelerator()
    accelerator.refuses_to_pin = True
    with accelerator.installed():
        model = HetFSDP(Decoder(MODEL).double(), blocks_on_host(), device=accelerator.device)
        spied, batch = Spied(model), tokens(6).to(accelerator.device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.backward(*model(batch, batch))
                model.zero_grad()
    assert sum("refuses to pin" in str(each.message) for each in caught) == 1
    assert spied.copied_bytes == (2 * MODEL.num_layers * 6 * INPUT_BYTES,) * 2


def test_a_refusal_to_pin_is_not_raised_by_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The runtime keeps the error, and torch looks for one after each launch."""
    launched = []

    def ones(*_: int, device: torch.device) -> None:
        launched.append(device)
        raise torch.AcceleratorError("CUDA error: out of memory")

    tensor, device = torch.empty(4), torch.device("cuda", 0)
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", ones)
    assert devices.pin(tensor, tensor.nbytes, device) is None
    assert launched == [device]


def test_memory_is_unpinned_on_the_device_that_it_was_pinned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, done = [0], []

    @contextmanager
    def on_device(index: int) -> Iterator[None]:
        now.append(index)
        yield
        now.pop()

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: 0,
        cudaHostUnregister=lambda address: done.append((address, now[-1])),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    tensor = torch.empty(4)
    unpin = devices.pin(tensor, tensor.nbytes, torch.device("cuda", 1))
    assert unpin is not None
    unpin()
    assert done == [(tensor.data_ptr(), 1)]


def _move(device: torch.device) -> None:
    torch.manual_seed(0)
    module = Decoder(MODEL).double()
    plans = [
        Plan.by_hand(
            microbatch_sizes=sizes, recompute=True, inputs_on_host=on_host, num_rounds=rounds
        )
        for sizes, on_host, rounds in (
            ([1, 2], [True, False], 1),
            ([2, 1], [False, True], 2),
            ([1, 2], [True, True], 1),
            ([1, 2], False, 1),
        )
    ]
    model = HetFSDP(copy.deepcopy(module), plans[0], device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for plan in plans:
        before = model._runtime._inputs
        redistribute(model, optimizer, plan)
        if before is not None:  # nothing is in flight in memory that is given back
            assert before.copies_in._last is before.copies_out._last is None
        mine = plan.sample_indices(model.position)
        batch = torch.arange(plan.global_batch_size * MODEL.seq_len) % MODEL.vocab_size
        batch = batch.view(-1, MODEL.seq_len)
        own = batch[mine].to(device)
        mean = model.forward_backward(own, own)
        loss_sum, count = module(batch, batch)
        assert mean == pytest.approx(float(loss_sum / count), rel=1e-12)
        model.zero_grad()
        on_host = plan.ranks[model.position].inputs_on_host
        assert (model._runtime._inputs is not None) == bool(on_host)


@pytest.mark.parametrize("is_emulated", one_in(2, [False, True]))
@on_ranks(2)
def test_inputs_move_between_device_and_host_with_the_plan(
    rank: int, is_emulated: bool
) -> None:
    """And memory of the host is not given back while it is copied."""
    accelerator = Accelerator()
    device = accelerator.device if is_emulated else torch.device("cpu")
    with accelerator.installed() if is_emulated else nullcontext():
        _move(device)
