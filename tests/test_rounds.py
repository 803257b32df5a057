"""A step of several rounds as programs see it: what calls return, and what they refuse."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardhet import HetFSDP, Plan
from shardhet.fsdp.sharding.unit import UnitState
from shardhet.models.decoder import Decoder, DecoderConfig
from tests.beside import Beside, is_exact
from tests.parity import compare_grads
from tests.worlds import ends_all_ranks, on_ranks

MODEL = DecoderConfig(
    vocab_size=16, width=8, num_layers=2, num_heads=2, num_kv_heads=1, hidden_width=8, seq_len=4
)
FORMS = [(True, True), (False, True), (False, False)]


def plan_of(world_size: int, num_rounds: int, gathers: int = 0, **changes: Any) -> Plan:
    """The last of several ranks only stores."""
    sizes = [2, 1, 0][:world_size] if world_size < 3 else [2, 1, 0]
    forward, backward = FORMS[gathers]
    return Plan.by_hand(
        microbatch_sizes=sizes,
        num_rounds=num_rounds,
        reshard_after_forward=forward,
        reshard_after_backward=backward,
        **changes,
    )


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MODEL.vocab_size, 8)
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, MODEL.vocab_size)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        logits = self.out(self.hidden(self.embedding(inputs)).tanh())
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return loss, targets.numel()


def small(plan: Plan, **options: Any) -> Beside:
    torch.manual_seed(5)
    return Beside(Small().double(), plan, **{"units": [nn.Embedding, nn.Linear], **options})


def tokens(num_samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_samples, MODEL.seq_len)
    inputs, targets = torch.randint(0, MODEL.vocab_size, shape, generator=generator)
    return inputs, targets


def run_round(
    model: HetFSDP, index: int, inputs: Tensor, targets: Tensor, *, factor: float = 1.0
) -> float | None:
    mine = model.plan.round_samples(model.position, index)
    loss_sum, count = model(inputs[mine.start : mine.stop], targets[mine.start : mine.stop])
    return model.backward(loss_sum * factor, count)


class Ways(nn.Module):
    """Visits other units in another way of calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, way: str) -> tuple[Tensor, int]:
        for i in {"all": (0, 1, 2), "first": (0, 1), "last": (2, 0, 2)}[way]:
            x = self.layers[i](x).tanh()
        return x.square().sum(), x.numel()


@pytest.mark.sampled
@pytest.mark.parametrize("gathers", [0, 1, 2])
@pytest.mark.parametrize("each", [True, False])
@on_ranks(3)
def test_a_call_first_met_in_a_later_round_is_probed_and_keeps_the_sums(
    rank: int, gathers: int, each: bool
) -> None:
    plan = plan_of(3, 4, gathers, reduce_each_round=each)
    torch.manual_seed(3)
    both = Beside(Ways().double(), plan, units=[nn.Linear])
    for ways in (("first", "all", "last", "last"), ("all", "all", "all", "first")):
        x = torch.randn(plan.global_batch_size, 3, dtype=torch.float64)
        step_in_ways(both, x, ways, lambda model, x, way: model(x, way)[0])


def step_in_ways(
    both: Beside, x: Tensor, ways: Sequence[str], loss: Callable[..., Any]
) -> None:
    """A step whose rounds call the model in other ways; each sample has as many tokens.

    After the first step the model is called without gradients after each round.
    """
    plan, model = both.plan, both.model
    has_asides = bool(model.step)
    both.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for i, way in enumerate(ways):
        mine = plan.round_samples(model.position, i)
        own = x[mine.start : mine.stop]
        mean = model.backward(loss(model, own, way), own.numel())
        if has_asides:
            look_aside(both, x[: 1 + rank_of(model, i)], way, loss)
        part = x[i * plan.round_size : (i + 1) * plan.round_size]
        total = total + loss(both.plain, part, way) / x.numel()
    total.backward()
    is_exact(mean, total.item())
    compare_grads(model, both.plain)


def rank_of(model: HetFSDP, i: int) -> int:
    """A number that differs between ranks, and 0 on each in turn."""
    return (model.position + i) % model.plan.world_size


def look_aside(both: Beside, x: Tensor, way: str, loss: Callable[..., Any]) -> None:
    """Call the model without gradients, in the same way and unit by unit."""
    model = both.model
    with torch.no_grad():
        expected = loss(both.plain, x, way)
        torch.testing.assert_close(loss(model, x, way), expected, rtol=1e-12, atol=0)
        with model.unit_by_unit():
            found = model.module(x, way)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


