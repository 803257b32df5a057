"""Compiled units give the gradients of eager ones, whatever the plan; failure is no error."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardhet import HetFSDP, Plan, Stage
from shardhet.models.decoder import Decoder
from shardhet.training.compiling import CompiledForward, compile_units, why_not
from tests.selection import for_campaign, one_in
from tests.small_models import small_decoder
from tests.worlds import run_ranks

CPU = torch.device("cpu")
SEQ_LEN = 6
CAPTURES = "aot_eager"  # captures and differentiates as inductor does, and generates no code
PLANS = {
    "ragged": Plan.by_hand(microbatch_sizes=[3], rank_batch_sizes=[7], state_shares=[1.0]),
    "recomputed": Plan.by_hand(
        microbatch_sizes=[3], rank_batch_sizes=[7], state_shares=[1.0], recompute=[True]
    ),
    "uneven": Plan.by_hand(
        microbatch_sizes=[2, 1, 0],
        rank_batch_sizes=[5, 2, 0],
        state_shares=[0.5, 0.2, 0.3],
        recompute=[False, True, False],
    ),
    "stages": Plan.by_hand(
        microbatch_sizes=[2, 1, 3],
        rank_batch_sizes=[2, 1, 3],
        recompute=[False, True, False],
        num_rounds=2,
        stages=[
            Stage(units=("embedding", "blocks.0"), num_ranks=2),
            Stage(units=("blocks.[1-9]", "head"), num_ranks=1),
        ],
    ),
}
TOLERANCE = 1e-5  # of the largest gradient; float32 sums in another order


def decoder(dropout: float = 0.0, num_layers: int = 2) -> Decoder:
    torch.manual_seed(0)
    shape = small_decoder(
        vocab_size=32, seq_len=SEQ_LEN, dropout=dropout, num_layers=num_layers
    )
    return Decoder(shape)


def step_of_rank(
    rank: int, plan: Plan, backend: str | None, dropout: float, num_steps: int
) -> tuple[list[float | None], dict[str, Tensor]]:
    """Losses of the steps, and this rank's rows of the last step's gradients."""
    module = decoder(dropout, num_layers=min(2, plan.world_size))  # each takes seconds
    if backend is not None:
        assert compile_units(module, CPU, backend=backend) is None
    model = HetFSDP(module, plan)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(num_steps):
        model.zero_grad()
        tokens = torch.randint(32, (plan.global_batch_size, SEQ_LEN + 1), generator=generator)
        mine = tokens[plan.sample_indices(model.position)]
        if plan.stages is not None:
            losses.append(model.forward_backward(mine[:, :-1], mine[:, 1:]))
            continue
        loss_sum, num_tokens = model(mine[:, :-1], mine[:, 1:])
        losses.append(model.backward(loss_sum, num_tokens))
    grads = {fqn: param.grad for fqn, param in model.named_parameters()}
    return losses, {fqn: grad for fqn, grad in grads.items() if grad is not None}


def assert_close(found: Any, wanted: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert set(found[1]) == set(wanted[1])
    largest = max(grad.abs().max().item() for grad in wanted[1].values() if grad.numel())
    for fqn, grad in wanted[1].items():
        torch.testing.assert_close(found[1][fqn], grad, rtol=0, atol=TOLERANCE * largest)


@pytest.mark.parametrize(
    "name", ["recomputed", *map(for_campaign, ["uneven", "stages", "ragged"])]
)
def test_compiled_units_give_the_gradients_of_eager_ones(name: str) -> None:
    plan = PLANS[name]
    compiled = run_ranks(step_of_rank, plan.world_size, plan, CAPTURES, 0.0, 2)
    eager = run_ranks(step_of_rank, plan.world_size, plan, None, 0.0, 2)
    for one, other in zip(compiled, eager, strict=True):
        assert_close(one, other)


class Layer(nn.Module):
    """The least that has a matrix and a dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = dropout

    def forward(self, x_BD: Tensor) -> Tensor:
        return F.dropout(self.linear(x_BD).tanh(), self.dropout, self.training)


class Stack(nn.Module):
    """Two layers; generated code is dear, and they share it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))

    def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x_BD = layer(x_BD)
        return x_BD.square().sum(), torch.tensor(len(x_BD))


def grads_of_stack(
    dropout: float, num_samples: int, *, is_compiled: bool, recomputes: bool
) -> list[Tensor]:
    torch.manual_seed(0)
    module = Stack(dropout)
    if is_compiled:
        assert compile_units(module, CPU) is None
    plan = Plan.by_hand(
        microbatch_sizes=[3],
        rank_batch_sizes=[num_samples],
        state_shares=[1.0],
        recompute=recomputes,
    )
    model = HetFSDP(module, plan)
    model.backward(*model(torch.arange(4.0 * num_samples).view(-1, 4).sin()))
    return [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.campaign  # compiled units stay
@pytest.mark.parametrize("dropout, num_samples", one_in(3, [(0.0, 6), (0.0, 7), (0.5, 7)]))
def test_generated_code_does_what_eager_units_do(dropout: float, num_samples: int) -> None:
    kept = grads_of_stack(dropout, num_samples, is_compiled=True, recomputes=False)
    assert len(kept) == 4
    torch.testing.assert_close(
        grads_of_stack(dropout, num_samples, is_compiled=True, recomputes=True),
        kept,
        rtol=0,
        atol=1e-6,
    )
    if not dropout:  # which it draws in its own way
        eager = grads_of_stack(dropout, num_samples, is_compiled=False, recomputes=False)
        torch.testing.assert_close(kept, eager, rtol=0, atol=1e-6)


def test_a_unit_that_cannot_be_compiled_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such operation")

    layer = nn.Linear(4, 4)
    forward = CompiledForward("layers.0", layer.forward, breaks)
    x = torch.ones(2, 4)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(forward(x), layer(x))
    assert "layers.0 runs eagerly" in caplog.text
    assert "no such operation" in caplog.text


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()  # what is compiled already needs no compiler
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/no/such/compiler"))
    reason = why_not(CPU)
    assert reason is not None
    assert "No working C++ compiler" in reason
    module = decoder()
    assert compile_units(module, CPU) == reason
    assert not any(isinstance(each.forward, CompiledForward) for each in module.modules())


def test_a_model_that_is_compiled_around_its_units_is_refused() -> None:
    plan = Plan.even(1, microbatch_size=2)
    whole: Any = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), backend="eager")
    with pytest.raises(ValueError, match="the model is compiled around its units"):
        HetFSDP(whole, plan)
    part = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    part[0].compile(backend="eager")
    with pytest.raises(ValueError, match="'0' is compiled around its units"):
        HetFSDP(part, plan, units=[nn.Linear])
    alone = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    alone[0].compile(backend="eager")
    model = HetFSDP(alone, plan, units=[nn.Linear])
    with pytest.raises(RuntimeError, match="cannot be compiled as a whole"):
        model.compile()