class Product(nn.Module):
    """Scores words by products with their embeddings, which no call of the unit gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.hidden, self.out = nn.Linear(4, 4), nn.Linear(4, 7)

    def forward(self, words: Tensor, way: str) -> tuple[Tensor, int]:
        x = self.table(words) if way != "only" else self.table.weight[:1] * words[..., None]
        x = self.hidden(x).tanh()
        scores = self.out(x) if way == "plain" else x @ self.table.weight.T
        return scores.square().sum(), words.numel()


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*so all of its parameters stay unsharded")
@pytest.mark.parametrize("gathers", [0, 1, 2])
@pytest.mark.parametrize("each", [True, False])
@on_ranks(3)
def test_a_unit_that_has_to_stay_unsharded_does_so_in_all_rounds(
    rank: int, gathers: int, each: bool
) -> None:
    plan = plan_of(3, 3, gathers, reduce_each_round=each)
    torch.manual_seed(3)
    both = Beside(Product().double(), plan, units=["table", "hidden", "out"])
    cases = [("plain", "product", "plain"), ("product",) * 3, ("plain", "plain", "only")]
    for ways in (cases, cases[::-1])[gathers % 2]:
        words = torch.randint(0, 7, (plan.global_batch_size, 3))
        step_in_ways(both, words, ways, lambda model, words, way: model(words, way)[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gathers", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@on_ranks(2)
def test_rounds_reduced_once_equal_one_round_in_every_bit(
    rank: int, dtype: torch.dtype, gathers: int
) -> None:
    """16 samples of 4 tokens: a power of two, whose reciprocal does not round."""
    by_rounds = []
    for num_rounds in (1, 4):
        plan = Plan.by_hand(
            microbatch_sizes=[3, 1],
            num_microbatches=[4 // num_rounds] * 2,
            recompute=[True, False],
            num_rounds=num_rounds,
            reshard_after_forward=FORMS[gathers][0],
            reshard_after_backward=FORMS[gathers][1],
            reduce_each_round=False,
        )
        torch.manual_seed(5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        model = HetFSDP(Decoder(MODEL), plan, param_dtype=dtype)
        inputs, targets = tokens(16)
        mine = slice(0, 12) if model.position == 0 else slice(12, 16)
        mean = model.forward_backward(inputs[mine], targets[mine], scaler=scaler)
        grads = [p.grad.as_subclass(Tensor) for p in model.parameters() if p.grad is not None]
        by_rounds.append((mean, grads))
    (one, expected), (several, found) = by_rounds
    assert one == pytest.approx(several, rel=1e-6)
    assert len(expected) == len(found) > 0
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("gathers", [0, 2])
@on_ranks(3)
def test_a_loss_that_is_not_finite_in_any_round_drops_the_whole_step(
    rank: int, gathers: int
) -> None:
    plan = plan_of(3, 3, gathers)
    both, batch = small(plan), tokens(plan.global_batch_size)
    for bad_round in (0, 1, 2):
        for i in range(bad_round):
            assert run_round(both.model, i, *batch) is None
        bad = torch.inf if both.model.position == 1 else 1.0
        with pytest.raises(FloatingPointError, match="the loss is not finite at positions"):
            run_round(both.model, bad_round, *batch, factor=bad)
        assert both.model.step == bad_round + 1
        assert all(param.grad is None for param in both.model.parameters())
        runtime = both.model._runtime
        assert all(unit.state is UnitState.SHARDED for unit in runtime.all_units)
        assert not runtime.executor._launched
    both.step(*batch)


@on_ranks(3)
def test_a_step_may_have_several_batches_of_the_plan(rank: int) -> None:
    """Two batches of the plan a step; the last round of each has fewer samples."""
    plan = plan_of(3, 2, 0, global_batch_size=5)
    both = small(plan)
    model = both.model
    for batches in (2, 1, 2):
        model.batches_per_step = batches
        inputs, targets = tokens(batches * 5)
        for i in range(batches):
            assert model.rounds_left == (batches - i) * 2
            for j in range(2):
                part = slice(5 * i, 5 * (i + 1))
                mean = run_round(model, j, inputs[part], targets[part])
        both.plain.zero_grad()
        is_exact(mean, both.step_of_one(inputs, targets))
        compare_grads(model, both.plain)
        model.zero_grad()
    assert model.step == 3
    with pytest.raises(ValueError, match="batches_per_step is 0"):
        model.batches_per_step = 0


@on_ranks(3)
def test_rounds_are_dropped_on_demand(rank: int) -> None:
    plan = plan_of(3, 3, 2)
    both, batch = small(plan), tokens(plan.global_batch_size)
    model = both.model
    run_round(model, 0, *batch)
    walk = model._runtime.executor
    in_flight = [unit for _, unit in walk._launched]
    assert in_flight
    with mock.patch.object(walk, "_wait", wraps=walk._wait) as wait:
        model.drop_rounds()  # what is in flight would write to what is dropped
    assert [call.args[1] for call in wait.call_args_list] == in_flight
    assert model.is_between_steps
    with torch.no_grad():
        model(*tokens(1))
    both.step(*batch)


@ends_all_ranks(2, "round 2 of 2 of a step comes next")
def test_a_whole_step_does_not_drop_rounds(rank: int) -> None:
    plan = plan_of(2, 2)
    model, batch = small(plan).model, tokens(plan.global_batch_size)
    run_round(model, 0, *batch)
    model.forward_backward(*batch)


@pytest.mark.sampled
@pytest.mark.parametrize("gathers", [0, 1, 2])
@pytest.mark.parametrize("each", [True, False])
@on_ranks(3)
def test_parameters_may_be_read_and_written_between_rounds(
    rank: int, gathers: int, each: bool
) -> None:
    plan = plan_of(3, 3, gathers, reduce_each_round=each)
    both = small(plan)
    inputs, targets = tokens(plan.global_batch_size)
    for _ in range(2):
        both.zero_grad()
        for i in range(3):
            run_round(both.model, i, inputs, targets)
            part = slice(i * plan.round_size, (i + 1) * plan.round_size)
            (both.plain(inputs[part], targets[part])[0] / targets.numel()).backward()
            whole = both.model.module.state_dict()
            for fqn, expected in both.plain.state_dict().items():
                torch.testing.assert_close(whole[fqn], expected, rtol=0, atol=1e-12)
            for model in (both.model, both.plain):
                with torch.no_grad():
                    dict(model.named_parameters())["hidden.weight"].mul_(0.8)
        compare_grads(both.model, both.plain)


@ends_all_ranks(2, "hidden.weight, or a parameter beside it, was written between rounds of")
def test_what_is_gathered_is_not_written_between_rounds(rank: int) -> None:
    plan = plan_of(2, 2, gathers=2)
    model, batch = small(plan).model, tokens(plan.global_batch_size)
    run_round(model, 0, *batch)
    with torch.no_grad():
        model.module.hidden.weight.mul_(0.8)
    run_round(model, 1, *batch)


@ends_all_ranks(2, "embedding.weight, or a parameter beside it, was written after model(...)")
def test_parameters_are_not_written_between_forward_and_backward(rank: int) -> None:
    model = small(plan_of(2, 1)).model
    mine = model.plan.round_samples(model.position, 0)
    loss = model(*(each[mine.start : mine.stop] for each in tokens(3)))
    with torch.no_grad():
        next(model.parameters()).mul_(0.8)
    model.backward(*loss)


@ends_all_ranks(2, "are those of the step before, and the next one has 1 rounds to go")
def test_an_optimizer_does_not_step_in_the_middle_of_a_step(rank: int) -> None:
    plan = plan_of(2, 2)
    both, batch = small(plan), tokens(plan.global_batch_size)
    optimizer = torch.optim.SGD(both.model.parameters(), lr=0.0)
    for _ in range(2):
        both.step(*batch)
        optimizer.step()
    run_round(both.model, 0, *batch)
    optimizer.step()


def test_a_round_that_was_dropped_has_no_backward_and_holds_nothing() -> None:
    model = small(plan_of(1, 2)).model
    inputs, targets = tokens(2)
    model.backward(*model(inputs, targets))
    output = model(inputs, targets)
    model.drop_rounds()
    assert {unit.state for unit in model._runtime.all_units} == {UnitState.SHARDED}
    with pytest.raises(RuntimeError, match="Call the model, then this once"):
        model.backward(*output)


def test_a_step_is_not_left_in_its_middle() -> None:
    model = small(plan_of(1, 2)).model
    inputs, targets = tokens(2)
    model.backward(*model(inputs, targets))
    for gradients in (True, False):
        model(inputs, targets)
        with (
            torch.set_grad_enabled(gradients),
            pytest.raises(RuntimeError, match=r"round 2 of 2 .* model.backward did not follow"),
        ):
            model(inputs, targets)
        model.backward(*model(inputs, targets))  # the step was dropped
    model.drop_rounds()
    with pytest.raises(ValueError, match="got 5 samples but has 2 in each of 2 rounds"):
        model.forward_backward(*tokens(5))


@on_ranks(2)
def test_gradients_that_are_reduced_once_are_held_in_one_buffer(rank: int) -> None:
    plan = plan_of(2, 3, 0, reduce_each_round=False)
    model = small(plan).model
    wholes = set()
    for i in range(3):
        run_round(model, i, *tokens(plan.global_batch_size))
        held = [flat.grad._whole for flat in model._flats]
        wholes |= {(j, each.data_ptr()) for j, each in enumerate(held) if each is not None}
    assert len(wholes) == len(model._flats)


class Attending(nn.Module):
    """All samples attend to the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, int]:
        weights = (self.query(x) @ memory.T).softmax(-1)
        return self.out(weights @ memory).square().sum(), len(x)


@pytest.mark.parametrize(
    "batch_dim, gets_gradient, says",
    [
        ({"memory": None}, False, None),
        (0, False, "'memory' has as many rows as this rank has samples"),
        ({"memory": None}, True, "requires a gradient and is no parameter"),
    ],
)
@on_ranks(2, fresh_world=True)
def test_arguments_that_rounds_cannot_have_are_refused(
    rank: int, batch_dim: Any, gets_gradient: bool, says: str | None
) -> None:
    """It has as many rows as a rank has samples in all rounds."""
    plan = Plan.by_hand(microbatch_sizes=[2, 2], num_rounds=2)
    torch.manual_seed(6)
    both = Beside(Attending().double(), plan, units=[nn.Linear], batch_dim=batch_dim)
    x, memory = torch.randn(8, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    x.requires_grad_(gets_gradient)
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        both.step(x, memory=memory)
